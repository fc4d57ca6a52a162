"""`edge-pc cache`: look at the stored KV states, check them, throw them away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from edge_pc.cli.ages import format_age, parse_age
from edge_pc.cli.options import (
    GroupedCommand,
    InOrder,
    OutputOptions,
    cache_dir_option,
    json_option,
    option,
    output_options,
    reads,
)
from edge_pc.cli.output import Output, counted
from edge_pc.errors import OptionError, StoreError
from edge_pc.system.home import SESSIONS, states_folder
from edge_pc.system.sizes import format_size, parse_size

if TYPE_CHECKING:
    from edge_pc.store import EntryInfo, Removed, SavedSession, StateStore

# Enough of a key to tell entries apart, and the least that `rm` takes for one.
_SHORT_KEY = 12
_LEAST_KEY = 6

DAMAGE_FOUND = 1


@click.group(cls=InOrder)
def cache() -> None:
    """Look at the stored KV states, check them, remove them."""


def _open_store(cache_dir: str | None) -> StateStore:
    from edge_pc.store import StateStore

    return StateStore(states_folder(cache_dir))


@cache.command("ls", cls=GroupedCommand)
@cache_dir_option
@json_option
@output_options
def list_entries(cache_dir: str | None, as_json: bool, output: OutputOptions) -> None:
    """List the stored states, most recently used first."""
    out = Output(output)
    with _open_store(cache_dir) as store:
        entries = sorted(store.entries(), key=lambda entry: entry.last_used, reverse=True)
        sessions = sorted(store.sessions.readable(), key=lambda session: session.saved, reverse=True)
    if as_json:
        out.json({"entries": [asdict(entry) for entry in entries], "sessions": [_summary(each) for each in sessions]})
    elif not entries and not sessions:
        out.note(f"no states are stored in {states_folder(cache_dir)}")
    else:
        now = time.time()
        out.table(
            ["key", "schema", "module", ">tokens", ">size", ">hits", "last used", "model"],
            [
                (
                    entry.key[:_SHORT_KEY],
                    entry.schema,
                    entry.module,
                    entry.tokens,
                    format_size(entry.nbytes),
                    entry.hits,
                    format_age(now - entry.last_used),
                    entry.model,
                )
                for entry in entries
            ],
        )
        if sessions:
            out.answer("\n")
            _show_sessions(sessions, now, out)


def _show_sessions(sessions: Sequence[SavedSession], now: float, out: Output) -> None:
    out.table(
        ["saved session", ">turns", ">tokens", "saved", "model"],
        [(s.name, s.turns, len(s.token_ids), format_age(now - s.saved), s.model) for s in sessions],
    )


def _summary(session: SavedSession) -> dict[str, object]:
    """A saved session as --json lists it."""
    return {
        "name": session.name,
        "model": session.model,
        "turns": session.turns,
        "tokens": len(session.token_ids),
        "saved": session.saved,
        "keys": [key for key, _ in session.stretches],
    }


@cache.command(cls=GroupedCommand)
@cache_dir_option
@json_option
@output_options
def info(cache_dir: str | None, as_json: bool, output: OutputOptions) -> None:
    """Show how much is stored, and how much room is left."""
    out = Output(output)
    with _open_store(cache_dir) as store:
        totals = store.totals()
    if as_json:
        out.json(asdict(totals))
        return
    free = "unknown" if totals.free_bytes is None else format_size(totals.free_bytes)
    encodings, tokens = counted(totals.entries, "encoding"), counted(totals.tokens, "token")
    rows = {
        "folder": totals.path,
        "stored": f"{encodings}, {tokens}, {format_size(totals.nbytes)}",
        "used": counted(totals.hits, "time"),
        "free": f"{free} on this disk",
    }
    for name, text in rows.items():
        click.echo(f"{name:<8} {text}")


@cache.command(cls=GroupedCommand)
@option("--repair", is_flag=True, help="Delete what is broken (it will be computed again) and correct the index.")
@cache_dir_option
@json_option
@output_options
def verify(repair: bool, cache_dir: str | None, as_json: bool, output: OutputOptions) -> int:
    """Read and check every stored byte; exits with 1 if something was wrong."""
    out = Output(output)
    with _open_store(cache_dir) as store, out.progress("checking") as update:
        entries = store.totals().entries
        findings = store.verify(update, repair=repair)
    if as_json:
        out.json({"ok": not findings, "entries": entries, "findings": [asdict(finding) for finding in findings]})
    elif findings:
        out.table(
            ["file", "problem", "done"],
            [(finding.path.name, finding.problem, finding.action or "nothing") for finding in findings],
        )
        if not repair:
            out.note("hint: edge-pc cache verify --repair deletes what is broken; it is computed again when needed")
    else:
        out.note(f"{counted(entries, 'stored encoding')} checked: no damage")
    return DAMAGE_FOUND if findings else 0


@cache.command(cls=GroupedCommand)
@cache_dir_option
def path(cache_dir: str | None) -> None:
    """Print the folder of the stored states."""
    click.echo(states_folder(cache_dir))


@cache.command(cls=GroupedCommand)
@click.argument("what", metavar="[KEY|SCHEMA|SCHEMA/MODULE|sessions/NAME]...", nargs=-1)
@option("--all", "everything", is_flag=True, help="Remove all of them.")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@cache_dir_option
@json_option
@output_options
def rm(
    what: tuple[str, ...], everything: bool, yes: bool, cache_dir: str | None, as_json: bool, output: OutputOptions
) -> None:
    """Remove stored states: by key, by schema, by module (with the modules inside it), or all.

    The first characters of a key are enough. What is removed is computed again when it is needed. A saved session
    (sessions/NAME, or sessions for all) is removed with its conversation, and with --all the texts of converted files
    (PDF, DOCX, HTML), too.
    """
    if everything == bool(what):
        raise click.UsageError("name what to remove, or give --all (not both)")
    out = Output(output)
    with _open_store(cache_dir) as store:
        entries = store.entries()
        sessions = [name for name in store.sessions.names() if everything or any(_is_session(name, w) for w in what)]
        chosen = entries if everything else [entry for entry in entries if any(_matches(entry, name) for name in what)]
        _check_all_found(what, chosen, sessions)
        if (chosen or sessions) and not yes:
            size = format_size(sum(entry.nbytes for entry in chosen))
            talks = f" and {counted(len(sessions), 'saved conversation')}" if sessions else ""
            click.confirm(f"Remove {counted(len(chosen), 'stored encoding')}, {size}{talks}?", abort=True, err=True)
        if everything:
            from edge_pc.documents.kept import KeptTexts

            KeptTexts(store.path).clear()
        removed = store.remove_sessions(sessions) + store.remove([entry.key for entry in chosen])
        _show_removed(removed, store, out, as_json=as_json)


@cache.command(cls=GroupedCommand)
@option("--max-size", callback=reads(parse_size), metavar="SIZE", help="Remove states until the rest fits (2GiB).")
@option(
    "--older-than", callback=reads(parse_age), metavar="AGE", help="Remove what has not been used for this long (30d)."
)
@cache_dir_option
@json_option
@output_options
def gc(
    max_size: int | None, older_than: float | None, cache_dir: str | None, as_json: bool, output: OutputOptions
) -> None:
    """Remove stored states by size and age, and what killed processes left."""
    out = Output(output)
    with _open_store(cache_dir) as store:
        _show_removed(store.gc(max_bytes=max_size, older_than=older_than), store, out, as_json=as_json)


def _show_removed(removed: Removed, store: StateStore, out: Output, *, as_json: bool) -> None:
    """Say what was removed, and fail if something had to stay."""
    if as_json:
        keys, kept = [entry.key for entry in removed.entries], [entry.key for entry in removed.kept]
        out.json({"removed": keys, "bytes": removed.nbytes, "kept": kept})
    else:
        out.note(f"removed {counted(len(removed.entries), 'stored encoding')}, {format_size(removed.nbytes)} freed")
    if removed.kept:
        raise StoreError(
            f"{counted(len(removed.kept), 'stored encoding')} in {store.path} cannot be deleted",
            hint="can you write to the folder? On Windows, end the programs that use the store",
        )


def _is_session(session: str, name: str) -> bool:
    """Whether `name` is that of a saved session, or of all."""
    return f"{SESSIONS}/{session}/".startswith(f"{name.rstrip('/')}/")


def _matches(entry: EntryInfo, name: str) -> bool:
    """Whether `name` is the entry's. Cells of saved sessions are removed with these, if no other one needs them."""
    from edge_pc.pml.faults import normal

    if entry.schema == SESSIONS:
        return len(name) >= _LEAST_KEY and entry.key.startswith(name)
    by_key = len(name) >= _LEAST_KEY and entry.key.startswith(name)
    path = normal(f"{entry.schema}/{entry.module}")
    return by_key or f"{path}/".startswith(f"{normal(name)}/")


def _check_all_found(names: Sequence[str], chosen: Sequence[EntryInfo], sessions: Sequence[str]) -> None:
    for name in names:
        found = any(_matches(entry, name) for entry in chosen) or any(_is_session(each, name) for each in sessions)
        if not found:
            raise OptionError(
                f"no stored states match {name!r}",
                hint=f"edge-pc cache ls shows them; a key needs at least {_LEAST_KEY} characters",
            )
