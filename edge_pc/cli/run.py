"""`edge-pc run`: a PML prompt, or one put together from options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.answer import answer
from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    SamplingOptions,
    ServingOptions,
    engine_options,
    json_option,
    option,
    output_options,
    sampling_options,
    serving_options,
)
from edge_pc.cli.output import Output, read_stdin
from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from edge_pc.pml import Prompt, Schema


@click.command(cls=GroupedCommand)
@click.argument("prompt", metavar="[PROMPT.xml|-]", required=False)
@option(
    "--schema",
    "schemas",
    multiple=True,
    metavar="FILE",
    help="A schema that the prompt uses. Repeatable.  [default: NAME.xml beside the prompt]",
)
@option("--import", "imports", multiple=True, metavar="A,B/C", help="Modules, with their parents. Repeatable.")
@option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="MODULE.PARAM=VALUE",
    help="An argument of an imported module, such as trip/rail.city=Rome. Repeatable.",
)
@option("--text", metavar="TEXT|-", help="What follows the modules; - reads it from stdin.")
@serving_options
@sampling_options
@engine_options
@json_option
@output_options
def run(
    prompt: str | None,
    schemas: tuple[str, ...],
    imports: tuple[str, ...],
    arguments: tuple[str, ...],
    text: str | None,
    serving: ServingOptions,
    sampling: SamplingOptions,
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Answer a PML prompt against its schema.

    The prompt is a file, or stdin (-), or is put together by options:

    \b
    edge-pc run prompt.xml --schema travel.xml
    edge-pc run --schema travel.xml --import tokyo --text "Where can I see art?"
    """
    out = Output(output)
    if prompt is None:
        loaded, parsed = _put_together(schemas, imports, arguments, text)
    elif imports or arguments or text is not None:
        raise click.UsageError("give a prompt, or --import, --arg and --text, not both")
    else:
        loaded, parsed = _read_prompt(prompt, schemas)
    engine, start_up = open_engine(engine_options, out)
    with engine:
        for schema in loaded:
            engine.load_schema(schema)
        answer(
            lambda progress: engine.stream(parsed, sampling.build(), serving.build(), progress),
            lambda: engine.compare(parsed, serving.build()),
            serving,
            start_up,
            out,
            as_json=as_json,
        )


def _read_prompt(prompt: str, schemas: tuple[str, ...]) -> tuple[list[Schema], Prompt]:
    """The prompt in a file or on stdin, and the schemas it may use."""
    from edge_pc.pml import load_prompt, load_schema, parse_prompt

    if prompt == "-":
        folder, parsed = Path(), parse_prompt(read_stdin())
    else:
        folder, parsed = Path(prompt).parent, load_prompt(Path(prompt))
    if schemas:
        return [load_schema(Path(schema)) for schema in schemas], parsed
    beside = folder / f"{parsed.schema}.xml"
    if not beside.is_file():
        raise OptionError(
            f"the prompt uses the schema {parsed.schema!r}, and {beside} does not exist",
            hint="name the schema's file with --schema FILE",
        )
    return [load_schema(beside)], parsed


def _put_together(
    schemas: tuple[str, ...], imports: tuple[str, ...], arguments: tuple[str, ...], text: str | None
) -> tuple[list[Schema], Prompt]:
    """A prompt from --schema, --import, --arg and --text."""
    from edge_pc.pml import build_prompt, load_schema

    if len(schemas) != 1 or text is None:
        raise click.UsageError("give a prompt's file, or one --schema and --text (with --import A,B)")
    schema = load_schema(Path(schemas[0]))
    paths = [path.strip() for value in imports for path in value.split(",") if path.strip()]
    text = read_stdin() if text == "-" else text
    return [schema], build_prompt(schema, paths, dict(map(_argument, arguments)), text)


def _argument(text: str) -> tuple[str, str]:
    """(`MODULE.PARAM`, value) of `MODULE.PARAM=VALUE`; a name never holds `=`, a value may."""
    target, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not MODULE.PARAM=VALUE", param_hint="--arg")
    return target, value
