"""`bench compare`: machines side by side, from their reports, as Markdown, as an HTML page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from edge_pc.bench.charts import Chart, Picture
from edge_pc.bench.document import Document, Part
from edge_pc.bench.facts import letter, machine_table
from edge_pc.bench.report import Report
from edge_pc.bench.rows import TtftRow
from edge_pc.bench.tables import TITLES, Table
from edge_pc.bench.ttft_pictures import Series, length_charts
from edge_pc.bench.ttft_tables import measured_backends, pairs
from edge_pc.errors import OptionError


def compare(reports: Sequence[Report]) -> Document:
    """The machines of the reports side by side; the page's first part has its only picture.

    Raises:
        OptionError: fewer than two reports, or one without `bench ttft`, or of another model.
    """
    backends = common_backends(reports)
    rows = [report.rows("ttft", TtftRow) for report in reports]
    names = [f"{letter(index)} ({report.machine['vendor']})" for index, report in enumerate(reports)]
    charts: list[Chart] = []
    for backend in backends:
        series = [Series(name, backend, rows[index], index) for index, name in enumerate(names)]
        charts += length_charts(series, ("full", "cached"), TITLES[backend])
    caption = "Time to first token, and full prefill over reuse, by cached length"
    tables = [ratio_table(rows, backend) for backend in backends]
    parts = [
        Part("Time to the first token", [Picture(caption, tuple(charts))], tables=tables),
        Part("Machines", tables=[machine_table(reports)]),
    ]
    return Document("Machines compared", "A is the first report, B the second, and so on.", parts)


def common_backends(reports: Sequence[Report]) -> list[str]:
    """The backends that reuse was timed on in all reports."""
    if len(reports) < 2:
        raise OptionError("one report alone cannot be compared", hint="give two or more")
    for report in reports:
        if "ttft" not in report.sections:
            raise OptionError(f"{report.path} has no times to first token", hint="run edge-pc bench ttft there")
        if report.settings["model"] != reports[0].settings["model"]:
            raise OptionError(f"{report.path} was measured with another model than {reports[0].path}")
    found = [measured_backends(report.rows("ttft", TtftRow)) for report in reports]
    common = [backend for backend in found[0] if all(backend in each for each in found)]
    if not common:
        raise OptionError("the reports have no backend in common")
    return common


def ratio_table(rows: Sequence[Sequence[TtftRow]], backend: str) -> Table:
    """TTFT of every machine by cached length, and the first machine's over each other's."""
    # Of each machine: cached length → (reuse, full prefill) in ms.
    machines = [
        {
            cached.cached_tokens: (cached.ttft, full.ttft)
            for cached, full in pairs(each, backend, "length", "cached", "full")
        }
        for each in rows
    ]
    columns = ["> cached tokens"]
    for name in map(letter, range(len(machines))):
        columns += [f"> {name} reuse (ms)", f"> {name} full (ms)", f"> {name} speed-up"]
    for name in map(letter, range(1, len(machines))):
        columns += [f"> A/{name} reuse", f"> A/{name} full"]
    lines = []
    for length in sorted(set.intersection(*map(set, machines))):
        first, *others = times = [machine[length] for machine in machines]
        cells = [str(length)]
        for reuse, full in times:
            cells += [f"{reuse:,.1f}", f"{full:,.0f}", f"{full / reuse:.1f} ×"]
        for reuse, full in others:
            cells += [f"{first[0] / reuse:.2f}", f"{first[1] / full:.2f}"]
        lines.append(tuple(cells))
    note = "A/B above 1: machine B is faster. Medians; one module."
    return Table(f"{TITLES[backend]}: time to first token", tuple(columns), tuple(lines), note)
