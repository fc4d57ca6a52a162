"""What follows from the rows of `bench ttft`: ratios, growth, break-even lengths and uses, where reuse is worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import StatisticsError, correlation, linear_regression

from edge_pc.bench.rows import TimedRow, TtftRow
from edge_pc.bench.tables import TITLES, Table, milliseconds

# Way → what people call it, in the order of columns.
WAYS = {
    "full": "full prefill",
    "cached": "reuse",
    "in_place": "limit (in place)",
    "again": "reuse again",
}
AXES = {"length": "cached_tokens", "new": "new_tokens", "share": "cached_tokens", "modules": "modules"}

# The columns that say which point a row is of.
_POINT: dict[str, Callable[[TtftRow], str]] = {
    "backend": lambda row: TITLES[row.backend],
    "> cached": lambda row: str(row.cached_tokens),
    "> new": lambda row: str(row.new_tokens),
    "> modules": lambda row: str(row.modules),
}

# Growth is fitted over these cached lengths; shorter prompts are all fixed costs.
_FIT_FROM, _FIT_TO = 1000, 8200
# Above this share of pages that stayed in memory, a cold row is not cold.
_NOT_COLD = 0.05


def on_axis(rows: Iterable[TtftRow], backend: str, axis: str, way: str, pages: str = "warm") -> list[TtftRow]:
    """Rows of one way along one axis, by what varies on it."""
    found = [row for row in rows if (row.backend, row.way, row.pages) == (backend, way, pages) and axis in row.axes]
    return sorted(found, key=lambda row: int(getattr(row, AXES[axis])))


def pairs(rows: Sequence[TtftRow], backend: str, axis: str, one: str, other: str) -> list[tuple[TtftRow, TtftRow]]:
    """Rows of two ways at the same points of an axis."""
    others = {row.point: row for row in on_axis(rows, backend, axis, other)}
    return [(row, others[row.point]) for row in on_axis(rows, backend, axis, one) if row.point in others]


def measured_backends(rows: Iterable[TtftRow]) -> list[str]:
    """The backends that reuse was timed on."""
    found = {row.backend for row in rows if row.way == "cached"}
    return [backend for backend in TITLES if backend in found]


def growth(lengths: Sequence[float], times: Sequence[float]) -> tuple[float, float] | None:
    """(exponent, R²) of time ∝ length ** exponent, by a line through the logarithms; None with too few lengths."""
    x, y = [math.log(length) for length in lengths], [math.log(time) for time in times]
    try:
        return linear_regression(x, y).slope, correlation(x, y) ** 2
    except StatisticsError:  # fewer than two lengths, or the same time at all of them
        return None


def break_even(points: Sequence[tuple[float, float, float]]) -> float | None:
    """The length from which reuse stays faster: 0 at every length, infinite at none; None without any point.

    Args:
        points: (length, time with reuse, time of full prefill). Between two lengths a straight line of logarithms.
    """
    gains = [(length, math.log(full / cached)) for length, cached, full in sorted(points)]
    if not gains:
        return None
    if gains[-1][1] <= 0:
        return math.inf
    losing = [index for index, (_, gain) in enumerate(gains) if gain <= 0]
    if not losing:
        return 0.0
    (low, loss), (high, gain) = gains[losing[-1]], gains[losing[-1] + 1]
    return float(low * (high / low) ** (-loss / (gain - loss)))


def uses_to_pay(encode_ms: float, cached_ms: float, full_ms: float) -> int | None:
    """After how many uses encoding and reusing has taken less than computing each time; None: never."""
    gain = full_ms - cached_ms
    return None if gain <= 0 else max(1, math.floor(encode_ms / gain) + 1)


def tables(rows: Sequence[TtftRow]) -> list[Table]:
    """All tables of the section."""
    backends = measured_backends(rows)
    between = [_between(rows, backends[0], other) for other in backends[1:]]
    lengths = [_over_length(rows, backend) for backend in backends]
    return [*lengths, *between, _stages(rows, backends), _worse(rows, backends)]


def _over_length(rows: Sequence[TtftRow], backend: str) -> Table:
    by_way = {way: {row.cached_tokens: row for row in on_axis(rows, backend, "length", way)} for way in WAYS}
    encoded = {row.point[::2]: row.median("encode") for row in rows if (row.backend, row.way) == (backend, "encode")}

    def ratio(row: TtftRow, over: str, under: str) -> str:
        one, other = (by_way[way].get(row.cached_tokens) for way in (over, under))
        return f"{one.ttft / other.ttft:.2f} ×" if one and other else ""

    def uses(row: TtftRow) -> str:
        full = by_way["full"].get(row.cached_tokens)
        if full is None or row.point[::2] not in encoded:
            return ""
        found = uses_to_pay(encoded[row.point[::2]], row.ttft, full.ttft)
        return "never" if found is None else str(found)

    def time_of(way: str) -> Callable[[TtftRow], str]:
        return lambda row: spread(by_way[way].get(row.cached_tokens))

    columns: dict[str, Callable[[TtftRow], str]] = {
        "> cached tokens": lambda row: str(row.cached_tokens),
        **{f"> {title} (ms)": time_of(way) for way, title in WAYS.items() if by_way[way]},
        "> speed-up": lambda row: ratio(row, "full", "cached"),
        "> reuse / limit": lambda row: ratio(row, "cached", "in_place"),
        "> later token (ms)": lambda row: f"{row.median('later_token'):.1f}",
        "> break-even uses": uses,
    }
    fewest = min((len(row.samples_ms["ttft"]) for row in by_way["full"].values()), default=0)
    note = (
        f"Median and quartiles; one module. Full prefill has few samples where it takes seconds ({fewest} at least). "
        "Reuse again: the prompt before had the same modules. Break-even uses: how often a module must be "
        f"used until encoding it once has taken less time than computing it each time. {_in_words(rows, backend)}"
    )
    return Table.of(f"{TITLES[backend]}: time to first token", by_way["cached"].values(), columns, note.strip())


def spread(row: TimedRow | None) -> str:
    """A row's median and quartiles; nothing without a row."""
    if row is None:
        return ""
    low, high = row.quartiles("ttft")
    return f"{milliseconds(row.median('ttft'))}\n[{milliseconds(low)}, {milliseconds(high)}]"


