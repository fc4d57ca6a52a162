"""`edge-pc bench report` and `edge-pc bench compare`: pages and pictures from reports."""

from __future__ import annotations

from pathlib import Path

import click

from edge_pc.cli.options import GroupedCommand, OutputOptions, option, output_options
from edge_pc.cli.output import Output
from edge_pc.errors import OptionError


@click.command(cls=GroupedCommand)
@click.argument("report", metavar="REPORT.json")
@option("-o", "--html", metavar="FILE", help="The page to write.  [default: the report's name with .html]")
@output_options
def report(report: str, html: str | None, output: OutputOptions) -> None:
    """Make one HTML page of a report, with its pictures inside."""
    from edge_pc.bench.page import page
    from edge_pc.bench.report import Report

    source = Path(report)
    target = Path(html) if html else source.with_suffix(".html")
    text = page(Report.load(source))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OptionError(f"{target} cannot be written: {exc.strerror}") from exc
    Output(output).note(f"wrote {target}")


@click.command(cls=GroupedCommand)
@click.argument("reports", metavar="A.json B.json...", nargs=-1, required=True)
@option(
    "-o",
    "--name",
    metavar="NAME",
    default="edge-pc-machines",
    show_default=True,
    help="The files to write: NAME.md, NAME.html, NAME.png.",
)
@output_options
def compare(reports: tuple[str, ...], name: str, output: OutputOptions) -> None:
    """Set machines side by side: times, ratios, and what explains them."""
    from edge_pc.bench.machines import compare_machines
    from edge_pc.bench.report import Report

    written = compare_machines([Report.load(Path(path)) for path in reports], Path(name))
    Output(output).note(f"wrote {written.markdown}, {written.html}, {written.png}")
