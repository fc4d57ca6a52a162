"""The variables that set options, and a warning of one that sets nothing: it is most likely misspelled."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

from edge_pc.cli.streams import say
from edge_pc.system.home import HOME_VARIABLE

PREFIX = "EDGE_PC_"


def warn_of_unknown_variables(ctx: click.Context) -> None:
    """Name the variables with our prefix that no command reads, each with the nearest one that is read."""
    given = {name for name in os.environ if name.startswith(PREFIX)} - {HOME_VARIABLE} - set(variables(ctx.command))
    if not given:
        return  # the usual case: no other command is imported
    from edge_pc.pml.faults import nearest

    known = {HOME_VARIABLE, *variables(ctx.find_root().command)}
    for name in sorted(given - known):
        near = nearest(name.removeprefix(PREFIX), (other.removeprefix(PREFIX) for other in known))
        suggestion = f" (did you mean {PREFIX}{near}?)" if near else ""
        say(f"warning: the variable {name} sets nothing{suggestion}\n")


def variables(command: click.Command) -> Iterator[str]:
    """The variables of a command's options, or of all commands in a group."""
    yield from (str(param.envvar) for param in command.params if param.envvar)
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from variables(command.get_command(ctx, name) or click.Command(name))
