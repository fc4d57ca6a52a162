"""`edge-pc run`: a PML prompt, or one put together from options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.answer import answer
from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    ServingOptions,
    answer_options,
    option,
)
from edge_pc.cli.output import Output
from edge_pc.cli.sources import read_schema, read_text
from edge_pc.cli.streams import read_stdin
from edge_pc.cli.values import PATH, TEXT
from edge_pc.errors import OptionError, PMLError
from edge_pc.runtime.sampling import Sampling

if TYPE_CHECKING:
    from edge_pc.pml import Prompt, Schema


@click.command(cls=GroupedCommand)
@click.argument("prompt", metavar="[PROMPT.xml|-]", required=False)
@option(
    "--schema",
    "schemas",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="A schema that the prompt uses. Repeatable.  [default: NAME.xml next to the prompt]",
)
@option(
    "--import", "imports", multiple=True, type=TEXT, metavar="A,B/C", help="Modules, with their parents. Repeatable."
)
@option(
    "--arg",
    "arguments",
    multiple=True,
    type=TEXT,
    metavar="MODULE.PARAM=VALUE",
    help="An argument for an imported module, such as trip/rail.city=Rome. Repeatable.",
)
@option("--text", type=TEXT, metavar="TEXT|-", help="What follows the modules; - reads it from stdin.")
@answer_options
def run(
    prompt: str | None,
    schemas: tuple[str, ...],
    imports: tuple[str, ...],
    arguments: tuple[str, ...],
    text: str | None,
    serving: ServingOptions,
    sampling: Sampling,
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Answer a PML prompt against its schema.

    The prompt is read from a file or from stdin (-), or is put together from options:

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
            lambda progress: engine.stream(parsed, sampling, serving.build(), progress),
            lambda: engine.compare(parsed, serving.build()),
            engine,
            serving,
            start_up,
            out,
            as_json=as_json,
        )


def _read_prompt(prompt: str, schemas: tuple[str, ...]) -> tuple[list[Schema], Prompt]:
    """The prompt in a file or on stdin, and the schemas it may use."""
    from edge_pc.pml import load_prompt, parse_prompt

    if prompt == "-":
        folder, parsed = Path(), parse_prompt(read_stdin())
    else:
        folder, parsed = Path(prompt).parent, load_prompt(Path(prompt))
    if schemas:
        return _load_schemas(schemas), parsed
    beside = folder / f"{parsed.schema}.xml"
    if not beside.is_file():
        raise OptionError(
            f"the prompt uses the schema {parsed.schema!r}, and {beside} does not exist",
            hint="name the schema's file with --schema FILE",
        )
    return _load_schemas([str(beside)]), parsed


def _put_together(
    schemas: tuple[str, ...], imports: tuple[str, ...], arguments: tuple[str, ...], text: str | None
) -> tuple[list[Schema], Prompt]:
    """A prompt from --schema, --import, --arg and --text, checked before any model is loaded."""
    from edge_pc.pml import build_prompt, select

    if len(schemas) != 1 or text is None:
        raise click.UsageError("give a prompt's file, or one --schema and --text (with --import A,B)")
    (schema,) = _load_schemas(schemas)
    paths = [path.strip() for value in imports for path in value.split(",") if path.strip()]
    text = read_text(text)
    try:
        prompt = build_prompt(schema, paths, _by_target(arguments), text)
        select(prompt, schema)
    except PMLError as exc:
        ways = "--import MODULE, --arg MODULE.PARAM=VALUE"
        raise OptionError(exc.message, hint=f"{exc.hint} ({ways})" if exc.hint else ways) from exc
    return [schema], prompt


def _by_target(arguments: tuple[str, ...]) -> dict[str, str]:
    """`MODULE.PARAM` → value, from each `MODULE.PARAM=VALUE`; a name never holds `=`, a value may."""
    values: dict[str, str] = {}
    for argument in arguments:
        target, equals, value = argument.partition("=")
        if not equals:
            raise click.BadParameter(f"{argument!r} is not MODULE.PARAM=VALUE", param_hint="--arg")
        if target in values:
            raise click.BadParameter(f"{target} is given twice", param_hint="--arg")
        values[target] = value
    return values


def _load_schemas(files: Sequence[str]) -> list[Schema]:
    """The schemas in these files, each of another name: a prompt says by name which one it is for."""
    loaded: dict[str, Schema] = {}
    for file in files:
        schema = read_schema(file)
        if schema.name in loaded:
            raise OptionError(
                f"{file} is another schema of the name {schema.name!r}", hint="give one --schema for each name"
            )
        loaded[schema.name] = schema
    return list(loaded.values())
