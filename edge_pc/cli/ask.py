"""`edge-pc ask`: a question about files."""

from __future__ import annotations

from pathlib import Path

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
    output_options,
    sampling_options,
    serving_options,
)
from edge_pc.cli.output import Output, read_stdin


@click.command(cls=GroupedCommand)
@click.argument("question", metavar="QUESTION|-")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@serving_options
@sampling_options
@engine_options
@json_option
@output_options
def ask(
    question: str,
    files: tuple[Path, ...],
    serving: ServingOptions,
    sampling: SamplingOptions,
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Answer a question about text files.

    Each file becomes a module (a big one several, cut at paragraphs) whose states are computed once and kept: the next
    question about the same files starts almost at once. A QUESTION of - is read from stdin.
    """
    out = Output(output)
    question = read_stdin() if question == "-" else question
    engine, start_up = open_engine(engine_options, out)
    with engine:
        answer(
            lambda progress: engine.stream_ask(question, files, sampling.build(), serving.build(), progress),
            lambda: engine.compare_ask(question, files, serving.build()),
            serving,
            start_up,
            out,
            as_json=as_json,
        )
