"""Tables of `bench ttft`."""

from __future__ import annotations

from collections.abc import Iterable

from edge_pc.bench.names import BACKEND_NAMES, WAY_NAMES, ordered_backends
from edge_pc.bench.report import Row, Section
from edge_pc.bench.tables import Table, short
from edge_pc.bench.ttft_summary import OTHER_WAYS, measured_backends, rows_of, summarize, ttft, where_worse

PAPER_NOTE = (
    "The paper's own figures: 20 to 70 × on CPUs at about 5000 tokens (Fig. 4), full prefill growing quadratically "
    "and reuse linearly with length (Fig. 5)."
)


def length_tables(section: Section) -> list[Table]:
    """TTFT over cached length, a table for each backend."""
    return [_length_table(section, backend) for backend in measured_backends(section.rows)]


def _length_table(section: Section, backend: str) -> Table:
    rows, summary = section.rows, summarize(section.rows)[backend]
    by_way = {
        way: {row["cached_tokens"]: row for row in rows_of(rows, backend, "length", way)}
        for way in ("full", "cached", "again", "in_place", *OTHER_WAYS)
    }
    ways = [way for way, found in by_way.items() if found]
    columns = ["> cached tokens", *(f"> {WAY_NAMES[way]} (ms)" for way in ways)]
    columns += ["> speed-up", "> reuse / limit", "> later token (ms)", "> uses to pay"]
    lines = []
    for length, cached in by_way["cached"].items():
        cells = [str(length), *(_median_and_spread(by_way[way].get(length)) for way in ways)]
        key = str(length)
        uses = summary.get("uses_to_pay", {}).get(key, "")
        cells += [
            _number(summary.get("speed_up", {}).get(key), "×"),
            _number(summary.get("to_limit", {}).get(key), "×"),
            f"{cached['median_ms']['later_token']:.1f}",
            "never" if uses is None else str(uses),
        ]
        lines.append(tuple(cells))
    note = (
        "Median and quartiles; 32 new tokens, one module. Full prefill has few samples where it takes seconds "
        f"({_fewest(by_way['full'].values())} at least). Reuse again: the prompt before had the same modules."
    )
    return Table(f"{BACKEND_NAMES[backend]}: time to first token", tuple(columns), lines, note)


def _fewest(rows: Iterable[Row]) -> int:
    return min((len(row["samples_ms"]["ttft"]) for row in rows), default=0)


def _median_and_spread(row: Row | None) -> str:
    if row is None:
        return ""
    low, high = row["quartiles_ms"]["ttft"]
    return f"{short(ttft(row))}\n[{short(low)}, {short(high)}]"


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.2f} {unit}"


def stages_table(section: Section) -> Table:
    """What each cached TTFT is made of."""
    lines = []
    for backend in ordered_backends(section.rows):
        for axis in ("length", "new", "share", "modules"):
            for row in rows_of(section.rows, backend, axis, "cached"):
                stages = [f"{row['median_ms'][stage]:.2f}" for stage in ("parse", "assembly", "forward", "ttft")]
                point = tuple(str(row[name]) for name in ("cached_tokens", "new_tokens", "modules"))
                lines.append((BACKEND_NAMES[backend], *point, *stages))
    columns = ("backend", *(f"> {name}" for name in ("cached", "new", "modules")))
    columns += tuple(f"> {stage} (ms)" for stage in ("parse", "assembly", "forward", "TTFT"))
    return Table("Stages of reuse, medians", columns, list(dict.fromkeys(lines)))


def search_table(section: Section) -> Table:
    """What the search for full prefill's best settings tried, and what it chose."""
    chosen = {row["backend"]: row["settings"] for row in section.rows if row["way"] == "baseline"}
    lines = [
        (
            BACKEND_NAMES[row["backend"]],
            ", ".join(f"{name} {value}" for name, value in row["settings"].items()),
            f"{row['tokens'] / row['median_ms']['forward'] * 1e3:,.0f}",
            "chosen" if row["settings"] == chosen.get(row["backend"]) else "",
        )
        for row in section.rows
        if row["way"] == "search"
    ]
    note = "The engine's own settings come first and are kept unless others are faster by more than 2 %."
    return Table("Search for full prefill's best settings", ("backend", "settings", "> tokens/s", ""), lines, note)


def worse_table(section: Section) -> Table:
    """Where reuse took longer than full prefill."""
    lines = []
    for backend in ordered_backends(section.rows):
        for point in where_worse(section.rows, backend):
            numbers = tuple(str(point[name]) for name in ("cached_tokens", "new_tokens", "modules"))
            times = (short(point["cached_ms"]), short(point["full_ms"]))
            certain = "yes" if point["certain"] else "no: within the spread, or one sample"
            lines.append((BACKEND_NAMES[backend], *numbers, *times, certain))
    columns = ("backend", "> cached", "> new", "> modules", "> reuse (ms)", "> full prefill (ms)", "certain")
    note = "" if lines else "At no point that was measured."
    return Table("Slower than full prefill", columns, lines, note)
