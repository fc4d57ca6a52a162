"""`python -m benchmarks rates`: a small model of TTFT, and how much of it memory bandwidth and arithmetic explain.

    TTFT ≈ a + b · bytes / measured read bandwidth + c · operations / measured rate

`bytes` are the weights, once for each chunk of computed tokens, and the KV states that are attended to; `operations`
those of the matrices and of attention. With one set of (a, b, c) for several machines, what machines differ in is
explained by their rates, as far as the model fits. b and c would be 1 if a forward pass moved and computed nothing else
and reached the measured rates; a is what a prompt costs whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.rates import measure_rates
from benchmarks.rows import Fit, Rates, RatesRow
from benchmarks.weights import weights
from edge_pc.bench import comparison
from edge_pc.bench.comparison import common_backends
from edge_pc.bench.document import Document, Part
from edge_pc.bench.facts import letter
from edge_pc.bench.report import Report
from edge_pc.bench.rows import TtftRow
from edge_pc.bench.tables import TITLES, Table
from edge_pc.bench.work import Bench, Work

# Bytes of a number in the KV cache that attention reads.
KV_NUMBER_BYTES = {"onnx": 4, "llamacpp": 2}

# Full prefill reads the weights again for each chunk; the size hardly matters where arithmetic dominates.
_CHUNK = 256
_AXES = {"length", "new", "share"}
_FEWEST_POINTS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """A measured TTFT, and what had to be moved and computed for it.

    Attributes:
        machine: index of the report.
        name: way, cached and new tokens, modules: to find the point on other machines.
        seconds: measured, the median.
        bytes_s, operations_s: seconds at the machine's measured rates.
    """

    machine: int
    name: tuple[Any, ...]
    seconds: float
    bytes_s: float
    operations_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """There is nothing to choose."""

    @classmethod
    def quick(cls) -> Settings:
        return cls()


def measure(work: Work[RatesRow], settings: Settings) -> None:
    """Measure the machine's rates, and fit the model to the times that the report holds."""
    measured: Rates | None = None
    for backend in work.backends:
        work.progress(0, 0, f"{backend}: rates")
        row = work.section.row(backend)
        if row is None:
            measured = measured or measure_rates(work.report.machine["allowed_memory_bytes"])
            nbytes, numbers = weights(work.options.model_path(backend))
            row = RatesRow(
                key=backend, backend=backend, rates=measured, weight_bytes=nbytes, matmul_parameters=numbers,
                kv_number_bytes=KV_NUMBER_BYTES[backend],
            )  # fmt: skip
            work.section.add(row)
        work.section.add(replace(row, fit=fit([work.report], backend)))


def tables(rows: Sequence[RatesRow]) -> list[Table]:
    """The machine's rates, and what they explain."""
    columns = {
        "> copy (GB/s)": lambda rates: str(rates.copy_gbps),
        "> read (GB/s)": lambda rates: str(rates.read_gbps),
        "> float32 (GFLOP/s)": lambda rates: str(rates.float32_gflops),
        "> int8 blocks (GFLOP/s)": lambda rates: str(rates.int8_gflops),
    }
    fits = [(row.backend, row.fit) for row in rows if row.fit]
    return [Table.of("Measured rates", {row.rates: row for row in rows}, columns), fit_table(fits)]


def compare(reports: Sequence[Report]) -> Document:
    """The machines side by side, and how much of their difference bandwidth and arithmetic explain."""
    document = comparison.compare(reports)
    fits = [(backend, found) for backend in common_backends(reports) if (found := fit(reports, backend)) is not None]
    tables = [fit_table(fits)]
    for index, report in enumerate(reports):
        (rates, *_) = report.tables("rates")
        tables.append(replace(rates, title=f"{rates.title} of machine {letter(index)}"))
    return replace(document, parts=[*document.parts, Part("What explains the difference", tables=tables)])


