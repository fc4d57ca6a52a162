"""A machine that is made up: its engine only says how long things took, so that no test depends on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.bench.report import Report
from edge_pc.bench.subject import Prepared
from edge_pc.bench.texts import Case, Shape
from edge_pc.bench.timing import Sample, Way
from edge_pc.bench.ttft import TtftSettings, measure
from edge_pc.bench.ttft_summary import summarize

POSITIONS = 8192
SMALL = TtftSettings(
    lengths=(16, 1024, 2048, 4096, 8000), new_tokens=(1, 32), shares=(0, 50, 100), modules=(1, 4), repeats=3
)

MACHINE: dict[str, Any] = {
    "vendor": "AMD",
    "cpu": "Imaginary 7",
    "family": "1/2/3",
    "instruction_sets": ["AVX2"],
    "cores": 4,
    "allowed_cores": 4,
    "memory_bytes": 8 << 30,
    "allowed_memory_bytes": 8 << 30,
    "system": "Linux 6",
    "architecture": "x86_64",
    "versions": {"edge-pc": "0", "python": "CPython 3"},
    "kernels": {"onnx": "8-bit blocks: AVX2", "llamacpp": "CPU : AVX2 = 1 |"},
    "governor": "",
    "rates": {"copy_gbps": 10.0, "read_gbps": 10.0, "float32_gflops": 100.0, "int8_gflops": 100.0},
}
MODEL = {
    "model": {
        "name": "made-up", "architecture": "llama", "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64,
        "hidden_size": 576, "vocab_size": 49152, "max_positions": POSITIONS,
    },
    "threads": 4,
}  # fmt: skip
BACKENDS = {
    name: {"quantization": "q8", "weight_bytes": 150_000_000, "matmul_parameters": 106_000_000}
    for name in ("onnx", "llamacpp")
}


class PlainTexts:
    """Cases that carry their own shape."""

    def case(self, shape: Shape) -> Case:
        return Case(f"{shape.cached} {shape.modules}", f"{shape.cached} {shape.new} {shape.modules}")


class StubSubject:
    """Says that full prefill takes `per_token` ms a token, growing, and reuse 20 ms and a bit for each cached token.

    Args:
        slowness: multiplies every time.
        interrupt_after: raises KeyboardInterrupt at this many calls of a way.
    """

    def __init__(self, slowness: float = 1.0, interrupt_after: int | None = None) -> None:
        self.slowness = slowness
        self.interrupt_after = interrupt_after
        self.calls: list[str] = []

    def prepare(self, case: Case) -> Prepared:
        cached, new, _ = map(int, case.prompt.split())
        ids = np.zeros(cached + new, dtype=np.int32)
        return Prepared(cached, self._full(cached), (), ids, cached, max(new, 2))

    @contextmanager
    def ways(self, case: Case) -> Iterator[dict[str, Way]]:
        cached, new, modules = map(int, case.prompt.split())
        reuse = 20 + 0.01 * cached + new + modules
        yield {
            "cached": lambda: self._say("cached", reuse),
            "in_place": lambda: self._say("in_place", 0.95 * reuse),
            "full": lambda: self._say("full", self._full(cached + new)),
        }

    def cold(self, case: Case, files: tuple[Path, ...]) -> Sample:
        cached, new, modules = map(int, case.prompt.split())
        return {**self._say("cold", 40 + 0.02 * cached + new + modules), "resident": 0.0}

    def remove_states(self) -> None:
        self.calls.append("remove")

    def _full(self, tokens: int) -> float:
        return tokens + tokens**2 / 10_000

    def _say(self, way: str, ms: float) -> Sample:
        self.calls.append(way)
        if self.interrupt_after is not None and len(self.calls) > self.interrupt_after:
            raise KeyboardInterrupt
        times = {"parse": 1.0, "assembly": 2.0, "forward": ms - 3, "later_token": 9.0}
        return {"ttft": ms * self.slowness, **{stage: time * self.slowness for stage, time in times.items()}}


def made_up_report(path: Path, *, slowness: float = 1.0, rates: float = 1.0) -> Report:
    """A report with times to first token of both backends, on a machine whose rates are `rates` times the usual."""
    machine = MACHINE | {"rates": {name: rate * rates for name, rate in MACHINE["rates"].items()}}
    report = Report.create(path, command=["edge-pc", "bench", "ttft"], machine=machine, settings=MODEL)
    section = report.section("ttft", SMALL.as_dict() | {"backends": BACKENDS}, command=["edge-pc", "bench", "ttft"])
    for backend in BACKENDS:
        settings = {"threads": 4, "chunk_tokens": 512}
        search = {"backend": backend, "way": "search", "tokens": 512, "settings": settings}
        section.add(f"{backend}/search/a", search | {"median_ms": {"forward": 500.0}})
        section.add(f"{backend}/baseline", {"backend": backend, "way": "baseline", "settings": settings, "own": True})
        slower = slowness * (2 if backend == "llamacpp" else 1)
        measure(
            section, backend, StubSubject(slower), PlainTexts(), SMALL,  # type: ignore[arg-type]
            max_positions=POSITIONS, full_ms_per_token=1.0,
        )  # fmt: skip
    section.summarize(summarize(section.rows))
    return report
