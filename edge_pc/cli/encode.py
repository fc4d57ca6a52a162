"""`edge-pc encode`: compute and store the states of schemas before anyone waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    json_option,
    output_options,
)
from edge_pc.cli.output import Output, counted
from edge_pc.cli.sources import read_schema
from edge_pc.errors import StoreError
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.compose.schema_layout import SchemaLayout
    from edge_pc.engine import Engine
    from edge_pc.runtime.encoder import EncodeReport, EncodingSize

# How many encodings an error names.
_NAMED = 5


@click.command(cls=GroupedCommand)
@click.argument("schemas", metavar="SCHEMA|-...", nargs=-1, required=True)
@engine_options
@json_option
@output_options
def encode(schemas: tuple[str, ...], engine_options: EngineOptions, as_json: bool, output: OutputOptions) -> None:
    """Compute the states of a schema's modules and store them.

    Says first how much it will write, and computes nothing if that cannot be stored. What is already stored is not
    computed again.
    """
    out = Output(output)
    engine, _ = open_engine(engine_options, out)
    with engine:
        layouts = [engine.load_schema(read_schema(source)) for source in schemas]
        sizes = [engine.encoding_size(layout.schema) for layout in layouts]
        engine.store.check_room(sum(size.nbytes for size in sizes))
        reports = [_encode(engine, layout, size, out) for layout, size in zip(layouts, sizes, strict=True)]
    if as_json:
        named = [{"source": source, "schema": layout.name} for source, layout in zip(schemas, layouts, strict=True)]
        out.json({"schemas": [{**name, **asdict(report)} for name, report in zip(named, reports, strict=True)]})
    _check_stored([label for report in reports for label in report.unstored])


def _encode(engine: Engine, layout: SchemaLayout, size: EncodingSize, out: Output) -> EncodeReport:
    if size.tokens:
        tokens, nbytes = counted(size.tokens, "token"), format_size(size.nbytes)
        out.note(f"{layout.name}: computing {tokens}, writing {nbytes} to {engine.store.path}")
    with out.progress(layout.name) as update:
        report = engine.encode(layout.schema, update)
    if report.encoded or report.unstored:
        speed = f"{report.seconds:.1f} s ({report.tokens / report.seconds:.0f} tokens/s)"
        encodings, tokens = counted(len(report.encoded), "encoding"), counted(report.tokens, "token")
        out.note(f"{layout.name}: {encodings} stored, {len(report.reused)} were already there; {tokens} in {speed}")
    else:
        out.note(f"{layout.name}: everything is already stored ({counted(len(report.reused), 'encoding')})")
    return report


def _check_stored(unstored: Sequence[str]) -> None:
    """Fail for what was computed and could not be stored, as when something else has filled the disk meanwhile."""
    if unstored:
        more = f" and {len(unstored) - _NAMED} more" if len(unstored) > _NAMED else ""
        raise StoreError(
            f"{counted(len(unstored), 'encoding')} could not be stored: {', '.join(unstored[:_NAMED])}{more}",
            hint="the warning above says why; what is stored now is not computed again",
        )
