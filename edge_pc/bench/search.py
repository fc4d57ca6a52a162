"""Finds the settings at which full prefill is fastest: the baseline that reuse is measured against must be fair.

A short search: threads first, then how many tokens at a time (and for llama.cpp flash attention) at the best number of
threads. Every candidate's times are rows of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.bench.report import Section
from edge_pc.bench.timing import Way, describe_samples, interleave

# Another setting than the engine's own must be faster by more than chance to be taken.
_MARGIN = 0.98

ONNX_CHUNKS = (128, 512, 1024)  # beside the backend's own
LLAMA_BATCHES = (512, 2048)


@dataclass(frozen=True, slots=True)
class Best:
    """What the search found.

    Attributes:
        settings: of full prefill.
        own: whether they are the engine's own.
        ms_per_token: it took at these settings.
    """

    settings: dict[str, Any]
    own: bool
    ms_per_token: float


def thread_counts(asked: int | None, allowed: int) -> list[int]:
    """Numbers of threads to try: what was asked for; else all allowed CPUs and half of them (two may share a core)."""
    return [asked] if asked else sorted({allowed, max(1, allowed // 2)}, reverse=True)


def best_of(
    section: Section, backend: str, candidates: Mapping[str, tuple[dict[str, Any], Way]], tokens: int, rounds: int
) -> Best:
    """Time the candidates in turn, add a row for each, and give the fastest; the first is the engine's own.

    Rows that are there already are not measured again.
    """
    keys = {name: f"{backend}/search/{name}" for name in candidates}
    missing = {name: way for name, (_, way) in candidates.items() if not section.row_done(keys[name])}
    if missing:
        samples = interleave(missing, dict.fromkeys(missing, rounds))
        for name in missing:
            row = {"backend": backend, "way": "search", "tokens": tokens, "settings": candidates[name][0]}
            section.add(keys[name], {**row, **describe_samples(samples[name])})
    times = {name: _median(section, keys[name]) for name in candidates}
    own = next(iter(candidates))
    fastest = min(times, key=lambda name: times[name])
    chosen = fastest if times[fastest] < times[own] * _MARGIN else own
    return Best(candidates[chosen][0], chosen == own, times[chosen] / tokens)


def search_onnx(section: Section, folder: Path, threads: Sequence[int], tokens: int, rounds: int) -> Best:
    """The best number of threads and chunk size for an exported model."""
    from edge_pc.backends.onnx.backend import CHUNK_TOKENS
    from edge_pc.bench.full_onnx import OnnxFull

    token_ids = np.arange(tokens, dtype=np.int32) % 100 + 10
    full = {count: OnnxFull(folder, count, tokens) for count in threads}

    def candidate(count: int, chunk: int) -> tuple[dict[str, Any], Way]:
        return {"threads": count, "chunk_tokens": chunk}, _timed(lambda ids: full[count].prefill(ids, chunk), token_ids)

    by_threads = {f"threads={count}/chunk={CHUNK_TOKENS}": candidate(count, CHUNK_TOKENS) for count in threads}
    count = best_of(section, "onnx", by_threads, tokens, rounds).settings["threads"]
    sizes = [CHUNK_TOKENS, *(chunk for chunk in ONNX_CHUNKS if chunk <= tokens)]
    return best_of(
        section, "onnx", {f"threads={count}/chunk={chunk}": candidate(count, chunk) for chunk in sizes}, tokens, rounds
    )


def search_llama(section: Section, path: Path, threads: Sequence[int], tokens: int, rounds: int) -> Best:
    """The best number of threads, batch and attention for a GGUF file."""
    from edge_pc.bench.llama_direct import LlamaDirect, LlamaSettings

    token_ids = np.arange(tokens, dtype=np.int32) % 100 + 10

    def candidate(stack: ExitStack, settings: LlamaSettings) -> tuple[dict[str, Any], Way]:
        opened: list[LlamaDirect] = []

        def prefill(ids: IntArray) -> Logits:
            if not opened:
                opened.append(stack.enter_context(closing(LlamaDirect(path, settings, tokens))))
            opened[0].clear()
            return opened[0].append(ids)

        values = {"threads": settings.threads, "batch": settings.batch, "flash": settings.flash}
        return values, _timed(prefill, token_ids)

    def named(stack: ExitStack, wanted: Sequence[LlamaSettings]) -> dict[str, tuple[dict[str, Any], Way]]:
        return {f"threads={s.threads}/batch={s.batch}/flash={s.flash}": candidate(stack, s) for s in wanted}

    with ExitStack() as stack:
        first = named(stack, [LlamaSettings(count, LLAMA_BATCHES[0], False) for count in threads])
        count = best_of(section, "llamacpp", first, tokens, rounds).settings["threads"]
        batches = [batch for batch in LLAMA_BATCHES if batch <= max(tokens, LLAMA_BATCHES[0])]
        settings = [LlamaSettings(count, batch, flash) for flash in (False, True) for batch in batches]
        return best_of(section, "llamacpp", named(stack, settings), tokens, rounds)


def _timed(prefill: Callable[[IntArray], Logits], token_ids: IntArray) -> Way:
    import time

    def way() -> dict[str, float]:
        started = time.perf_counter()
        prefill(token_ids)
        return {"forward": (time.perf_counter() - started) * 1e3}

    return way


def _median(section: Section, key: str) -> float:
    row = section.row(key)
    return float(row["median_ms"]["forward"]) if row else float("inf")