def _in_words(rows: Sequence[TtftRow], backend: str) -> str:
    """Break-even and growth, in a sentence each."""
    points = [(c.cached_tokens, c.ttft, f.ttft) for c, f in pairs(rows, backend, "length", "cached", "full")]
    sentences = []
    even = break_even(points)
    if even is not None:
        many = "at no length" if even == math.inf else f"from about {even:.0f} cached tokens on"
        sentences.append(f"Reuse was faster {'at every length' if not even else many}.")
    fitted = [point for point in points if _FIT_FROM <= point[0] <= _FIT_TO]
    cached, full = (growth([point[0] for point in fitted], [point[way] for point in fitted]) for way in (1, 2))
    if cached and full:
        sentences.append(
            f"From 1K to 8K tokens reuse grows as length to the power of {cached[0]:.2f} (R² {cached[1]:.2f}), full "
            f"prefill of {full[0]:.2f} ({full[1]:.2f})."
        )
    return " ".join(sentences)


def _between(rows: Sequence[TtftRow], one: str, other: str) -> Table:
    theirs = {row.cached_tokens: row for row in on_axis(rows, other, "length", "cached")}
    mine = [row for row in on_axis(rows, one, "length", "cached") if row.cached_tokens in theirs]
    columns = {
        "> cached tokens": lambda row: str(row.cached_tokens),
        "> ratio": lambda row: f"{row.ttft / theirs[row.cached_tokens].ttft:.2f}",
    }
    return Table.of(f"Reuse on {TITLES[one]} over reuse on {TITLES[other]}", mine, columns)


def _stages(rows: Sequence[TtftRow], backends: Sequence[str]) -> Table:
    found = {
        row.key: row
        for backend, axis, pages in product(backends, AXES, ("warm", "cold"))
        for row in on_axis(rows, backend, axis, "cached", pages)
    }

    def median_of(stage: str) -> Callable[[TtftRow], str]:
        return lambda row: f"{row.median(stage):.2f}"

    columns: dict[str, Callable[[TtftRow], str]] = {
        **_POINT,
        "page cache": _pages,
        **{f"> {stage} (ms)": median_of(stage) for stage in ("parse", "assembly", "forward")},
        "> TTFT (ms)": median_of("ttft"),
    }
    note = "Cold: the files of the states were dropped from the page cache right before."
    return Table.of("Stages of reuse, medians", found.values(), columns, note)


def _pages(row: TtftRow) -> str:
    stayed = row.resident_share or 0.0
    return f"{row.pages}: {stayed:.0%} stayed in memory" if stayed > _NOT_COLD else row.pages


def _worse(rows: Sequence[TtftRow], backends: Sequence[str]) -> Table:
    both = [pair for backend in backends for axis in AXES for pair in pairs(rows, backend, axis, "cached", "full")]
    full = {cached.key: full for cached, full in both}
    worse = {cached.key: cached for cached, full in both if cached.ttft > full.ttft}
    columns = {
        **_POINT,
        "> reuse (ms)": lambda row: milliseconds(row.ttft),
        "> full prefill (ms)": lambda row: milliseconds(full[row.key].ttft),
        "certain": lambda row: "yes" if _certain(row, full[row.key]) else "no: within the spread, or one sample",
    }
    note = "" if worse else "At no point that was measured."
    return Table.of("Slower than full prefill", worse.values(), columns, note, worse=True)


def _certain(slower: TtftRow, faster: TtftRow) -> bool:
    """Their quartiles do not overlap, and each has more than one sample."""
    apart = slower.quartiles("ttft")[0] > faster.quartiles("ttft")[1]
    return apart and min(len(row.samples_ms["ttft"]) for row in (slower, faster)) > 1
