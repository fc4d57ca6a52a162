"""What goes when a store is too large, too old, or asked to."""

from __future__ import annotations

import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_tools import assert_hit, assert_miss, files_in, key_of, lookup, overwrite, put

from edge_pc.cli import main
from edge_pc.errors import OptionError, StoreError
from edge_pc.progress import Progress
from edge_pc.store import EVICTION_POLICIES, StateStore
from edge_pc.store.index import INDEX_FILE
from edge_pc.system.sizes import format_size

# What one entry of the tools takes on disk, and a little.
ENTRY = 4096 + 3 * 2 * 2 * 32 * 16 * 4 + 700


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "states"
    assert StateStore(tmp_path / "states").verify() == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clock(seconds)` lets time pass for the store."""
    now = [time.time()]
    monkeypatch.setattr("edge_pc.store.store.time.time", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def stored(root: Path) -> list[int]:
    return [number for number in range(20) if (root / key_of(number)[:2] / f"{key_of(number)}.npy").exists()]


def fill(root: Path, numbers: range, clock: Any) -> None:
    with StateStore(root) as store:
        for number in numbers:
            put(store, number)
            clock(10)


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("??/*"))


def test_the_limit_holds_at_every_write_and_the_least_recently_used_go(root: Path, clock: Any) -> None:
    fill(root, range(4), clock)
    with StateStore(root) as store:
        assert_hit(lookup(store, 0), 0)
        clock(10)
    with StateStore(root, max_bytes=4 * ENTRY) as store:
        put(store, 4)
        assert stored(root) == [0, 2, 3, 4]
        put(store, 5)
        assert stored(root) == [0, 3, 4, 5]
    assert size_of(root) <= 4 * ENTRY


def test_a_limit_below_what_is_there_removes_nothing_until_gc_does(root: Path, clock: Any) -> None:
    fill(root, range(4), clock)
    with StateStore(root, max_bytes=2 * ENTRY) as store:
        assert_hit(lookup(store, 0), 0)
        for store_it in (lambda: put(store, 4), lambda: store.check_room(1)):
            with pytest.raises(StoreError) as caught:
                store_it()
            held, limit = format_size(size_of(root)), format_size(2 * ENTRY)
            assert f"holds {held}, more than its limit of {limit}" in caught.value.message
            command = shlex.split(str(caught.value.hint).rpartition(": ")[2])
        assert stored(root) == [0, 1, 2, 3]
    assert command[0] == "edge-pc"
    assert main(command[1:]) == 0
    assert stored(root) == [0, 3]
    with StateStore(root, max_bytes=2 * ENTRY) as store:
        put(store, 4)
        assert stored(root) == [0, 4]
        store.gc()
        assert stored(root) == [0, 4]
        assert store.gc(max_bytes=0).kept == ()
    assert stored(root) == []


def test_a_store_without_a_limit_may_outgrow_one_with_a_limit(root: Path, clock: Any) -> None:
    with StateStore(root, max_bytes=2 * ENTRY) as small:
        put(small, 0)
        fill(root, range(1, 4), clock)
        with pytest.raises(StoreError, match="nothing is stored"):
            put(small, 4)
        assert stored(root) == [0, 1, 2, 3]


@pytest.mark.parametrize("index", ["missing", "locked out"])
def test_the_limit_holds_without_an_index(root: Path, clock: Any, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(3), clock)
    (root / INDEX_FILE).unlink()
    if index == "locked out":
        monkeypatch.setattr("edge_pc.store.index.Index._run", lambda _, work, default, writes=False: default)
    with StateStore(root, max_bytes=3 * ENTRY) as store:
        put(store, 4)
        assert stored(root) == [1, 2, 4]
    monkeypatch.undo()
    StateStore(root).entries()


def test_what_is_in_use_goes_last(root: Path, clock: Any) -> None:
    """An entry is in use as long as somebody holds its states, and no longer."""
    fill(root, range(4), clock)
    with StateStore(root, max_bytes=4 * ENTRY) as store:
        held = assert_hit(lookup(store, 0), 0)
        with StateStore(root) as other:  # another process uses the rest later
            clock(10)
            for number in (1, 2, 3):
                assert_hit(lookup(other, number), number)
        clock(10)
        put(store, 4)
        assert stored(root) == [0, 2, 3, 4]
        put(store, 5)
        put(store, 6)
        assert stored(root) == [0, 4, 5, 6]
        del held
        put(store, 7)
        assert stored(root) == [4, 5, 6, 7]
        kept = [assert_hit(lookup(store, number), number) for number in (4, 5, 6, 7)]
        put(store, 8)  # nothing else is left
        assert len(stored(root)) == 4
        assert [assert_hit(each, number) for each, number in zip(kept, (4, 5, 6, 7), strict=True)] == kept


def test_a_larger_entry_is_refused_and_nothing_goes_for_it(root: Path, clock: Any) -> None:
    fill(root, range(2), clock)
    with StateStore(root, max_bytes=2 * ENTRY) as store:
        with pytest.raises(StoreError, match="larger than the limit"):
            put(store, 2, 100)
        assert stored(root) == [0, 1]


def test_a_new_version_of_an_entry_takes_the_room_of_the_old(root: Path, clock: Any) -> None:
    fill(root, range(2), clock)
    with StateStore(root, max_bytes=2 * ENTRY) as store:
        put(store, 1)
        assert stored(root) == [0, 1]


def test_what_cannot_be_deleted_makes_no_room(root: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, range(2), clock)
    store = StateStore(root, max_bytes=2 * ENTRY)
    with monkeypatch.context() as patch:
        patch.setattr("edge_pc.store.files.StatesFiles.delete", lambda *_: False)
        with pytest.raises(StoreError, match="cannot be deleted"):
            put(store, 2)
    assert stored(root) == [0, 1]


def test_evicted_states_stay_readable_for_who_has_them(root: Path) -> None:
    store = StateStore(root, max_bytes=ENTRY)
    first = put(store, 1)
    put(store, 2)
    assert stored(root) == [2]
    assert_hit(first, 1)
    assert_miss(lookup(store, 1), "not in the store")


@pytest.mark.parametrize(
    ("policy", "left"),
    [("least-recently-used", [0, 2]), ("least-frequently-used", [1, 2]), ("oldest", [1, 2]), ("largest", [0, 1])],
)
def test_policies(root: Path, clock: Any, policy: str, left: list[int]) -> None:
    with StateStore(root) as store:
        for number, tokens in enumerate((1, 1, 40)):
            put(store, number, tokens)
            clock(10)
        for number, tokens in ((2, 40), (1, 1), (1, 1), (2, 40), (0, 1)):
            lookup(store, number, tokens)
            clock(10)
    StateStore(root, policy=policy).gc(max_bytes=size_of(root) - 1)
    assert stored(root) == left


def test_wrong_options() -> None:
    with pytest.raises(OptionError, match="policy"):
        StateStore(Path("x"), policy="random")
    with pytest.raises(OptionError, match="-1"):
        StateStore(Path("x"), max_bytes=-1)
    assert "least-recently-used" in EVICTION_POLICIES


def test_gc_by_age_and_size(root: Path, clock: Any) -> None:
    fill(root, range(6), clock)
    with StateStore(root) as store:
        removed = store.gc(older_than=45)
        assert [entry.key for entry in removed.entries] == [key_of(0), key_of(1)]
        assert removed.nbytes == sum(entry.nbytes for entry in removed.entries) > 2 * 4096
        assert store.gc().entries == ()
        removed = store.gc(max_bytes=ENTRY)
        assert stored(root) == [5]
        assert len(removed.entries) == 3


def test_gc_takes_what_is_broken_or_left_behind_and_nothing_else(root: Path) -> None:
    with StateStore(root) as store:
        put(store, 1)
        put(store, 2)
        path = store.entries()[1].path
        (path.parent / f"{key_of(2)}.0123.tmp").write_bytes(b"half")
        (root / "locks").mkdir()
        (root / "locks" / f"{key_of(9)}.lock").touch()
        (root / "notes.txt").write_text("mine")
        (path.parent / "notes.txt").write_text("mine")
        store.close()
        (root / INDEX_FILE).unlink()
        overwrite(path, b"broken", path.stat().st_size - 6)
        with store.lock("held"):
            removed = store.gc()
            assert [lock.name for lock in (root / "locks").iterdir()] == ["held.lock"]
        assert removed.entries == ()
        assert removed.nbytes > 4096
        assert stored(root) == [1]
        assert (root / "notes.txt").exists()
        assert files_in(root) == [f"{key_of(1)}.npy", "notes.txt"]
        (path.parent / "notes.txt").unlink()


def test_remove(root: Path) -> None:
    with StateStore(root) as store:
        states = [put(store, number) for number in range(3)]
        removed = store.remove([key_of(1), key_of(7), "nothing"])
        assert [entry.key for entry in removed.entries] == [key_of(1)]
        assert stored(root) == [0, 2]
        assert_miss(lookup(store, 1), "not in the store")
        assert_hit(states[1], 1)
        assert_hit(put(store, 1), 1)
        assert_hit(states[1], 1)


def test_entries_and_totals(root: Path, clock: Any) -> None:
    with StateStore(root, max_bytes=10**6) as store:
        put(store, 1, 20, module="a/b")
        clock(5)
        put(store, 0, 40, module="c")
        first, second = store.entries()
        assert (first.key, first.module, first.tokens, first.hits) == (key_of(1), "a/b", 20, 0)
        assert (second.model, second.schema, second.dtype, second.layout) == ("tiny", "s", "float32", "test-float32")
        assert second.created == pytest.approx(first.created + 5, abs=0.01)
        assert second.path.stat().st_size == second.nbytes
        totals = store.totals()
        assert (totals.entries, totals.tokens, totals.nbytes) == (2, 60, first.nbytes + second.nbytes)
        assert (totals.path, totals.max_bytes) == (root, 10**6)
        assert totals.free_bytes is not None


class TestVerify:
    @pytest.fixture
    def store(self, root: Path) -> Iterator[StateStore]:
        with StateStore(root) as store:
            for number in range(3):
                put(store, number)
            yield store
            store.verify(repair=True)
            assert store.verify() == []

    def findings(self, store: StateStore, *, repair: bool = False) -> list[tuple[str, str, str]]:
        return [(found.key, found.problem, found.action) for found in store.verify(repair=repair)]

    def test_progress(self, store: StateStore, root: Path) -> None:
        calls: list[Progress] = []
        store.verify(calls.append)
        assert len(calls) == 3
        assert calls[-1] == Progress(size_of(root), size_of(root), format_size(size_of(root)))

    def test_damage(self, store: StateStore) -> None:
        path = store.entries()[1].path
        overwrite(path, b"x", 5000)
        problem = "checksum of the array does not match"
        assert self.findings(store) == [(key_of(1), problem, "")]
        assert self.findings(store, repair=True) == [(key_of(1), problem, "deleted")]
        assert not path.exists()

    def test_what_stands_between_two_steps_of_another_process_is_no_damage(self, store: StateStore) -> None:
        """A file without a row and a row without a file: a writer is there, or was killed there."""
        first, second, _ = store.entries()
        first.path.unlink()
        data = second.path.read_bytes()
        store.remove([second.key])
        second.path.write_bytes(data)
        assert self.findings(store) == []
        assert [entry.key for entry in store.entries()] == [key_of(1), key_of(2)]

    def test_a_row_of_an_older_file_is_no_damage(self, store: StateStore, root: Path) -> None:
        """A writer has replaced the file, and not come to the index yet."""
        with sqlite3.connect(root / INDEX_FILE) as connection:
            connection.execute("UPDATE entries SET tokens = 21, identity = 'older' WHERE key = ?", (key_of(1),))
        assert self.findings(store) == []
        assert [entry.tokens for entry in store.entries()] == [20, 20, 20]

    def test_index_that_lies(self, store: StateStore, root: Path) -> None:
        with sqlite3.connect(root / INDEX_FILE) as connection:
            connection.execute("UPDATE entries SET tokens = 21, module = 'other' WHERE key = ?", (key_of(1),))
        problem = "the index and the file disagree"
        assert self.findings(store) == [(key_of(1), problem, "")]
        assert self.findings(store, repair=True) == [(key_of(1), problem, "index corrected")]

    def test_left_behind(self, store: StateStore, root: Path) -> None:
        (root / key_of(1)[:2] / f"{key_of(1)}.77.tmp").write_bytes(b"half")
        assert self.findings(store) == [("", "left by a killed process", "")]
        assert self.findings(store, repair=True) == [("", "left by a killed process", "deleted")]

    def test_spares_the_next_lookup_its_check(
        self, store: StateStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.utime(store.entries()[1].path)
        assert store.verify() == []
        with monkeypatch.context() as patch:
            patch.delattr("edge_pc.store.entry.check_array")
            assert_hit(lookup(StateStore(root), 1), 1)
