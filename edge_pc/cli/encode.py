"""`edge-pc encode`: compute and store the states of schemas before anyone waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    json_option,
    option,
    output_options,
)
from edge_pc.cli.output import Output, counted
from edge_pc.cli.sources import read_schema
from edge_pc.cli.values import PATH
from edge_pc.errors import StoreError
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.engine import Engine
    from edge_pc.pml.model import Prompt
    from edge_pc.progress import OnProgress
    from edge_pc.runtime.encoder import EncodeReport, EncodingSize

# How many encodings an error names.
_NAMED = 5


@click.command(cls=GroupedCommand)
@click.argument("schemas", metavar="SCHEMA|-...", nargs=-1, required=True)
@option(
    "--for",
    "prompts",
    multiple=True,
    type=PATH,
    metavar="PROMPT.xml",
    help="Also make exact states for this prompt's modules in this order. Repeatable.",
)
@engine_options
@json_option
@output_options
def encode(
    schemas: tuple[str, ...],
    prompts: tuple[str, ...],
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Compute the states of a schema's modules and store them.

    Says first how much it will write, and computes nothing if that cannot be stored. What is already stored is not
    computed again.
    """
    from edge_pc.pml.prompt import load_prompt

    out = Output(output)
    wanted = [load_prompt(Path(prompt)) for prompt in prompts]
    engine, _ = open_engine(engine_options, out)
    with engine:
        layouts = [engine.load_schema(read_schema(source)) for source in schemas]
        sizes = [engine.encoding_size(layout.schema) for layout in layouts]
        engine.store.check_room(sum(size.nbytes for size in sizes))
        reports = [
            show_encoding(layout.name, size, partial(engine.encode, layout.schema), engine, out)
            for layout, size in zip(layouts, sizes, strict=True)
        ]
        exact = [_refine(engine, name, prompt, out) for name, prompt in zip(prompts, wanted, strict=True)]
    if as_json:
        named = [{"source": source, "schema": layout.name} for source, layout in zip(schemas, layouts, strict=True)]
        value = {"schemas": [{**name, **asdict(report)} for name, report in zip(named, reports, strict=True)]}
        if prompts:
            value["prompts"] = [{"source": p, **asdict(report)} for p, report in zip(prompts, exact, strict=True)]
        out.json(value)
    check_stored([label for report in (*reports, *exact) for label in report.unstored])


def show_encoding(
    name: str, size: EncodingSize, encode: Callable[[OnProgress], EncodeReport], engine: Engine, out: Output
) -> EncodeReport:
    """Encode, and say before and after what is computed and written.

    Args:
        name: of what is encoded.
        size: what is still to be computed.
        encode: does it.
    """
    if size.tokens:
        tokens, nbytes = counted(size.tokens, "token"), format_size(size.nbytes)
        out.note(f"{name}: computing {tokens}, writing {nbytes} to {engine.store.path}")
    with out.progress(name) as update:
        report = encode(update)
    if report.encoded or report.unstored:
        speed = f"{report.seconds:.1f} s ({report.tokens / report.seconds:.0f} tokens/s)"
        encodings, tokens = counted(len(report.encoded), "encoding"), counted(report.tokens, "token")
        out.note(f"{name}: {encodings} stored, {len(report.reused)} were already there; {tokens} in {speed}")
    else:
        out.note(f"{name}: everything is already stored ({counted(len(report.reused), 'encoding')})")
    return report


def _refine(engine: Engine, name: str, prompt: Prompt, out: Output) -> EncodeReport:
    with out.progress(name) as update:
        (report,) = engine.refine([prompt], progress=update)
    made = counted(len(report.encoded), "exact encoding")
    out.note(f"{name}: {made} stored, {len(report.reused)} were already there")
    return report


def check_stored(unstored: Sequence[str]) -> None:
    """Fail for what was computed and could not be stored, as when something else has filled the disk meanwhile."""
    if unstored:
        more = f" and {len(unstored) - _NAMED} more" if len(unstored) > _NAMED else ""
        raise StoreError(
            f"{counted(len(unstored), 'encoding')} could not be stored: {', '.join(unstored[:_NAMED])}{more}",
            hint="the warning above says why; what is stored now is not computed again",
        )
