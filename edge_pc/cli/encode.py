"""`edge-pc encode`: compute and store the states of schemas before anyone waits for them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from edge_pc.cli.output import Output, counted, read_stdin
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.engine import Engine


@click.command(cls=GroupedCommand)
@click.argument("schemas", metavar="SCHEMA|-...", nargs=-1, required=True)
@engine_options
@json_option
@output_options
def encode(schemas: tuple[str, ...], engine_options: EngineOptions, as_json: bool, output: OutputOptions) -> None:
    """Compute the states of a schema's modules and store them.

    Says first how much it will write. What is stored already is not computed again.
    """
    out = Output(output)
    engine, _ = open_engine(engine_options, out)
    with engine:
        reports = [{"source": source, **_encode(engine, source, out)} for source in schemas]
    if as_json:
        out.json({"schemas": reports})


def _encode(engine: Engine, source: str, out: Output) -> dict[str, Any]:
    layout = engine.load_schema(read_stdin() if source == "-" else Path(source))
    size = engine.encoding_size(layout.schema)
    if size.tokens:
        tokens, nbytes = counted(size.tokens, "token"), format_size(size.nbytes)
        out.note(f"{layout.name}: computing {tokens}, writing {nbytes} to {engine.store.path}")
    with out.progress(layout.name) as update:
        report = engine.encode(layout.schema, lambda p: update(p.done_tokens, p.total_tokens, p.module))
    if report.encoded:
        speed = f"{report.seconds:.1f} s ({report.tokens / report.seconds:.0f} tokens/s)"
        encodings, tokens = counted(len(report.encoded), "encoding"), counted(report.tokens, "token")
        out.note(f"{layout.name}: {encodings} stored, {len(report.reused)} were there already; {tokens} in {speed}")
    else:
        out.note(f"{layout.name}: everything is stored already ({counted(len(report.reused), 'encoding')})")
    return {"schema": layout.name, **asdict(report)}
