"""A machine that is made up: its engine only says how long things took, so that no test depends on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import explain
from benchmarks.rows import Rates, RatesRow
from edge_pc.bench import baseline, ttft_pictures, ttft_tables
from edge_pc.bench.benches import BENCHES, BenchEntry
from edge_pc.bench.report import Report, Section
from edge_pc.bench.rows import BaselineRow, Row, TtftRow
from edge_pc.bench.texts import Case, Shape, Texts
from edge_pc.bench.timing import Sample, Way
from edge_pc.bench.ttft import Points, Settings, axes
from edge_pc.bench.ways import EngineWays, Prepared
from edge_pc.bench.work import BenchOptions, fill

POSITIONS = 8192
SMALL = Settings(
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
}
MODEL = {
    "model": {
        "name": "made-up", "architecture": "llama", "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64,
        "hidden_size": 576, "vocab_size": 49152, "max_positions": POSITIONS,
    },
    "threads": 4,
}  # fmt: skip
BACKENDS = ("onnx", "llamacpp")


class PlainTexts(Texts):
    """Cases that carry their own shape."""

    def __init__(self) -> None:
        """No tokenizer is needed."""

    def case(self, shape: Shape) -> Case:
        return Case(f"{shape.cached} {shape.modules}", f"{shape.cached} {shape.new} {shape.modules}")


class StubWays(EngineWays):
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
        return Prepared(full_ms(cached), (), np.zeros(cached + new, dtype=np.int32), cached, max(new, 2))

    def ways(self, case: Case) -> dict[str, Way]:
        cached, new, modules = map(int, case.prompt.split())
        reuse = 20 + 0.01 * cached + new + modules
        return {
            "cached": lambda: self._say("cached", reuse),
            "in_place": lambda: self._say("in_place", 0.95 * reuse),
            "full": lambda: self._say("full", full_ms(cached + new)),
        }

    def cold(self, case: Case, files: tuple[Path, ...]) -> tuple[Sample, float]:
        cached, new, modules = map(int, case.prompt.split())
        return self._say("cold", 40 + 0.02 * cached + new + modules), 0.0

    def remove_states(self) -> None:
        self.calls.append("remove")

    def _say(self, way: str, ms: float) -> Sample:
        self.calls.append(way)
        if self.interrupt_after is not None and len(self.calls) > self.interrupt_after:
            raise KeyboardInterrupt
        times = {"parse": 1.0, "assembly": 2.0, "forward": ms - 3, "later_token": 9.0}
        return {"ttft": ms * self.slowness, **{stage: time * self.slowness for stage, time in times.items()}}


def full_ms(tokens: int) -> float:
    return tokens + tokens**2 / 10_000


def new_report(path: Path, machine: dict[str, Any] = MACHINE) -> Report:
    return Report.create(path, command=["edge-pc", "bench", "ttft"], machine=machine, settings=MODEL)


def new_section(report: Report, kind: type[Row] = Row, name: str = "ttft", **settings: Any) -> Section[Any]:
    about = BENCHES[name].load().about if name in BENCHES else ""
    return report.section(name, kind, name, settings, about=about, command=["edge-pc", "bench", name])


def points(section: Section[TtftRow], backend: str, ways: EngineWays) -> Points:
    return Points(
        section=section, backend=backend, ways=ways, texts=PlainTexts(), settings=SMALL,
        axes=axes(SMALL, POSITIONS), full_ms_per_token=1.0,
    )  # fmt: skip


def made_up_report(path: Path, *, slowness: float = 1.0, rates: float = 1.0) -> Report:
    """A report with times to first token of both backends, on a machine whose rates are `rates` times the usual."""
    report = new_report(path)
    section, tried = new_section(report, TtftRow), new_section(report, BaselineRow, "baseline")
    known = new_section(report, RatesRow, "rates")
    for backend in BACKENDS:
        settings, samples = {"threads": 4, "chunk_tokens": 512}, {"forward": (500.0, 510.0)}
        tried.add(BaselineRow(key=backend, backend=backend, settings=settings, tokens=512, samples_ms=samples))
        known.add(
            RatesRow(
                key=backend, backend=backend, rates=Rates(10 * rates, 10 * rates, 100 * rates, 100 * rates),
                weight_bytes=150_000_000, matmul_parameters=106_000_000, kv_number_bytes=4,
            )
        )  # fmt: skip
        slower = slowness * (2 if backend == "llamacpp" else 1)
        points(section, backend, StubWays(slower)).measure()
    section.show(ttft_tables.tables(section.rows), ttft_pictures.pictures(section.rows))
    tried.show(baseline.tables(tried.rows))
    known.show(explain.tables(known.rows))
    return report


def measured(
    bench: str | BenchEntry, report: Report, options: BenchOptions, settings: Any, name: str = "", **more: Any
) -> list[Any]:
    """Fill a bench's section; its rows."""
    loaded = (BENCHES[bench] if isinstance(bench, str) else bench).load()
    name = bench if isinstance(bench, str) else name
    fill(name, loaded, report, options, settings, **more)
    return report.rows(name, loaded.row)
