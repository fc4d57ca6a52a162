"""`edge-pc ask`: a question about documents."""

from __future__ import annotations

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
    system_option,
)
from edge_pc.cli.output import Output
from edge_pc.cli.sources import document_sources, read_text
from edge_pc.cli.values import PATH, TEXT
from edge_pc.errors import OptionError
from edge_pc.runtime.sampling import Sampling


@click.command(cls=GroupedCommand)
@click.argument("question", metavar="QUESTION|-", type=TEXT)
@click.argument("files", metavar="FILE|FOLDER|-...", nargs=-1, required=True, type=PATH)
@system_option
@option("--cite", is_flag=True, help="Say which part of which file the answer is most likely from.")
@answer_options
def ask(
    question: str,
    files: tuple[str, ...],
    system: str | None,
    cite: bool,
    serving: ServingOptions,
    sampling: Sampling,
    engine_options: EngineOptions,
    as_json: bool,
    output: OutputOptions,
) -> None:
    """Answer a question about documents.

    What is computed of a file is kept: the answer to the next question about it starts almost at once. Files may be
    text, PDF, DOCX or HTML; of a folder, all that have text are read, and patterns ('notes/*.md') may be quoted. Where
    not everything fits the model, the parts most like the question are picked. A QUESTION, or one FILE, of - is read
    from stdin.
    """
    if question == "-" and "-" in files:
        raise OptionError("question and file cannot both be read from stdin (-)", hint="write one of them out")
    out, asked = Output(output), read_text(question)
    sources = document_sources(files)
    engine, start_up = open_engine(engine_options, out)
    with engine:
        answer(
            lambda progress: engine.stream_ask(asked, sources, sampling, serving.build(), progress, system=system),
            lambda: engine.compare_ask(asked, sources, serving.build(), max_tokens=sampling.max_tokens, system=system),
            engine,
            serving,
            start_up,
            out,
            as_json=as_json,
            source=(lambda result: engine.source_of(asked, result, sources)) if cite else None,
        )
