"""Commands on stores that are full, read-only, limited, damaged."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_tools import put

from edge_pc.store import StateStore
from edge_pc.store.index import INDEX_FILE

Finished = subprocess.CompletedProcess[str]
Run = Callable[..., Finished]

SCHEMA = """<schema name="trip">
  <module name="lisbon">In Lisbon, the old tram climbs the hill.</module>
  <module name="oslo">In Oslo, ferries leave for the islands.</module>
</schema>
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Run:
    """Runs `edge-pc` with the tiny model in its own process, in a folder with `trip.xml` and `notes.txt`."""
    (tmp_path / "trip.xml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("The museum opens at ten.\n", encoding="utf-8")
    environment = {"EDGE_PC_MODEL": str(tiny_model), "EDGE_PC_MAX_TOKENS": "4", "EDGE_PC_THREADS": "1"}

    def call(*arguments: str) -> Finished:
        return subprocess.run(
            [sys.executable, "-m", "edge_pc", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the states of a few tokens."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip("may not mount a disk here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.npy"))


def check_refused(child: Finished, says: str) -> None:
    """The command failed before it computed anything, and claims nothing."""
    assert child.returncode == 3, child.stderr
    assert says in child.stderr
    assert "hint: " in child.stderr
    assert "already stored" not in child.stderr
    assert "computing" not in child.stderr
    assert child.stdout == ""


def check_answered(run: Run, *options: str) -> str:
    """A question is answered all the same, with one warning; returns it."""
    child = run("ask", "When?", "notes.txt", "--json", *options)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["stats"]["new_tokens"] == 4
    warnings = [line for line in child.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, child.stderr
    return child.stderr


def test_a_full_disk(run: Run, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(250_000))
    where = ("--cache-dir", str(small_disk / "states"))
    check_refused(run("encode", "trip.xml", *where), "No space left on device")
    assert "No space left on device" in check_answered(run, *where)
    assert names(small_disk) == []
    (small_disk / "filler").unlink()


def test_a_read_only_disk(run: Run, small_disk: Path) -> None:
    where = ("--cache-dir", str(small_disk / "states"))
    with StateStore(small_disk / "states") as store:
        put(store, 1, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    check_refused(run("encode", "trip.xml", *where), "Read-only file system")
    assert "Read-only file system" in check_answered(run, *where)
    for command in (["ls"], ["info"], ["verify"], ["verify", "--repair"]):
        assert run("cache", *command, *where).returncode == 0
    for command in (["rm", "--all", "--yes"], ["gc", "--max-size", "0"], ["gc", "--older-than", "0s"]):
        child = run("cache", *command, *where)
        assert child.returncode == 3
        assert "removed 0 stored encodings" in child.stderr
        assert "error: 1 stored encoding in " in child.stderr
        assert "cannot be deleted\nhint: " in child.stderr
    kept = json.loads(run("cache", "rm", "--all", "--yes", "--json", *where).stdout)
    assert (kept["removed"], len(kept["kept"])) == ([], 1)


def test_states_larger_than_the_limit(run: Run, home: Path) -> None:
    check_refused(run("encode", "trip.xml", "--max-cache-size", "1KiB"), "larger than the limit of the store, 1.0 KiB")
    assert "larger than the limit" in check_answered(run, "--max-cache-size", "1KiB")
    assert names(home / "states") == []


def test_a_limit_below_what_is_stored(run: Run, home: Path) -> None:
    assert run("encode", "trip.xml", "-q").returncode == 0
    before = names(home / "states")
    limit = ("--max-cache-size", "1KiB")
    assert run("encode", "trip.xml", *limit).returncode == 0, "there is nothing to store"
    (home.parent / "other.xml").write_text(SCHEMA.replace("Oslo", "Bergen"), encoding="utf-8")
    check_refused(run("encode", str(home.parent / "other.xml"), *limit), "more than its limit of 1.0 KiB")
    said = check_answered(run, *limit)
    assert "more than its limit of 1.0 KiB" in said
    assert names(home / "states") == before
    command = said[said.index("edge-pc cache gc") :].splitlines()[0]
    assert run(*command.split()[1:]).returncode == 0
    assert names(home / "states") == []


def test_names_are_matched_in_any_unicode_form(run: Run, home: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    (home.parent / "other.xml").write_text(SCHEMA.replace("oslo", decomposed), encoding="utf-8")
    for name in (composed, decomposed):
        assert run("encode", str(home.parent / "other.xml"), "-q").returncode == 0
        removed = run("cache", "rm", f"trip/{name}", "--yes", "--json")
        assert len(json.loads(removed.stdout)["removed"]) == 1


def test_what_could_not_be_stored_is_named(
    home: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Something else fills the disk while states are computed."""
    from edge_pc.cli import main
    from edge_pc.store.inventory import Inventory

    (tmp_path / "trip.xml").write_text(SCHEMA, encoding="utf-8")
    room, needed = Inventory.make_room, []

    def fill_up(self: Inventory, key: str, nbytes: int) -> None:
        needed.append(nbytes)
        if len(needed) == 2:
            monkeypatch.setattr("edge_pc.store.faults.free_bytes", lambda _: 1024)
        room(self, key, nbytes)

    monkeypatch.setattr(Inventory, "make_room", fill_up)
    assert main(["encode", str(tmp_path / "trip.xml"), "--model", str(tiny_model), "--json"]) == 3
    captured = capsys.readouterr()
    (report,) = json.loads(captured.out)["schemas"]
    assert len(report["encoded"]) == 1
    assert report["unstored"]
    assert f"{len(report['unstored'])} encoding" in captured.err
    assert f"could not be stored: {', '.join(report['unstored'])}" in captured.err
    assert captured.err.count("warning: ") == 1
    assert len(names(home)) == 1


def test_a_listing_in_json_has_numbers_only(run: Run, home: Path) -> None:
    with StateStore(home / "states") as store:
        put(store, 1)
    with sqlite3.connect(home / "states" / INDEX_FILE) as connection:
        connection.execute("UPDATE entries SET last_used = 9e999, created = -9e999")
    connection.close()

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    (entry,) = json.loads(run("cache", "ls", "--json").stdout, parse_constant=refuse)["entries"]
    assert 0 < entry["created"] == entry["last_used"]
