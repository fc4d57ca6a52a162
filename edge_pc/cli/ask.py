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
    ServingOptions,
    answer_options,
)
from edge_pc.cli.output import Output
from edge_pc.cli.sources import read_text
from edge_pc.cli.values import TEXT
from edge_pc.runtime.sampling import Sampling


@click.command(cls=GroupedCommand)
@click.argument("question", metavar="QUESTION|-", type=TEXT)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@answer_options
def ask(
    question: str,
    files: tuple[Path, ...],
    serving: ServingOptions,
    sampling: Sampling,
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Answer a question about text files.

    Each file becomes a module (a long file becomes several, cut at paragraphs) whose states are computed once and kept:
    the answer to the next question about the same files starts almost at once. A QUESTION of - is read from stdin.
    """
    out, asked = Output(output), read_text(question)
    engine, start_up = open_engine(engine_options, out)
    with engine:
        answer(
            lambda progress: engine.stream_ask(asked, files, sampling, serving.build(), progress),
            lambda: engine.compare_ask(asked, files, serving.build(), max_tokens=sampling.max_tokens),
            engine,
            serving,
            start_up,
            out,
            as_json=as_json,
        )
