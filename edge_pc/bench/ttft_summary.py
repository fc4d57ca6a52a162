"""Reads the rows of `bench ttft`, and draws its conclusions: ratios, growth, break-even, how often an encoding pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from edge_pc.bench.derive import break_even, growth, uses_to_pay
from edge_pc.bench.names import BACKEND_NAMES, ordered_backends
from edge_pc.bench.report import Row

# Growth is fitted over these cached lengths; shorter prompts are all fixed costs.
_FIT_FROM, _FIT_TO = 1000, 8200

OTHER_WAYS = ("state_file", "load_state", "ram_cache")


def rows_of(rows: Iterable[Row], backend: str, axis: str, way: str, pages: str = "warm") -> list[Row]:
    """Rows of one way along one axis, by what varies on it."""
    order = {"length": "cached_tokens", "new": "new_tokens", "share": "cached_tokens", "modules": "modules"}[axis]
    found = [
        row
        for row in rows
        if (row["backend"], row["way"], row.get("pages")) == (backend, way, pages) and axis in row["axes"]
    ]
    return sorted(found, key=lambda row: int(row[order]))


def ttft(row: Row) -> float:
    """The median TTFT in ms."""
    return float(row["median_ms"]["ttft"])


def paired(rows: Sequence[Row], backend: str, axis: str, one: str, other: str) -> list[tuple[Row, Row]]:
    """Rows of two ways at the same points."""
    points = {_point(row): row for row in rows_of(rows, backend, axis, other)}
    return [(row, points[_point(row)]) for row in rows_of(rows, backend, axis, one) if _point(row) in points]


def _point(row: Row) -> tuple[int, int, int]:
    return row["cached_tokens"], row["new_tokens"], row["modules"]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of a section: for each backend what `_backend` finds, and the backends side by side."""
    backends = measured_backends(rows)
    summary: dict[str, Any] = {backend: _backend(rows, backend) for backend in backends}
    if len(backends) == 2:
        summary["cached_ttft_ratio"] = _between(rows, *backends)
    return summary


def measured_backends(rows: Sequence[Row]) -> list[str]:
    """The backends that reuse was timed on; an interrupted bench may only have searched for a baseline on the last."""
    return ordered_backends(row for row in rows if row["way"] == "cached")


def _backend(rows: Sequence[Row], backend: str) -> dict[str, Any]:
    pairs = paired(rows, backend, "length", "cached", "full")
    lengths = [row["cached_tokens"] for row, _ in pairs]
    cached, full = [ttft(row) for row, _ in pairs], [ttft(row) for _, row in pairs]
    even = break_even(lengths, cached, full)
    return {
        "speed_up": {str(length): round(f / c, 2) for length, c, f in zip(lengths, cached, full, strict=True)},
        "to_limit": _ratios(paired(rows, backend, "length", "cached", "in_place")),
        "growth": {"cached": _growth(lengths, cached), "full": _growth(lengths, full)},
        "break_even": asdict(even) if even else None,
        "uses_to_pay": _uses(rows, backend, pairs),
        "cold_to_warm": _cold(rows, backend),
        "where_worse": where_worse(rows, backend),
    }


