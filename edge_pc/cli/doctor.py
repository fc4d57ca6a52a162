"""`edge-pc doctor`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from edge_pc.cli.options import GroupedCommand, OutputOptions, json_option, output_options
from edge_pc.cli.output import Output

if TYPE_CHECKING:
    from edge_pc.doctor import Check

ENVIRONMENT_LACKS = 3


@click.command(cls=GroupedCommand)
@json_option
@output_options
def doctor(as_json: bool, output: OutputOptions) -> int:
    """Check that this machine and this environment can run edge-pc.

    Each backend is loaded in a process of its own, so that one that crashes is reported. Exits with 3 when the default
    backend cannot be used.
    """
    from edge_pc.doctor import examine, works

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
    from rich.padding import Padding
    from rich.text import Text

    from edge_pc.cli.output import console

    screen = console(sys.stdout)
    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("FAIL", "bold red")}
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, style = marks[check.status]
        head = Text.assemble((f"{mark:<5}", style), f"{check.name:<{width}}  ")
        body = Text(check.detail + (f"\nhint: {check.hint}" if check.hint else ""))
        lines = body.wrap(screen, max(20, screen.width - len(head)))
        screen.print(Text.assemble(head, lines[0]))
        for line in lines[1:]:
            screen.print(Padding(line, (0, 0, 0, len(head))))
