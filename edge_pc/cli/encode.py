"""`edge-pc encode`: compute and store the states of schemas before anyone waits for them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    json_option,
    output_options,
)
from edge_pc.cli.output import Output, counted, read_stdin
from edge_pc.cli.session import open_engine
from edge_pc.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.engine import EncodeReport, Engine


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
        reports = {}
        for source in schemas:
            name, report = _encode(engine, source, out)
            reports[source] = {"schema": name, **asdict(report)}
    if as_json:
        out.json({"schemas": reports})


def _encode(engine: Engine, source: str, out: Output) -> tuple[str, EncodeReport]:
    layout = engine.load_schema(read_stdin() if source == "-" else Path(source))
    size = engine.encoding_size(layout)
    if not size.tokens:
        out.note(f"{layout.name}: everything is stored already")
        return layout.name, engine.encode(layout)
    out.note(
        f"{layout.name}: computing {counted(size.tokens, 'token')}, writing {format_size(size.nbytes)} to {engine.store.path}"
    )
    with out.progress(layout.name) as update:
        report = engine.encode(layout, lambda p: update(p.done_tokens, p.total_tokens, p.module))
    out.note(
        f"{layout.name}: {counted(len(report.encoded), 'module')} encoded, {len(report.reused)} stored already; "
        f"{counted(report.tokens, 'token')} in {report.seconds:.1f} s ({report.tokens / report.seconds:.0f} tokens/s), "
        f"{format_size(report.nbytes)}"
    )
    return layout.name, report
