"""`bench memory`: bytes per token, here and for the paper's models; what concurrent prompts share; disk.

Prompts are held open over the same cached tokens, several in one process and one in each of several processes, while
this process reads how the system counts their memory (`held.py`, `smaps.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edge_pc.bench.names import BACKEND_NAMES
from edge_pc.bench.paper_models import PAPER_MODELS
from edge_pc.bench.report import Progress, Report, Row, Section, no_progress
from edge_pc.bench.setup import BenchOptions, chosen_backends, open_engine, states_folder
from edge_pc.bench.smaps import Memory, available_bytes, memory_of
from edge_pc.bench.subject import EngineSubject
from edge_pc.bench.texts import Shape, Texts
from edge_pc.errors import EdgePCError
from edge_pc.system.sizes import format_size

SECTION = "memory"

# Memory that must stay free for the rest of the machine.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What `bench memory` measures.

    Attributes:
        tokens: cached tokens that all prompts share, one module; fewer when the model takes fewer.
        new_tokens: of each prompt's own text.
        prompts: numbers of prompts open at once, rising.
    """

    tokens: int = 4096
    new_tokens: int = 32
    prompts: tuple[int, ...] = (1, 4, 16)

    @classmethod
    def quick(cls) -> MemorySettings:
        """A size that takes a few seconds."""
        return cls(tokens=512, prompts=(1, 2))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_memory(
    report: Report,
    options: BenchOptions,
    settings: MemorySettings,
    progress: Progress = no_progress,
    *,
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `memory` and return it."""
    backends = chosen_backends(options)
    asked = settings.as_dict() | {"backends": backends}
    section = report.section(SECTION, asked, command=command, restart=restart)
    for model in PAPER_MODELS:
        row = {"kind": "calculated", "model": model.name, "figure_mb": model.figure, "calculated_mb": model.paper_mb}
        row |= {"bytes_per_token": model.paper_bytes, "stored_bytes_per_token": model.stored_bytes}
        section.add(f"calculated/{model.name}", row)
    with states_folder(options) as folder:
        for backend in backends:
            _run_backend(section, backend, options, settings, folder, progress)
    section.summarize(summarize(section.rows))
    return section


def _run_backend(
    section: Section, backend: str, options: BenchOptions, settings: MemorySettings, folder: Path, progress: Progress
) -> None:
    steps = 1 + len(settings.prompts)
    progress(0, steps, f"{backend}: encoding")
    tokens = _store_states(section, backend, options, settings, folder)
    request = {
        "model": options.model,
        "gguf": str(options.gguf) if options.gguf else None,
        "threads": options.threads,
        "folder": str(folder),
        "backend": backend,
        "tokens": tokens,
        "new": settings.new_tokens,
    }
    progress(1, steps, f"{backend}: prompts in one process")
    if not section.row_done(_key(backend, "one process", settings.prompts[-1])):
        for prompts, memory in _in_one_process({**request, "steps": list(settings.prompts)}):
            section.add(_key(backend, "one process", prompts), _row(backend, "one process", prompts, [memory]))
    for index, count in enumerate(settings.prompts[1:], start=2):
        progress(index, steps, f"{backend}: {count} processes")
        if not section.row_done(_key(backend, "processes", count)):
            _measure_processes(section, backend, {**request, "steps": [1]}, count)
    progress(steps, steps, f"{backend}: done")


def _store_states(section: Section, backend: str, options: BenchOptions, settings: MemorySettings, folder: Path) -> int:
    """Encode the module that all prompts share, and say what it takes on disk; gives its tokens."""
    with open_engine(options, backend, folder) as engine:
        tokens = min(settings.tokens, engine.spec.max_positions - settings.new_tokens - 2)
        subject, layout = EngineSubject(engine), engine.backend.kv_layout
        case = Texts(engine.tokenizer).case(Shape(tokens, settings.new_tokens))
        stats = [path.stat() for path in subject.prepare(case).files]
        _, prompt = subject.lay_out(case)
        nbytes = sum(layout.nbytes(encoding.kept_position_ids) for encoding in prompt.encodings)
    row = {
        "kind": "states",
        "backend": backend,
        "tokens": tokens,
        "dtype": layout.dtype,
        "bytes_per_token": nbytes / tokens,
        "states_bytes": nbytes,
        "file_bytes": sum(stat.st_size for stat in stats),
        "disk_bytes": sum(getattr(stat, "st_blocks", 0) * 512 for stat in stats),
    }
    section.add(f"{backend}/states", row)
    return tokens


@contextmanager
def _holder(request: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that holds prompts; it ends with the block."""
    command = [sys.executable, "-m", "edge_pc.bench.held", json.dumps(request)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _step(child: subprocess.Popen[str], *, go_on: bool) -> int:
    """Let a holder reach its next step; gives the number of prompts that it holds."""
    if child.stdin is None or child.stdout is None:
        raise EdgePCError("the process that holds prompts has no pipes")
    if go_on:
        child.stdin.write("\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise EdgePCError("the process that holds prompts ended early; its own message is above")
    return int(json.loads(line)["prompts"])


def _in_one_process(request: dict[str, Any]) -> Iterator[tuple[int, Memory]]:
    with _holder(request) as child:
        for index in range(1 + len(request["steps"])):
            prompts = _step(child, go_on=index > 0)
            memory = memory_of(child.pid)
            if memory is not None:
                yield prompts, memory


def _measure_processes(section: Section, backend: str, request: dict[str, Any], count: int) -> None:
    """A row of `count` processes with a prompt each, unless they would not fit into memory."""
    one = section.row(_key(backend, "one process", 1))
    available = available_bytes()
    if one and available is not None and one["private_dirty_bytes"] * count > available - _SPARE_BYTES:
        section.add(
            _key(backend, "processes", count),
            {"kind": "processes", "backend": backend, "prompts": count, "skipped": "not enough free memory"},
        )
        return
    with ExitStack() as held:
        children = []
        for _ in range(count):
            child = held.enter_context(_holder(request))
            _step(child, go_on=False)
            _step(child, go_on=True)
            children.append(child)
        found = [memory for child in children if (memory := memory_of(child.pid)) is not None]
    if found:
        section.add(_key(backend, "processes", count), _row(backend, "processes", count, found))


def _row(backend: str, kind: str, prompts: int, memories: Sequence[Memory]) -> Row:
    """Sums over all processes."""
    sums = {f"{field.name}_bytes": sum(getattr(m, field.name) for m in memories) for field in fields(Memory)}
    return {"kind": kind, "backend": backend, "prompts": prompts, **sums}


def _key(backend: str, kind: str, prompts: int) -> str:
    return f"{backend}/{kind}/{prompts}"


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """What prompts add beyond the opened model, and whether the paper's figures come out."""
    calculated = [row for row in rows if row["kind"] == "calculated"]
    summary: dict[str, Any] = {
        "paper_figures_come_out": all(row["figure_mb"] == row["calculated_mb"] for row in calculated)
    }
    for states in (row for row in rows if row["kind"] == "states"):
        backend = states["backend"]
        found = {row["prompts"]: row for row in rows if row.get("backend") == backend and row["kind"] == "one process"}
        if 0 not in found:
            continue
        base = found.pop(0)
        summary[backend] = {
            str(prompts): {
                "added_private_bytes": row["private_dirty_bytes"] - base["private_dirty_bytes"],
                "added_pss_bytes": row["pss_bytes"] - base["pss_bytes"],
                "copies_would_take_bytes": prompts * states["states_bytes"],
            }
            for prompts, row in found.items()
        }
    return summary


def findings(summary: dict[str, Any]) -> list[str]:
    """The summary in sentences, for people."""
    come_out = "come out" if summary["paper_figures_come_out"] else "do not come out"
    lines = [f"the paper's Table 2: its bytes per token {come_out} of layers, heads and head size"]
    for backend, found in summary.items():
        if not isinstance(found, dict):
            continue
        for prompts, added in found.items():
            private, pss, copies = (format_size(max(0, size)) for size in added.values())
            lines.append(
                f"{BACKEND_NAMES[backend]}: {prompts} prompt(s) at once add {private} private memory "
                f"({pss} with their part of shared pages); copies would take {copies}"
            )
    return lines
