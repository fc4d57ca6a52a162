"""What a lookup gives, whatever happened to the files and the index."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from padded import PaddedLayout
from store_tools import (
    BYTES,
    HALF,
    LAYOUT,
    PAGED,
    assert_hit,
    assert_miss,
    cells,
    files_in,
    key_of,
    lookup,
    overwrite,
    put,
    run_python,
    states_array,
    truncate,
)

from edge_pc.backends.base import KVLayout
from edge_pc.errors import StatesError, StoreError
from edge_pc.store import Miss, StateStore
from edge_pc.store.index import INDEX_FILE


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A store's folder; whatever a test did, the next look at all of it finds nothing wrong."""
    yield tmp_path / "states"
    with StateStore(tmp_path / "states") as store:
        store.gc()
        assert store.verify() == []


def file_of(root: Path, number: int) -> Path:
    return root / key_of(number)[:2] / f"{key_of(number)}.npy"


@pytest.mark.parametrize("layout", [LAYOUT, HALF, PAGED, BYTES], ids=lambda layout: layout.name)
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 100])
def test_what_was_put_is_found(root: Path, layout: KVLayout, tokens: int) -> None:
    with StateStore(root) as store:
        assert_miss(lookup(store, 1, tokens, layout), "not in the store")
        assert_hit(put(store, 1, tokens, layout), 1, tokens, layout)
        assert_hit(lookup(store, 1, tokens, layout), 1, tokens, layout)
    with StateStore(root) as store:
        states = assert_hit(lookup(store, 1, tokens, layout), 1, tokens, layout)
    assert not states.array.flags.writeable
    assert states.path == file_of(root, 1)
    assert states.offset == 4096
    assert np.frombuffer(states.path.read_bytes(), np.uint8, 16, 4096).tobytes() == states.array.tobytes()[:16]


