"""`bench ttft` from options to a summary: opens each backend, searches its baseline, measures, draws conclusions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_pc.backends.base import IntArray, Logits
from edge_pc.bench.report import Progress, Report, Section, no_progress
from edge_pc.bench.search import Best, search_llama, search_onnx, thread_counts
from edge_pc.bench.setup import (
    BenchOptions,
    backend_facts,
    chosen_backends,
    model_path,
    open_engine,
    states_folder,
)
from edge_pc.bench.subject import EngineSubject, FullPrefill
from edge_pc.bench.texts import Texts
from edge_pc.bench.ttft import TtftSettings, measure, other_ways
from edge_pc.bench.ttft_summary import summarize
from edge_pc.system.cpu import allowed_cpus

SECTION = "ttft"


def run_ttft(
    report: Report,
    options: BenchOptions,
    settings: TtftSettings,
    progress: Progress = no_progress,
    *,
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `ttft` and return it.

    Raises:
        OptionError: the report's section was begun with other settings.
        ModelError, MissingDependencyError: a backend or its model cannot be opened.
    """
    backends = chosen_backends(options)
    asked = settings.as_dict() | {"threads": options.threads, "backends": backend_facts(options, backends)}
    section = report.section(SECTION, asked, command=command, restart=restart)
    with states_folder(options) as folder:
        for backend in backends:
            _run_backend(section, backend, options, settings, folder, progress)
    section.summarize(summarize(section.rows))
    return section


def _run_backend(
    section: Section, backend: str, options: BenchOptions, settings: TtftSettings, folder: Path, progress: Progress
) -> None:
    progress(0, 0, f"{backend}: searching for full prefill's best settings")
    path = model_path(options, backend)
    search = search_onnx if backend == "onnx" else search_llama
    fixed = options.threads or (None if settings.search_threads else allowed_cpus())
    threads = thread_counts(fixed, allowed_cpus())
    best = search(section, path, threads, settings.search_tokens, settings.search_repeats)
    baseline = {"backend": backend, "way": "baseline", "settings": best.settings, "own": best.own}
    section.add(f"{backend}/baseline", baseline)
    with open_engine(options, backend, folder, best.settings["threads"]) as engine:
        positions = engine.spec.max_positions
        texts = Texts(engine.tokenizer)
        with _baseline(backend, path, best, positions) as full:
            measure(
                section, backend, EngineSubject(engine, full), texts, settings,
                max_positions=positions, full_ms_per_token=best.ms_per_token, progress=progress,
            )  # fmt: skip
    if backend == "llamacpp":
        other_ways(
            section, path, texts, settings,
            threads=best.settings["threads"], max_positions=positions, folder=folder, progress=progress,
        )  # fmt: skip


@contextmanager
def _baseline(backend: str, path: Path, best: Best, capacity: int) -> Iterator[FullPrefill | None]:
    """Full prefill at the settings found; None when those are the engine's own."""
    if best.own:
        yield None
    elif backend == "onnx":
        from edge_pc.bench.full_onnx import OnnxFull

        full = OnnxFull(path, best.settings["threads"], capacity)
        yield lambda token_ids: full.prefill(token_ids, best.settings["chunk_tokens"])
    else:
        from edge_pc.bench.llama_direct import LlamaDirect, LlamaSettings

        direct = LlamaDirect(path, LlamaSettings(**best.settings), capacity)

        def prefill(token_ids: IntArray) -> Logits:
            direct.clear()
            return direct.append(token_ids)

        try:
            yield prefill
        finally:
            direct.close()
