"""`edge-pc bench`: what reuse gives on this machine, and one machine against another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_pc.backends import BACKENDS
from edge_pc.bench.benches import BENCHES, BenchEntry
from edge_pc.checks import THREADS
from edge_pc.cli.options import GroupedCommand, InOrder, OutputOptions, grouped, model_option, option, output_options
from edge_pc.cli.output import Output
from edge_pc.cli.values import PATH, number
from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from edge_pc.bench.document import Document
    from edge_pc.bench.report import Report

_MODEL, _REPORT = "Model and backends", "Report"
_FOLDER_HELP = "A folder for the states while they are measured.  [default: below the cache home, deleted at the end]"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured, and where the numbers go."""

    model: str
    gguf: str | None
    backend: tuple[str, ...]
    threads: int | None
    bench_dir: str | None
    report: str
    quick: bool
    restart: bool


measurement_options = grouped(
    Measurement,
    "measurement",
    model_option,
    option(
        "--gguf",
        group=_MODEL,
        type=PATH,
        metavar="FILE",
        help="The file for llama.cpp.  [default: a pulled model's weights in Q8_0, made once]",
    ),
    option(
        "--backend",
        group=_MODEL,
        type=click.Choice(list(BACKENDS)),
        multiple=True,
        help="What runs the model. Repeatable.  [default: all that are installed]",
    ),
    option(
        "--threads",
        group=_MODEL,
        type=number(THREADS),
        metavar="N",
        help="Compute threads.  [default: what is fastest for a full prefill]",
    ),
    option("--bench-dir", group=_MODEL, type=PATH, metavar="DIR", help=_FOLDER_HELP),
    option(
        "-o",
        "--report",
        group=_REPORT,
        type=PATH,
        metavar="FILE",
        default="edge-pc-bench.json",
        show_default=True,
        help="The JSON report to fill; what it already has is not measured again.",
    ),
    option("--quick", group=_REPORT, is_flag=True, help="A small run, to see that everything works."),
    option("--restart", group=_REPORT, is_flag=True, help="Measure the section again from the start."),
)


def run(benches: Mapping[str, BenchEntry], measurement: Measurement, output: Output, **settings: Any) -> None:
    """Fill a section with each bench, and show its tables.

    Args:
        settings: fields of the benches' settings that are not to have their default.
    """
    from edge_pc.bench.work import BenchOptions, fill, open_report

    gguf, folder = (Path(path) if path else None for path in (measurement.gguf, measurement.bench_dir))
    options = BenchOptions(measurement.model, gguf, measurement.backend, measurement.threads, folder)
    command = [click.get_current_context().find_root().info_name or "", *sys.argv[1:]]
    report = open_report(Path(measurement.report), options, command)
    for name, entry in benches.items():
        bench = entry.load()
        chosen = replace(bench.settings.quick() if measurement.quick else bench.settings(), **settings)
        with output.progress(name) as update:
            fill(name, bench, report, options, chosen, update, command=command, restart=measurement.restart)
        for table in report.tables(name):
            output.answer(f"{table.title}\n")
            output.table([column.replace("> ", ">") for column in table.columns], table.rows)
            output.answer(f"{table.note}\n\n" if table.note else "\n")


def write(document: Document, html: Path, markdown: Path | None = None) -> None:
    """Write a page; with `markdown`, also as Markdown, and its picture beside it.

    Raises:
        OptionError: a file cannot be written.
    """
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(document.html(), encoding="utf-8")
        if markdown is not None:
            png = markdown.with_suffix(".png")
            markdown.write_text(document.markdown(png.name), encoding="utf-8")
            document.parts[0].pictures[0].save(png)
    except OSError as exc:
        raise OptionError(f"{exc.filename or html} cannot be written: {exc.strerror}") from exc


@click.group(cls=InOrder)
def bench() -> None:
    """Measure what reuse gives on this machine, and compare machines.

    Every bench fills one section of a JSON report; interrupted, it goes on where it stopped. `bench report` makes a
    page of it.
    """


def measuring_command(name: str, bench: BenchEntry, *more: Callable[[Any], Any]) -> click.Command:
    """The command of a bench; `more` decorators add options that are fields of its settings."""

    def call(measurement: Measurement, output: OutputOptions, **settings: Any) -> None:
        given = {field: value for field, value in settings.items() if value is not None}
        run({name: bench}, measurement, Output(output), **given)

    decorated: Any = output_options(call)
    for decorate in (measurement_options, *more):
        decorated = decorate(decorated)
    return click.command(name, cls=GroupedCommand, help=bench.help)(decorated)


@bench.command("all", cls=GroupedCommand)
@measurement_options
@output_options
def all_benches(measurement: Measurement, output: OutputOptions) -> None:
    """Run all benches, one after the other, and make the page."""
    from edge_pc.bench.charts import require_matplotlib

    require_matplotlib()
    out = Output(output)
    run(BENCHES, measurement, out)
    write_page(Path(measurement.report), None, out)


def write_page(report: Path, html: Path | None, output: Output) -> None:
    """The page of a report, beside it unless another place is given."""
    from edge_pc.bench.document import page
    from edge_pc.bench.report import Report

    target = html or report.with_suffix(".html")
    write(page(Report.load(report)), target)
    output.note(f"wrote {target}")


for _name, _bench in BENCHES.items():
    bench.add_command(measuring_command(_name, _bench))


@bench.command("report", cls=GroupedCommand)
@click.argument("report", type=PATH, metavar="REPORT.json")
@option("-o", "--html", type=PATH, metavar="FILE", help="The page to write.  [default: the report's name with .html]")
@output_options
def make_page(report: str, html: str | None, output: OutputOptions) -> None:
    """Make one HTML page of a report, with its pictures inside."""
    write_page(Path(report), Path(html) if html else None, Output(output))


reports_argument = click.argument("reports", type=PATH, metavar="A.json B.json...", nargs=-1, required=True)
name_option = option(
    "-o",
    "--name",
    type=PATH,
    metavar="NAME",
    default="edge-pc-machines",
    show_default=True,
    help="The files to write: NAME.md, NAME.html, NAME.png.",
)


@bench.command(cls=GroupedCommand)
@reports_argument
@name_option
@output_options
def compare(reports: tuple[str, ...], name: str, output: OutputOptions) -> None:
    """Compare machines: times, and their ratios."""
    from edge_pc.bench import comparison

    write_comparison(comparison.compare, reports, name, Output(output))


def write_comparison(
    compare: Callable[[Sequence[Report]], Document], reports: Sequence[str], name: str, output: Output
) -> None:
    """The page that `compare` makes of reports, as `name` with .md, .html and .png."""
    from edge_pc.bench.report import Report

    write(compare([Report.load(Path(path)) for path in reports]), Path(f"{name}.html"), Path(f"{name}.md"))
    output.note(f"wrote {name}.md, {name}.html, {name}.png")
