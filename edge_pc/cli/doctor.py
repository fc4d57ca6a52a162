"""`edge-pc doctor`."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from edge_pc.cli import ENVIRONMENT_LACKS
from edge_pc.cli.options import GroupedCommand, OutputOptions, json_option, output_options
from edge_pc.cli.output import Output

if TYPE_CHECKING:
    from edge_pc.system.doctor import Check


@click.command(cls=GroupedCommand)
@json_option
@output_options
def doctor(as_json: bool, output: OutputOptions) -> int:
    """Check that this machine and this environment can run edge-pc.

    Each backend is loaded in a process of its own, so that one that crashes is reported. Exits with 3 when the default
    backend cannot be used.
    """
    from edge_pc.system.doctor import examine, works

    out = Output(output)
    with out.progress("Looking") as update:
        update(0, 0, "at this machine")
        checks = examine()
    if as_json:
        out.json({"ok": works(checks), "checks": [asdict(check) for check in checks]})
    elif not out.quiet:
        _show(checks)
    return 0 if works(checks) else ENVIRONMENT_LACKS


def _show(checks: list[Check]) -> None:
    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("FAIL", "red")}
    width = max(len(check.name) for check in checks)
    columns = shutil.get_terminal_size((110, 24)).columns
    for check in checks:
        mark, colour = marks[check.status]
        head = f"{mark:<5}{check.name:<{width}}  "
        lines = textwrap.wrap(check.detail, max(30, columns - len(head)))
        lines += textwrap.wrap(f"hint: {check.hint}", max(30, columns - len(head))) if check.hint else []
        text = ("\n" + " " * len(head)).join(lines)
        click.echo(click.style(f"{mark:<5}", fg=colour) + f"{check.name:<{width}}  {text}")
