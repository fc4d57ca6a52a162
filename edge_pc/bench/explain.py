"""A small model of TTFT: how much of it memory bandwidth and arithmetic explain.

    TTFT ≈ a + b · bytes / measured read bandwidth + c · operations / measured rate

`bytes` are the weights, once for each chunk of computed tokens, and the KV states that are attended to; `operations`
those of the matrices and of attention. With one set of (a, b, c) for several machines, what machines differ in is
explained by their rates, as far as the model fits. b and c would be 1 if a forward pass moved and computed nothing else
and reached the measured rates; a is what a prompt costs whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.bench.report import Report, Row
from edge_pc.bench.ttft_summary import ttft

# Full prefill reads the weights again for each chunk; the size hardly matters where arithmetic dominates.
_CHUNK = 256
_WAYS = ("cached", "full")
_AXES = ("length", "new", "share")
_KV_BYTES = {"onnx": 4, "llamacpp": 2}


@dataclass(frozen=True, slots=True)
class Load:
    """What a TTFT has to move and to compute.

    Attributes:
        machine: index of the report.
        nbytes, operations: as the model counts them.
        bytes_s, operations_s: seconds at the machine's measured rates.
        ttft_ms: measured.
        name: of the point, to find it on other machines.
    """

    machine: int
    nbytes: float
    operations: float
    bytes_s: float
    operations_s: float
    ttft_ms: float
    name: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted model.

    Attributes:
        a_ms, b, c: coefficients, none below 0.
        median_error: half of the points are predicted with a smaller relative error.
        worst_error: the largest relative error.
        r2: share of the variance of log TTFT that is explained.
        points: fitted.
        explained: of the differences between machines (logarithms of the ratio at equal points) the share that the
            model explains; None for one machine.
    """

    a_ms: float
    b: float
    c: float
    median_error: float
    worst_error: float
    r2: float
    points: int
    explained: float | None


def fit(reports: Sequence[Report], backend: str) -> Fit | None:
    """Fit one model to the points of all reports; None with too few points."""
    loads = [load for index, report in enumerate(reports) for load in loads_of(report, backend, index)]
    if len(loads) < 4:
        return None
    features = np.array([[1e-3, load.bytes_s, load.operations_s] for load in loads])
    measured = np.array([load.ttft_ms / 1e3 for load in loads])
    coefficients = _least_squares(features / measured[:, None], np.ones(len(loads)))
    predicted = features @ coefficients
    errors = np.abs(predicted / measured - 1)
    logs = np.log(measured)
    spread = float(np.sum((logs - logs.mean()) ** 2))
    residual = float(np.sum((np.log(predicted) - logs) ** 2))
    return Fit(
        a_ms=round(float(coefficients[0]), 2),
        b=round(float(coefficients[1]), 3),
        c=round(float(coefficients[2]), 3),
        median_error=round(float(np.median(errors)), 3),
        worst_error=round(float(errors.max()), 3),
        r2=round(1 - residual / spread, 4) if spread else 1.0,
        points=len(loads),
        explained=_explained(loads, predicted),
    )


def loads_of(report: Report, backend: str, machine: int = 0) -> list[Load]:
    """The points of one report that the model is fitted to."""
    section = report.sections.get("ttft")
    if section is None or backend not in section.settings["backends"]:
        return []
    facts, sizes, rates = section.settings["backends"][backend], report.settings["model"], report.machine["rates"]
    loads = []
    for row in section.rows:
        wanted = row["backend"] == backend and row["way"] in _WAYS and row.get("pages") == "warm"
        if not wanted or not set(row["axes"]) & set(_AXES):
            continue
        nbytes, operations = demand(row, backend, facts, sizes)
        loads.append(
            Load(
                machine,
                nbytes,
                operations,
                nbytes / (rates["read_gbps"] * 1e9),
                operations / (rates["int8_gflops"] * 1e9),
                ttft(row),
                (row["way"], row["cached_tokens"], row["new_tokens"], row["modules"]),
            )
        )
    return loads


def demand(row: Row, backend: str, facts: dict[str, Any], sizes: dict[str, Any]) -> tuple[float, float]:
    """Bytes to move and operations to compute before the first token.

    Args:
        row: of a `cached` or a `full` way.
        facts: of the backend's weights (`weight_bytes`, `matmul_parameters`).
        sizes: of the model.
    """
    total = row["reused_tokens"] + row["computed_tokens"]
    computed = total if row["way"] == "full" else row["computed_tokens"]
    seen_before = total - computed
    chunks = -(-computed // _CHUNK)
    kv_per_token = 2 * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"] * _KV_BYTES[backend]
    # Each chunk attends to all before it: on average half of what is computed, and all that was there.
    nbytes = chunks * (facts["weight_bytes"] + kv_per_token * (seen_before + computed / 2))
    pairs = computed * seen_before + computed * (computed + 1) / 2
    operations = 2 * facts["matmul_parameters"] * computed + 2 * sizes["vocab_size"] * sizes["hidden_size"]
    operations += 4 * sizes["layers"] * sizes["heads"] * sizes["head_dim"] * pairs
    return nbytes, operations


def _least_squares(features: NDArray[Any], target: NDArray[Any]) -> NDArray[Any]:
    """Least squares with no coefficient below 0: the term that would be most negative is left out, one by one."""
    used = list(range(features.shape[1]))
    while True:
        found = np.linalg.lstsq(features[:, used], target, rcond=None)[0]
        if len(used) == 1 or found.min() >= 0:
            break
        del used[int(np.argmin(found))]
    coefficients = np.zeros(features.shape[1])
    coefficients[used] = np.maximum(found, 0)
    return coefficients


def _explained(loads: Sequence[Load], predicted: NDArray[Any]) -> float | None:
    """1 − the rest that is not explained, over all points that the first machine shares with another."""
    first = {load.name: index for index, load in enumerate(loads) if load.machine == 0}
    pairs = [(first[load.name], i) for i, load in enumerate(loads) if load.machine and load.name in first]
    if not pairs:
        return None
    seen = np.array([np.log(loads[j].ttft_ms / loads[i].ttft_ms) for i, j in pairs])
    modelled = np.array([np.log(predicted[j] / predicted[i]) for i, j in pairs])
    total = float(np.sum(seen**2))
    return round(1 - float(np.sum((seen - modelled) ** 2)) / total, 3) if total else 1.0


def sentence(found: Fit) -> str:
    """The model in words, with its error."""
    text = (
        f"TTFT ≈ {found.a_ms:.1f} ms + {found.b:.2f} × bytes / read bandwidth + {found.c:.2f} × operations / int8 "
        f"rate, fitted to {found.points} points; half of them are predicted within {found.median_error:.0%}, "
        f"the worst within {found.worst_error:.0%} (R² of log TTFT {found.r2:.3f})"
    )
    if found.explained is None:
        return text
    return f"{text}. Bandwidth and arithmetic explain {found.explained:.0%} of the differences between the machines"