def fit_table(fits: Sequence[tuple[str, Fit]]) -> Table:
    """The fitted model of each backend."""
    columns: dict[str, Callable[[tuple[str, Fit]], str]] = {
        "backend": lambda line: TITLES[line[0]],
        "> a (ms)": lambda line: f"{line[1].a_ms:.1f}",
        "> b": lambda line: f"{line[1].b:.2f}",
        "> c": lambda line: f"{line[1].c:.2f}",
        "> points": lambda line: str(line[1].points),
        "> median error": lambda line: f"{line[1].median_error:.0%}",
        "> largest error": lambda line: f"{line[1].worst_error:.0%}",
        "> R² of log TTFT": lambda line: f"{line[1].r2:.3f}",
    }
    if any(found.explained is not None for _, found in fits):
        columns["> of the differences between machines explained"] = lambda line: f"{line[1].explained or 0:.0%}"
    note = "TTFT ≈ a + b × bytes / read bandwidth + c × operations / int8 rate, at the rates measured on each machine."
    return Table.of("What bandwidth and arithmetic explain", fits, columns, note)


def fit(reports: Sequence[Report], backend: str) -> Fit | None:
    """Fit one model to the points of all reports, in relative error; None with too few points."""
    points = [point for index, report in enumerate(reports) for point in points_of(report, backend, index)]
    if len(points) < _FEWEST_POINTS:
        return None
    features = np.array([[1e-3, point.bytes_s, point.operations_s] for point in points])
    measured = np.array([point.seconds for point in points])
    coefficients, _ = nnls(features / measured[:, None], np.ones(len(points)))
    predicted = features @ coefficients
    errors = np.abs(predicted / measured - 1)
    logs = np.log(measured)
    a_ms, b, c = coefficients.tolist()
    return Fit(
        a_ms=a_ms,
        b=b,
        c=c,
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        r2=_share_explained(logs - logs.mean(), np.log(predicted) - logs.mean()),
        points=len(points),
        explained=_explained(points, measured, predicted),
    )


def points_of(report: Report, backend: str, machine: int = 0) -> list[Point]:
    """The points of one report that the model is fitted to; none where its rates were not measured."""
    facts = next((row for row in report.rows("rates", RatesRow) if row.backend == backend), None)
    found = []
    for row in report.rows("ttft", TtftRow) if facts else []:
        wanted = (row.backend, row.pages) == (backend, "warm") and row.way in ("cached", "full")
        if facts and wanted and _AXES & set(row.axes):
            nbytes, operations = demand(row, facts, report.settings["model"])
            seconds = nbytes / (facts.rates.read_gbps * 1e9), operations / (facts.rates.int8_gflops * 1e9)
            found.append(Point(machine, (row.way, *row.point), row.ttft / 1e3, *seconds))
    return found


def demand(row: TtftRow, facts: RatesRow, sizes: dict[str, Any]) -> tuple[float, float]:
    """Bytes to move and operations to compute before the first token.

    Args:
        row: of a `cached` or a `full` way.
        facts: of the backend's weights.
        sizes: of the model.
    """
    total = row.reused_tokens + row.computed_tokens
    computed = total if row.way == "full" else row.computed_tokens
    before = total - computed
    kv_per_token = 2 * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"] * facts.kv_number_bytes
    # Each chunk attends to all before it: on average half of what is computed, and all that was there.
    nbytes = -(-computed // _CHUNK) * (facts.weight_bytes + kv_per_token * (before + computed / 2))
    attended = computed * before + computed * (computed + 1) / 2
    operations = 2 * facts.matmul_parameters * computed + 2 * sizes["vocab_size"] * sizes["hidden_size"]
    return nbytes, operations + 4 * sizes["layers"] * sizes["heads"] * sizes["head_dim"] * attended


def _explained(points: Sequence[Point], measured: NDArray[Any], predicted: NDArray[Any]) -> float | None:
    """Of the ratios of all points that the first machine shares with another."""
    first = {point.name: index for index, point in enumerate(points) if point.machine == 0}
    shared = [(first[point.name], i) for i, point in enumerate(points) if point.machine and point.name in first]
    if not shared:
        return None
    one, other = np.array(shared).T
    return _share_explained(np.log(measured[other] / measured[one]), np.log(predicted[other] / predicted[one]))


def _share_explained(seen: NDArray[Any], modelled: NDArray[Any]) -> float:
    """1 − the squares that are left over all squares."""
    total = float(np.sum(seen**2))
    return 1 - float(np.sum((seen - modelled) ** 2)) / total if total else 1.0


BENCH = Bench(
    title="What the times are made of",
    row=RatesRow,
    settings=Settings,
    measure=measure,
    tables=tables,
)