def test_a_repeated_lookup_opens_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(root)
    put(store, 1)
    first = lookup(store, 1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr("edge_pc.store.store.load_entry", refuse)
    assert lookup(store, 1) is first


def test_only_a_file_that_changed_is_read_in_full(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateStore(root) as store:
        path = put(store, 1).path
    assert path is not None
    checks = []
    monkeypatch.setattr("edge_pc.store.entry.check_array", lambda *_: checks.append(1))
    assert_hit(lookup(StateStore(root), 1), 1)
    assert checks == []
    os.utime(path)
    assert_hit(lookup(StateStore(root), 1), 1)
    assert_hit(lookup(StateStore(root), 1), 1)
    assert checks == [1]


def test_other_ids_or_another_layout_are_a_miss(root: Path) -> None:
    store = StateStore(root)
    put(store, 1)
    token_ids, position_ids = cells(1, 20)
    key = key_of(1)
    assert_miss(store.lookup(key, LAYOUT, token_ids + 1, position_ids), "other token ids")
    with_a_gap = position_ids + (np.arange(20) > 9)
    assert_miss(store.lookup(key, LAYOUT, token_ids, with_a_gap.astype(np.int32)), "other position ids")
    assert_hit(store.lookup(key, LAYOUT, token_ids, position_ids + 1), 1)  # they can be moved
    assert_miss(store.lookup(key, LAYOUT, token_ids[:-1], position_ids[:-1]), "20 tokens are stored, expected 19")
    assert_miss(store.lookup(key, HALF, token_ids, position_ids), "expected test-float16")
    renamed = PaddedLayout("other", LAYOUT.dtype, LAYOUT.shape, LAYOUT.token_axis, LAYOUT.token_multiple)
    assert_miss(store.lookup(key, renamed, token_ids, position_ids), "expected other")
    unpadded = PaddedLayout(LAYOUT.name, LAYOUT.dtype, LAYOUT.shape, LAYOUT.token_axis)
    assert_miss(store.lookup(key, unpadded, token_ids, position_ids), "(3, 2, 2, 32, 16)")
    assert_hit(lookup(store, 1), 1)


@pytest.mark.parametrize(
    ("array", "tokens"),
    [
        (states_array(1, 20).astype(np.float64), 20),
        (states_array(1, 20)[:, :, :, :20], 20),
        (states_array(1, 20), 40),
        (states_array(1, 20).astype(object), 20),
    ],
)
def test_an_array_that_does_not_fit_is_refused(root: Path, array: Any, tokens: int) -> None:
    with pytest.raises(StatesError, match="expected"):
        StateStore(root).put(key_of(1), LAYOUT, array, *cells(1, tokens), model="", schema="", module="")


def test_positions_must_ascend(root: Path) -> None:
    token_ids, position_ids = cells(1, 20)
    with pytest.raises(StatesError, match="ascend"):
        StateStore(root).put(
            key_of(1), LAYOUT, states_array(1, 20), token_ids, position_ids[::-1], model="", schema="", module=""
        )


def test_an_array_in_any_memory_order_is_stored_right(root: Path) -> None:
    array = np.asfortranarray(states_array(1, 20))
    states = StateStore(root).put(key_of(1), LAYOUT, array, *cells(1, 20), model="", schema="", module="")
    assert_hit(states, 1)
    assert_hit(lookup(StateStore(root), 1), 1)


@pytest.mark.parametrize("key", ["", "../x", "a/b", "A", "ä", "a" * 129, "a.b", "a\0b"])
def test_keys_are_only_keys(root: Path, key: str) -> None:
    store = StateStore(root)
    with pytest.raises(StoreError, match="not a store key"):
        store.lookup(key, LAYOUT, *cells(1, 20))
    with pytest.raises(StoreError, match="not a store key"), store.lock(key):
        pass
    with pytest.raises(StatesError, match="not a store key"):
        store.put(key, LAYOUT, states_array(1, 20), *cells(1, 20), model="", schema="", module="")


class TestDamage:
    """Every kind of damage is a miss with its reason, in the process that wrote the file and in a new one; the file is
    gone then, and can be written again."""

    @pytest.fixture(params=["same process", "new process", "index lost"])
    def store(self, root: Path, request: pytest.FixtureRequest) -> Iterator[StateStore]:
        store = StateStore(root)
        put(store, 1)
        put(store, 2)
        if request.param == "new process":
            store.close()
            store = StateStore(root)
        elif request.param == "index lost":
            store.close()
            (root / INDEX_FILE).unlink()
            store = StateStore(root)
        yield store
        again = lookup(store, 1)
        assert isinstance(again, Miss)
        assert again.damaged, "whoever asks next is told, too"
        assert_miss(lookup(StateStore(root), 1), "not in the store")
        assert not file_of(root, 1).exists()
        put(store, 1)
        assert_hit(lookup(store, 1), 1)
        assert_hit(lookup(store, 2), 2)
        store.close()

    def damage_found(self, store: StateStore, reason: str) -> None:
        assert assert_miss(lookup(store, 1), reason).damaged

    @pytest.mark.parametrize("size", [0, 100, 4096, 10_000])
    def test_truncated(self, store: StateStore, root: Path, size: int) -> None:
        truncate(file_of(root, 1), size)
        self.damage_found(store, "file truncated")

    def test_one_bit_changed(self, store: StateStore, root: Path) -> None:
        before = file_of(root, 1).read_bytes()[5000]
        overwrite(file_of(root, 1), bytes([before ^ 1]), 5000)
        self.damage_found(store, "checksum of the array does not match")

    def test_overwritten_with_the_old_time_stamps(self, store: StateStore, root: Path) -> None:
        path = file_of(root, 1)
        status = path.stat()
        overwrite(path, bytes(1000), 5000)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.damage_found(store, "checksum of the array does not match")

    def test_foreign(self, store: StateStore, root: Path) -> None:
        path = file_of(root, 1)
        path.unlink()
        np.save(path, states_array(1, 20))
        self.damage_found(store, "")

    def test_longer(self, store: StateStore, root: Path) -> None:
        path = file_of(root, 1)
        overwrite(path, b"more", path.stat().st_size)
        self.damage_found(store, "does not end with the footer")

    def test_file_of_another_key(self, store: StateStore, root: Path) -> None:
        path = file_of(root, 1)
        path.unlink()
        shutil.copy2(file_of(root, 2), path)
        self.damage_found(store, "other states: 'm' of 's'")

    def test_replaced_by_a_copy_of_itself_is_a_hit(self, store: StateStore, root: Path) -> None:
        path = file_of(root, 1)
        shutil.copy2(path, root / "copy")
        os.replace(root / "copy", path)
        assert_hit(lookup(store, 1), 1)
        overwrite(path, b"x", 5000)
        self.damage_found(store, "checksum")


def test_each_of_several_damaged_files_is_reported_whoever_asks_first(root: Path) -> None:
    with StateStore(root) as store:
        for number in range(3):
            put(store, number)
    overwrite(file_of(root, 0), b"x", 5000)
    truncate(file_of(root, 1), 100)
    store = StateStore(root)
    for _ in range(2):  # as when the work is measured before it is done
        assert assert_miss(lookup(store, 0), "checksum of the array does not match").damaged
        assert assert_miss(lookup(store, 1), "file truncated: 100 of").damaged
        assert_hit(lookup(store, 2), 2)
    put(store, 0)
    assert_hit(lookup(store, 0), 0)
    store.remove([key_of(0)])
    assert_miss(lookup(store, 0), "not in the store")


def test_truncation_names_both_sizes(root: Path) -> None:
    store = StateStore(root)
    path = put(store, 1).path
    assert path is not None
    size = path.stat().st_size
    truncate(path, 123)
    assert_miss(lookup(store, 1), f"file truncated: 123 of {size} bytes")


def test_a_folder_or_pipe_in_place_of_a_file(root: Path) -> None:
    file_of(root, 1).mkdir(parents=True)
    file_of(root, 2).parent.mkdir()
    os.mkfifo(file_of(root, 2))
    store = StateStore(root)
    assert_miss(lookup(store, 1), "is not a file")
    assert_miss(lookup(store, 2), "is not a file")
    with pytest.raises(StoreError, match="cannot store states"):
        put(store, 1)
    assert [finding.key for finding in store.verify()] == [key_of(1)]
    assert store.entries() == []
    file_of(root, 1).rmdir()
    put(store, 1)


def test_a_damaged_file_that_cannot_be_deleted_is_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(root)
    put(store, 1)
    overwrite(file_of(root, 1), b"x", 5000)
    with monkeypatch.context() as patch:
        patch.setattr("edge_pc.store.files.os.unlink", raise_error(errno.EROFS))
        first = assert_miss(lookup(store, 1), "checksum")
        patch.setattr("edge_pc.store.store.load_entry", raise_error(errno.EIO))
        assert lookup(store, 1) is first
    put(store, 1)
    assert_hit(lookup(store, 1), 1)


class TestIndex:
    """The index may be in any state: what is in the files is found."""

    @pytest.fixture
    def filled(self, root: Path) -> Path:
        with StateStore(root) as store:
            put(store, 1)
            put(store, 2)
        return root

    def assert_all_there(self, root: Path) -> None:
        with StateStore(root) as store:
            assert_hit(lookup(store, 1), 1)
            assert [entry.key for entry in store.entries()] == [key_of(1), key_of(2)]
            assert_hit(lookup(store, 2), 2)
            put(store, 3)
        with StateStore(root) as store:
            assert len(store.entries()) == 3

    def test_deleted(self, filled: Path) -> None:
        (filled / INDEX_FILE).unlink()
        self.assert_all_there(filled)

    def test_deleted_while_open(self, filled: Path) -> None:
        with StateStore(filled) as store:
            assert_hit(lookup(store, 1), 1)
            for path in filled.glob(INDEX_FILE + "*"):
                path.unlink()
            put(store, 3)
            assert_hit(lookup(store, 3), 3)
            assert len(store.entries()) == 3
        self.assert_all_there_after_removal(filled)

    def assert_all_there_after_removal(self, root: Path) -> None:
        with StateStore(root) as store:
            store.remove([key_of(3)])
        self.assert_all_there(root)

    @pytest.mark.parametrize("garbage", [b"", b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
    def test_garbage(self, filled: Path, garbage: bytes) -> None:
        (filled / INDEX_FILE).write_bytes(garbage)
        self.assert_all_there(filled)

    @pytest.mark.parametrize("place", range(0, 16384, 1500))
    def test_damaged_page(self, filled: Path, place: int) -> None:
        overwrite(filled / INDEX_FILE, b"\xa5" * 64, place)
        self.assert_all_there(filled)

    @pytest.mark.parametrize("seed", range(10))
    def test_changed_bits(self, root: Path, seed: int) -> None:
        """Whatever a broken page says, entries are found, listed and counted by their files."""
        with StateStore(root) as store:
            for number in range(8):
                put(store, number, 1, BYTES)
        whole = (root / INDEX_FILE).read_bytes()
        bits = random.Random(seed)
        for _ in range(20):
            damaged = bytearray(whole)
            for place in bits.sample(range(len(whole)), bits.choice([1, 3, 20])):
                damaged[place] ^= 1 << bits.randrange(8)
            for path in root.glob(INDEX_FILE + "*"):
                path.unlink()
            (root / INDEX_FILE).write_bytes(damaged)
            with StateStore(root, max_bytes=10**9) as store:
                assert_hit(lookup(store, 3, 1, BYTES), 3, 1, BYTES)
                assert len(store.entries()) == 8
                store.verify(repair=True)
                assert store.verify() == []

    def test_out_of_order_is_found_by_verify(self, filled: Path) -> None:
        data = (filled / INDEX_FILE).read_bytes()
        (filled / INDEX_FILE).write_bytes(data.replace(key_of(1).encode(), b"f" * 16))
        with StateStore(filled) as store:
            assert [finding.problem for finding in store.verify()] == ["the index is broken"]
        self.assert_all_there(filled)

    def test_damaged_while_open(self, filled: Path) -> None:
        with StateStore(filled) as store:
            assert_hit(lookup(store, 1), 1)
            for path in filled.glob(INDEX_FILE + "*"):
                path.write_bytes(b"garbage" * 1000)
            assert_hit(lookup(store, 2), 2)
            put(store, 3)
        self.assert_all_there_after_removal(filled)

    def test_of_another_version(self, filled: Path) -> None:
        (filled / INDEX_FILE).unlink()
        with sqlite3.connect(filled / INDEX_FILE) as connection:
            connection.execute("CREATE TABLE entries (key TEXT)")
            connection.execute("PRAGMA user_version = 77")
        self.assert_all_there(filled)

    def test_of_this_version_with_other_columns(self, filled: Path) -> None:
        (filled / INDEX_FILE).unlink()
        with sqlite3.connect(filled / INDEX_FILE) as connection:
            connection.execute("CREATE TABLE entries (key TEXT)")
            connection.execute("PRAGMA user_version = 1")
        self.assert_all_there(filled)

    @pytest.mark.parametrize("name", [INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm", f"{INDEX_FILE}-journal"])
    @pytest.mark.parametrize("what", ["empty folder", "folder", "pipe"])
    def test_something_else_stands_in_its_place(self, filled: Path, name: str, what: str) -> None:
        """It is moved away and an index made, so that files are not read in full again and uses are counted."""
        path = filled / name
        path.unlink(missing_ok=True)
        if what == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
            if what == "folder":
                (path / "notes").write_text("mine")
        self.assert_all_there(filled)
        assert (filled / INDEX_FILE).is_file()
        moved = [each for each in filled.iterdir() if each.name.endswith(".moved")]
        assert [each.is_fifo() for each in moved] == [what == "pipe"]
        assert [each.read_text() for each in moved[0].rglob("notes")] == ["mine"] * (what == "folder")
        with StateStore(filled) as store:
            assert store.totals().hits == 2

    def test_locked_by_another_program(self, filled: Path) -> None:
        other = sqlite3.connect(filled / INDEX_FILE, isolation_level=None)
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        try:
            with StateStore(filled) as store:
                assert_hit(lookup(store, 1), 1)
                put(store, 3)
                assert_hit(lookup(store, 3), 3)
                assert len(store.entries()) == 3
        finally:
            other.close()
        self.assert_all_there_after_removal(filled)

    def test_rows_of_other_files_are_not_believed(self, filled: Path) -> None:
        with sqlite3.connect(filled / INDEX_FILE) as connection:
            connection.execute("UPDATE entries SET key = 'x' || key")
        self.assert_all_there(filled)

    @pytest.mark.parametrize(
        ("column", "value"),
        [(c, v) for c in ("created", "last_used") for v in ("9e999", "-9e999", "-1.0", "1e18", "NULL")]
        + [(c, v) for c in ("tokens", "nbytes", "hits") for v in ("-1", "1e999", "'x'")]
        + [("identity", "x'00'")],
    )
    def test_a_row_that_no_writer_makes(self, filled: Path, column: str, value: str) -> None:
        with sqlite3.connect(filled / INDEX_FILE) as connection:
            # A broken page asks for no constraint.
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
        with sqlite3.connect(filled / INDEX_FILE) as connection:
            connection.execute(f"UPDATE entries SET {column} = {value}")
        with StateStore(filled) as store:
            for entry in store.entries():
                assert 0 < entry.created == entry.last_used < time.time() + 60
                assert (entry.tokens, entry.hits) == (20, 0)
        self.assert_all_there(filled)

    def test_entries_from_files_alone_say_the_same(self, filled: Path) -> None:
        with StateStore(filled) as store:
            before = store.entries()
        (filled / INDEX_FILE).unlink()
        with StateStore(filled) as store:
            assert store.entries() == before

    def test_uses_are_counted_and_survive(self, filled: Path) -> None:
        with StateStore(filled) as store:
            for _ in range(200):
                lookup(store, 1)
            assert {entry.key: entry.hits for entry in store.entries()} == {key_of(1): 200, key_of(2): 0}
            lookup(store, 2)
        with StateStore(filled) as store:
            one, two = store.entries()
            assert (one.hits, two.hits) == (200, 1)
            assert one.last_used > one.created
            put(store, 1)
            assert max(entry.hits for entry in store.entries()) == 200
            assert store.totals().hits == 201

    def test_uses_survive_a_store_that_nobody_closed(self, filled: Path) -> None:
        run_python(
            "import sys, store_tools as t; from edge_pc.store import StateStore;"
            "global_store = StateStore(sys.argv[1]); t.assert_hit(t.lookup(global_store, 1), 1)",
            filled,
        )
        assert StateStore(filled).totals().hits == 1

    def test_is_private(self, filled: Path) -> None:
        assert (filled / INDEX_FILE).stat().st_mode & 0o777 == 0o600


def raise_error(number: int) -> Any:
    def function(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return function


class TestCannotWrite:
    """A store that cannot be written: one clear error, no half file, and lookups go on."""

    @pytest.mark.parametrize(
        ("function", "number", "hint"),
        [
            ("os.open", errno.EROFS, "--cache-dir"),
            ("os.open", errno.EACCES, "writable"),
            ("os.open", errno.EMFILE, "--cache-dir"),
            ("_write_all", errno.ENOSPC, "gc"),
            ("_write_all", errno.EDQUOT, "gc"),
            ("_write_all", errno.EIO, "disk"),
            ("os.fsync", errno.ENOSPC, "gc"),
            ("os.replace", errno.EROFS, "--cache-dir"),
        ],
    )
    def test_error(self, root: Path, function: str, number: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = StateStore(root)
        put(store, 1)
        put(store, 2)
        before = files_in(root)
        with monkeypatch.context() as patch:
            patch.setattr(f"edge_pc.store.files.{function}", raise_error(number))
            with pytest.raises(StoreError, match=os.strerror(number)) as caught:
                put(store, 2, module="again")
        assert hint in str(caught.value.hint)
        assert str(root) in caught.value.message
        assert files_in(root) == before
        assert_hit(lookup(store, 1), 1)
        assert_hit(lookup(store, 2), 2)

    def test_full_disk_names_the_sizes(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("edge_pc.store.files._write_all", raise_error(errno.ENOSPC))
            with pytest.raises(StoreError, match=r"KiB needed, .*B free"):
                put(StateStore(root), 1)

    def test_interrupted_while_writing(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("edge_pc.store.files._write_all", interrupt)
            with pytest.raises(KeyboardInterrupt):
                put(StateStore(root), 1)
        assert files_in(root) == []

    def test_a_file_where_the_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for root in (tmp_path / "file", tmp_path / "file" / "states"):
            store = StateStore(root, max_bytes=10**9)
            assert_miss(lookup(store, 1), "")
            with store.lock(key_of(1)), pytest.raises(StoreError, match="cannot store states"):
                put(store, 1)
            assert (store.entries(), store.verify(), store.totals().entries) == ([], [], 0)
            store.gc()
            store.close()
        assert (tmp_path / "file").read_text() == "mine"

    def test_nothing_is_created_before_something_is_written(self, root: Path) -> None:
        with StateStore(root, max_bytes=1000) as store:
            assert_miss(lookup(store, 1), "not in the store")
            assert (store.entries(), store.verify(), store.totals().nbytes) == ([], [], 0)
            store.gc(max_bytes=0)
        assert not root.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip("may not mount a disk here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore(small_disk / "states")
    put(store, 1, 900)
    store.check_room(1000)
    no_space = r"No space left on device: .* needed, .* free"
    with pytest.raises(StoreError, match=no_space):
        store.check_room(2**20)
    with pytest.raises(StoreError, match=no_space):
        put(store, 2, 900)
    monkeypatch.setattr("edge_pc.store.faults.free_bytes", lambda _: None)  # as where the system does not tell
    with pytest.raises(StoreError, match=r"No space left on device: .* needed"):
        put(store, 2, 900)
    assert_hit(lookup(store, 1, 900), 1, 900)
    assert files_in(small_disk / "states") == [file_of(small_disk, 1).name]
    put(store, 3, 20)
    assert store.verify() == []


@pytest.mark.parametrize("index", ["kept", "missing"])
def test_a_disk_that_is_really_read_only(small_disk: Path, index: str) -> None:
    root = small_disk / "states"
    with StateStore(root) as store:
        put(store, 1)
        put(store, 2)
    overwrite(file_of(root, 2), b"x", 5000)
    if index == "missing":
        (root / INDEX_FILE).unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with StateStore(root) as store:
        assert_hit(lookup(store, 1), 1)
        assert assert_miss(lookup(store, 2), "checksum").damaged
        with pytest.raises(StoreError, match=r"cannot store states in .*1\.0 KiB.*Read-only file system"):
            store.check_room(1024)
        with store.lock(key_of(3)), pytest.raises(StoreError, match="Read-only file system"):
            put(store, 3)
        assert len(store.entries()) == 2
        removed = store.remove([key_of(1)])
        assert (removed.entries, [entry.key for entry in removed.kept]) == ((), [key_of(1)])
        assert [finding.key for finding in store.verify(repair=True)] == [key_of(2)]
        removed = store.gc(max_bytes=0, older_than=-10)
        assert (removed.entries, removed.nbytes) == ((), 0)
        assert {entry.key for entry in removed.kept} == {key_of(1), key_of(2)}
        assert_hit(lookup(store, 1), 1)


def test_a_read_only_index_is_still_believed(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_disk / "states"
    with StateStore(root) as store:
        put(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    monkeypatch.setattr("edge_pc.store.entry.check_array", raise_error(errno.EIO))
    with StateStore(root) as store:
        assert_hit(lookup(store, 1), 1)


def test_folders_and_files_are_private_whatever_the_umask(root: Path) -> None:
    for number, umask in enumerate((0o000, 0o777, 0o022)):
        before = os.umask(umask)
        try:
            with StateStore(root / "deep" / str(umask)) as store, store.lock(key_of(number)):
                put(store, number)
        finally:
            os.umask(before)
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        if path.is_dir():
            assert path.stat().st_mode & 0o777 == 0o700, path
        elif path.suffix == ".npy":
            assert path.stat().st_mode & 0o777 == 0o400, path


def test_threads_share_a_store(root: Path) -> None:
    """8 threads, 20 calls each; the numbers overlap, so that threads wait for each other."""
    store = StateStore(root)
    encoded: list[int] = []

    def serve(thread: int) -> int:
        hits = 0
        for call in range(20):
            number = (thread + call) % 12
            found = lookup(store, number)
            if not hasattr(found, "array"):
                with store.lock(key_of(number)):
                    found = lookup(store, number)
                    if not hasattr(found, "array"):
                        encoded.append(number)
                        found = put(store, number)
            assert_hit(found, number)
            hits += 1
        return hits

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(serve, range(8))) == 160
    assert sorted(encoded) == list(range(12))
    assert store.verify() == []
    store.close()


def test_puts_in_the_background_while_lookups_go_on(root: Path) -> None:
    store = StateStore(root)
    put(store, 0)
    with ThreadPoolExecutor(4) as pool:
        puts = [pool.submit(put, store, number, 200) for number in range(1, 20)]
        while not all(future.done() for future in puts):
            assert_hit(lookup(store, 0), 0)
    for number in range(1, 20):
        assert_hit(lookup(store, number, 200), number, 200)


def test_a_lock_is_held_by_one_thread_and_can_be_taken_again_inside(root: Path) -> None:
    store = StateStore(root)
    order = []
    inside = threading.Event()

    def other() -> None:
        inside.wait()
        with store.lock("k1"):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with store.lock("k1"), store.lock("k2"):
        with store.lock("k1"):
            inside.set()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert list((root / "locks").iterdir()) == []