def _ratios(pairs: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    """TTFT of the first over that of the second, by cached length."""
    return {str(one["cached_tokens"]): round(ttft(one) / ttft(other), 3) for one, other in pairs}


def _growth(lengths: Sequence[float], times: Sequence[float]) -> dict[str, Any] | None:
    within = [(n, t) for n, t in zip(lengths, times, strict=True) if _FIT_FROM <= n <= _FIT_TO]
    found = growth([n for n, _ in within], [t for _, t in within])
    return asdict(found) if found else None


def _uses(rows: Sequence[Row], backend: str, pairs: Sequence[tuple[Row, Row]]) -> dict[str, int | None]:
    """Cached length → uses after which encoding once was less work than computing each time; None: never."""
    encoded = {
        (row["cached_tokens"], row["modules"]): float(row["median_ms"]["encode"])
        for row in rows
        if row["backend"] == backend and row["way"] == "encode"
    }
    return {
        str(c["cached_tokens"]): uses_to_pay(encoded[c["cached_tokens"], c["modules"]], ttft(c), ttft(f))
        for c, f in pairs
        if (c["cached_tokens"], c["modules"]) in encoded
    }


def _cold(rows: Sequence[Row], backend: str) -> dict[str, dict[str, float]]:
    """Cached length → cold over warm TTFT, and the share of pages that was in memory all the same."""
    warm = {row["cached_tokens"]: row for row in rows_of(rows, backend, "length", "cached")}
    return {
        str(row["cached_tokens"]): {
            "ratio": round(ttft(row) / ttft(warm[row["cached_tokens"]]), 3),
            "resident_share": row["resident_share"],
        }
        for row in rows_of(rows, backend, "length", "cached", "cold")
        if row["cached_tokens"] in warm
    }


def where_worse(rows: Sequence[Row], backend: str) -> list[dict[str, Any]]:
    """Points at which reuse took longer than full prefill; `certain` when their quartiles do not overlap."""
    worse = []
    for axis in ("length", "new", "share", "modules"):
        for cached, full in paired(rows, backend, axis, "cached", "full"):
            point = {name: cached[name] for name in ("cached_tokens", "new_tokens", "modules")}
            point |= {"cached_ms": round(ttft(cached), 3), "full_ms": round(ttft(full), 3)}
            apart = cached["quartiles_ms"]["ttft"][0] > full["quartiles_ms"]["ttft"][1]
            point["certain"] = apart and min(_samples(cached), _samples(full)) > 1
            if ttft(cached) > ttft(full) and point not in worse:
                worse.append(point)
    return worse


def _samples(row: Row) -> int:
    return len(row["samples_ms"]["ttft"])


def _between(rows: Sequence[Row], one: str, other: str) -> dict[str, Any]:
    """Cached length → cached TTFT of the first backend over the second's."""
    theirs = {row["cached_tokens"]: row for row in rows_of(rows, other, "length", "cached")}
    mine = rows_of(rows, one, "length", "cached")
    pairs = [(row, theirs[row["cached_tokens"]]) for row in mine if row["cached_tokens"] in theirs]
    return {"backends": f"{one}/{other}", "ratios": _ratios(pairs)}


def findings(summary: dict[str, Any]) -> list[str]:
    """The summary in sentences, for people."""
    lines = []
    for backend, found in summary.items():
        if backend == "cached_ttft_ratio":
            ratios = ", ".join(f"{ratio:.2f} at {length}" for length, ratio in found["ratios"].items())
            one, other = (BACKEND_NAMES[name] for name in found["backends"].split("/"))
            lines.append(f"cached TTFT of {one} over that of {other}: {ratios}")
            continue
        lines += [f"{BACKEND_NAMES[backend]}: {line}" for line in _backend_findings(found)]
    return lines


def _backend_findings(found: dict[str, Any]) -> list[str]:
    lines = ["speed-up " + ", ".join(f"{ratio:.1f} x at {length}" for length, ratio in found["speed_up"].items())]
    if found["to_limit"]:
        limits = ", ".join(f"{ratio:.2f} x at {length}" for length, ratio in found["to_limit"].items())
        lines.append(f"cached TTFT over the limit (in-place continuation): {limits}")
    if found["growth"]["cached"] and found["growth"]["full"]:
        exponents = {name: fit["exponent"] for name, fit in found["growth"].items()}
        lines.append(
            f"over 1K to 8K tokens cached TTFT grows as length^{exponents['cached']:.2f}, "
            f"full prefill as length^{exponents['full']:.2f}"
        )
    lines.append(_break_even_sentence(found["break_even"]))
    uses = ", ".join(f"{'never' if n is None else n} at {length}" for length, n in found["uses_to_pay"].items())
    lines.append(f"uses after which an encoding has paid for itself: {uses or 'not measured'}")
    for length, cold in found["cold_to_warm"].items():
        if cold["resident_share"] > 0.05:
            lines.append(f"cold at {length}: {cold['resident_share']:.0%} of the pages stayed in memory, so it is not")
    return lines


def _break_even_sentence(even: dict[str, Any] | None) -> str:
    if even is None:
        return "break-even: not measured"
    if even["verdict"] == "always":
        return f"reuse was faster at every length measured, from {even['shortest']} cached tokens on"
    if even["verdict"] == "never":
        return f"reuse was never faster, up to {even['longest']} cached tokens"
    return f"reuse pays from about {even['tokens']:.0f} cached tokens on"
