"""`edge-pc add` and `edge-pc watch`: prepare files before anyone asks about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.encode import check_stored, show_encoding
from edge_pc.cli.opening import open_engine
from edge_pc.cli.options import (
    EngineOptions,
    GroupedCommand,
    OutputOptions,
    engine_options,
    json_option,
    output_options,
    system_option,
)
from edge_pc.cli.output import Output, counted
from edge_pc.cli.sources import document_sources
from edge_pc.cli.values import PATH
from edge_pc.errors import MissingDependencyError, OptionError, StoreError

if TYPE_CHECKING:
    from edge_pc.documents import Source
    from edge_pc.engine import Engine
    from edge_pc.runtime.encoder import EncodeReport

# How much less urgent than what people wait for.
_NICE = 10

# How long to wait for changes before looking whether Ctrl-C was pressed.
_POLL_MS = 500


@click.command(cls=GroupedCommand)
@click.argument("files", metavar="FILE|FOLDER|-...", nargs=-1, required=True, type=PATH)
@system_option
@engine_options
@json_option
@output_options
def add(
    files: tuple[str, ...], system: str | None, engine_options: EngineOptions, as_json: bool, output: OutputOptions
) -> None:
    """Prepare files, so that a question about them computes only itself.

    Says first how much it will write, and computes nothing if that cannot be stored. A question may then be about any
    of the files, in any order. Each file is computed as it is alone, and as it is after others; of files that do not
    fit the model together, also the parts that are picked from.
    """
    out, sources = Output(output), document_sources(files)
    engine, _ = open_engine(engine_options, out)
    with engine:
        report = _prepare(engine, "files", sources, system, out)
    if as_json:
        out.json(asdict(report))
    check_stored(report.unstored)


@click.command(cls=GroupedCommand)
@click.argument("folder", type=PATH)
@system_option
@engine_options
@output_options
def watch(folder: str, system: str | None, engine_options: EngineOptions, output: OutputOptions) -> None:
    """Keep a folder prepared (see `add`): files are computed again when they change.

    Ctrl-C ends it. It works at low priority. Files that cannot be read are left out until they change.
    """
    changes = _watcher()
    out = Output(output)
    engine, _ = open_engine(engine_options, out)
    with engine:
        _check_folder(Path(folder), engine.store.path)
        if hasattr(os, "nice"):
            os.nice(_NICE)
        try:
            # Its first answer, maybe of no change, says that it watches: what changes from then on is not missed.
            for number, changed in enumerate(changes(folder, yield_on_timeout=True, rust_timeout=_POLL_MS)):
                if changed or number == 0:
                    _prepare_what_can_be(engine, folder, system, out)
                if number == 0:
                    out.note(f"{folder}: watching; Ctrl-C ends it")
        except KeyboardInterrupt:
            out.note(f"{folder}: no longer watched")


def _prepare(engine: Engine, name: str, sources: Sequence[Source], system: str | None, out: Output) -> EncodeReport:
    size = engine.adding_size(sources, system=system)
    engine.store.check_room(size.nbytes)
    return show_encoding(name, size, partial(engine.add, sources, system=system), engine, out)


def _prepare_what_can_be(engine: Engine, folder: str, system: str | None, out: Output) -> None:
    """Prepare a folder; what keeps that from being done now may be gone after the next change."""
    try:
        report = _prepare(engine, folder, [folder], system, out)
        if report.unstored:
            out.note(f"{folder}: {counted(len(report.unstored), 'encoding')} could not be stored")
    except (OptionError, StoreError) as exc:
        out.note(f"{folder}: not prepared: {exc.message}")


def _check_folder(folder: Path, states: Path) -> None:
    if not folder.is_dir():
        raise OptionError(f"{folder}: this is not a folder", hint="name a folder; edge-pc add FILE prepares files")
    if states.resolve().is_relative_to(folder.resolve()):
        raise OptionError(
            f"{folder}: the states are kept in it ({states}), so preparing it would change it",
            hint="set another folder for them with --cache-dir",
        )


def _watcher() -> Callable[..., Iterator[object]]:
    """What reports changes below a folder.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        from watchfiles import watch
    except ImportError as exc:
        raise MissingDependencyError(
            "watching a folder needs the package watchfiles, which is not installed",
            hint='pip install "edge-prompt-cache[documents]"',
        ) from exc
    return watch
