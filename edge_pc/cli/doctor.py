"""`edge-pc doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from edge_pc.cli import ENVIRONMENT_LACKS
from edge_pc.cli.options import GroupedCommand, OutputOptions, json_option, output_options
from edge_pc.cli.output import Output
from edge_pc.progress import Progress

if TYPE_CHECKING:
    from edge_pc.cli.examine import Check


@click.command(cls=GroupedCommand)
@json_option
@output_options
def doctor(as_json: bool, output: OutputOptions) -> int:
    """Check that this machine and this environment can run edge-pc.

    Each backend is loaded in its own process, so that a crash is reported. Exits with 3 if the default backend
    cannot be used.
    """
    from edge_pc.cli.examine import examine, works

    out = Output(output)
    with out.progress("Looking") as update:
        update(Progress(0, 0, "at this machine"))
        checks = examine()
    if as_json:
        out.json({"ok": works(checks), "checks": [asdict(check) for check in checks]})
    elif not out.quiet:
        _show(checks, out)
    return 0 if works(checks) else ENVIRONMENT_LACKS


def _show(checks: list[Check], out: Output) -> None:
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("FAIL", "red")}
    rows = [
        (Text(*marks[check.status]), check.name, check.detail + (f"\nhint: {check.hint}" if check.hint else ""))
        for check in checks
    ]
    out.table(["", "check", "found"], rows)
