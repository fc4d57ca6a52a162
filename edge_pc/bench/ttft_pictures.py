"""Pictures of times to first token, of one machine or of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge_pc.bench.charts import Chart, Line, Picture
from edge_pc.bench.rows import TtftRow
from edge_pc.bench.tables import TITLES
from edge_pc.bench.ttft_tables import WAYS, measured_backends, on_axis, pairs

# Of the paper's Figure 4: speed-ups on CPUs at about 5000 tokens.
_PAPER = Line("paper, Fig. 4, on CPUs", (5000, 5000), (20, 70), who=3, kind=5)
_CAPTION = (
    "Over cached length, on logarithmic axes. The paper's own figures: 20 to 70 × on CPUs at about 5000 tokens (Fig. "
    "4), full prefill growing quadratically and reuse linearly with length (Fig. 5)."
)
_TIME = "time to first token (ms)"


@dataclass(frozen=True, slots=True)
class Series:
    """Times of one backend on one machine: its name in a legend, its rows, and the number that chooses its tint."""

    name: str
    backend: str
    rows: Sequence[TtftRow]
    number: int

    def line(self, axis: str, way: str, x: Callable[[TtftRow], float]) -> Line:
        """Median TTFT and quartiles of one way along an axis."""
        rows = on_axis(self.rows, self.backend, axis, way)
        spread = [row.quartiles("ttft") for row in rows]
        return Line(
            f"{self.name}: {WAYS[way]}",
            tuple(x(row) for row in rows),
            tuple(row.ttft for row in rows),
            tuple(low for low, _ in spread),
            tuple(high for _, high in spread),
            who=self.number,
            kind=list(WAYS).index(way),
        )

    def speed_up(self) -> Line:
        """Full prefill over reuse, by cached length."""
        both = pairs(self.rows, self.backend, "length", "cached", "full")
        ratios = tuple(full.ttft / cached.ttft for cached, full in both)
        return Line(self.name, tuple(cached.cached_tokens for cached, _ in both), ratios, who=self.number, kind=1)


def length_charts(
    series: Sequence[Series], ways: Iterable[str], title: str = "", more: tuple[Line, ...] = ()
) -> list[Chart]:
    """TTFT over cached length, and the speed-up, with `more` lines."""
    times = [each.line("length", way, lambda row: row.cached_tokens) for each in series for way in ways]
    ratios = [each.speed_up() for each in series]
    return [
        Chart("cached tokens", _TIME, _drawn(times), title),
        Chart(
            "cached tokens", "full prefill / reuse (×)", _drawn([*ratios, *more]), f"{title}: speed-up" if title else ""
        ),
    ]


def _drawn(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Those with points."""
    return tuple(line for line in lines if line.x)


def pictures(rows: Sequence[TtftRow]) -> list[Picture]:
    """Over cached length, and over the prompt's own text."""
    series = [Series(TITLES[name], name, rows, number) for number, name in enumerate(measured_backends(rows))]
    ways = ("full", "cached", "in_place")
    new = [each.line("new", way, lambda row: row.new_tokens) for each in series for way in ways]
    share = [each.line("share", way, _cached_percent) for each in series for way in ways]
    own_text = (
        Chart("new tokens", _TIME, _drawn(new)),
        Chart("share of the prompt that is cached (%)", _TIME, _drawn(share), log_x=False),
    )
    return [
        Picture(_CAPTION, tuple(length_charts(series, WAYS, more=(_PAPER,)))),
        Picture(
            "Over the length of the prompt's own text, and over the share of it that comes from modules.", own_text
        ),
    ]


def _cached_percent(row: TtftRow) -> float:
    return 100 * row.cached_tokens / (row.cached_tokens + row.new_tokens)
