"""`edge-pc encode`: compute and store the states of schemas before anyone waits for them."""

from __future__ import annotations

import click

from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    json_option,
    output_options,
)


@click.command(cls=GroupedCommand)
@click.argument("schemas", metavar="SCHEMA...", nargs=-1, required=True)
@engine_options
@json_option
@output_options
def encode(schemas: tuple[str, ...], engine_options: EngineOptions, as_json: bool, output: OutputOptions) -> None:
    """Compute the states of a schema's modules and store them.

    Modules that are stored already are not computed again.
    """
