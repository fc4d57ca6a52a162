"""Machines side by side, from their reports: as Markdown, as an HTML page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_pc.bench import charts, explain
from edge_pc.bench.names import BACKEND_NAMES
from edge_pc.bench.page import document, figure, table_html
from edge_pc.bench.report import Report
from edge_pc.bench.tables import Table, letter, machine_table
from edge_pc.bench.ttft_summary import measured_backends, rows_of, ttft
from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE = "Machines compared"
# A line style and a marker for each machine; colour comes on top.
_MACHINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
_TINTS = ("#0b4f8a", "#b3541e", "#3c7a34", "#6b3fa0")


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a comparison."""

    markdown: Path
    html: Path
    png: Path


def compare_machines(reports: Sequence[Report], out: Path) -> Written:
    """Write `out` with the endings `.md`, `.html` and `.png`.

    Raises:
        OptionError: fewer than two reports, or one without `bench ttft`, or of another model.
        MissingDependencyError: matplotlib is not installed.
    """
    backends = _check(reports)
    written = Written(*(out.with_name(out.name + ending) for ending in (".md", ".html", ".png")))
    tables = [machine_table(reports), *(ratio_table(reports, backend) for backend in backends)]
    sentences = explanations(reports, backends)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        written.markdown.write_text(markdown(tables, sentences, written.png.name), encoding="utf-8")
        caption = "Time to first token, and full prefill over reuse, by cached length; 32 new tokens."
        parts = [f"<h1>{_TITLE}</h1>", *map(table_html, tables), figure(curves(reports, backends), caption)]
        parts += ["<h2>What explains the difference</h2>", *(f"<p>{line}</p>" for line in sentences)]
        written.html.write_text(document(_TITLE, parts), encoding="utf-8")
        drawn = curves(reports, backends)
        drawn.savefig(written.png, dpi=130)
        charts.close(drawn)
    except OSError as exc:
        raise OptionError(f"{out}.* cannot be written: {exc.strerror}") from exc
    return written


def _check(reports: Sequence[Report]) -> list[str]:
    """The backends that reuse was timed on in all reports."""
    if len(reports) < 2:
        raise OptionError("one report alone cannot be compared", hint="give two or more")
    common: set[str] | None = None
    for report in reports:
        if "ttft" not in report.sections:
            raise OptionError(f"{report.path} has no times to first token", hint="run edge-pc bench ttft there")
        if report.settings["model"] != reports[0].settings["model"]:
            raise OptionError(f"{report.path} was measured with another model than {reports[0].path}")
        found = set(measured_backends(report.sections["ttft"].rows))
        common = found if common is None else common & found
    if not common:
        raise OptionError("the reports have no backend in common")
    return [backend for backend in BACKEND_NAMES if backend in common]


def ratio_table(reports: Sequence[Report], backend: str) -> Table:
    """TTFT of every machine by cached length, and the first machine's over each other's."""
    times = {
        way: [
            {row["cached_tokens"]: ttft(row) for row in rows_of(r.sections["ttft"].rows, backend, "length", way)}
            for r in reports
        ]
        for way in ("cached", "full")
    }
    lengths = sorted(set.intersection(*(set(found) for found in times["cached"] + times["full"])))
    columns = ["> cached tokens"]
    for index in range(len(reports)):
        columns += [f"> {letter(index)} reuse (ms)", f"> {letter(index)} full (ms)", f"> {letter(index)} speed-up"]
    for index in range(1, len(reports)):
        columns += [f"> A/{letter(index)} reuse", f"> A/{letter(index)} full"]
    lines = []
    for length in lengths:
        cells = [str(length)]
        pairs = [(times["cached"][i][length], times["full"][i][length]) for i in range(len(reports))]
        for cached, full in pairs:
            cells += [f"{cached:,.1f}", f"{full:,.0f}", f"{full / cached:.1f} ×"]
        for cached, full in pairs[1:]:
            cells += [f"{pairs[0][0] / cached:.2f}", f"{pairs[0][1] / full:.2f}"]
        lines.append(tuple(cells))
    note = "A/B above 1: machine B is faster. Medians; 32 new tokens, one module."
    return Table(f"{BACKEND_NAMES[backend]}: time to first token", tuple(columns), lines, note)


def explanations(reports: Sequence[Report], backends: Sequence[str]) -> list[str]:
    """For each backend the fitted model in words."""
    fits = {backend: explain.fit(reports, backend) for backend in backends}
    return [f"{BACKEND_NAMES[backend]}: {explain.sentence(found)}." for backend, found in fits.items() if found]


def markdown(tables: Sequence[Table], sentences: Sequence[str], picture: str) -> str:
    """The comparison as Markdown, with the picture beside it."""
    parts = [f"# {_TITLE}", *(table.markdown() for table in tables), f"![Time to first token]({picture})"]
    return "\n\n".join([*parts, "## What explains the difference", *sentences]) + "\n"


def curves(reports: Sequence[Report], backends: Sequence[str]) -> Figure:
    """TTFT both ways and the speed-up over cached length, a row for each backend."""
    drawn, axes = charts.new_figure(2, 4.6, rows=len(backends))
    for number, backend in enumerate(backends):
        times, ratios = axes[2 * number : 2 * number + 2]
        for index, report in enumerate(reports):
            rows = report.sections["ttft"].rows
            full = {r["cached_tokens"]: ttft(r) for r in rows_of(rows, backend, "length", "full")}
            cached = {r["cached_tokens"]: ttft(r) for r in rows_of(rows, backend, "length", "cached")}
            dashes, marker = _MACHINES[index % len(_MACHINES)]
            tint, name = _TINTS[index % len(_TINTS)], f"{letter(index)} ({report.machine['vendor']})"
            look, filled = charts.Style(tint, dashes, marker), charts.Style(tint, dashes, marker, tint)
            charts.plot_line(times, list(full), list(full.values()), look, f"{name}: full prefill")
            charts.plot_line(times, list(cached), list(cached.values()), filled, f"{name}: reuse")
            shared = [length for length in cached if length in full]
            charts.plot_line(ratios, shared, [full[n] / cached[n] for n in shared], look, name)
        charts.log_axes(times, "cached tokens (32 new tokens)", "time to first token (ms)")
        charts.log_axes(ratios, "cached tokens (32 new tokens)", "full prefill / reuse (×)")
        for each, title in ((times, BACKEND_NAMES[backend]), (ratios, f"{BACKEND_NAMES[backend]}: speed-up")):
            each.set_title(title, fontsize=10)
            charts.add_legend(each, 8)
    return drawn
