"""What the store holds open, lets go, and checks in the background."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import (
    BYTES,
    CHECKS,
    assert_hit,
    assert_miss,
    checking,
    files_in,
    finish_checks,
    flip_a_bit,
    key_of,
    lookup,
    put,
    run_python,
)

from edge_pc.backends.base import KVStates
from edge_pc.store import StateStore

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what is open in /proc")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "states"
    with StateStore(tmp_path / "states") as store:
        assert store.verify() == []


def descriptors() -> int:
    gc.collect()  # what earlier tests left
    return len(os.listdir("/proc/self/fd"))


def mappings(root: Path) -> list[str]:
    """The states files that this process has mapped, one line each, whether they were deleted or not."""
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{root}/" in line and ".npy" in line]


@needs_proc
class TestWhatIsHeldOpen:
    def test_states_in_use_cost_a_mapping_and_no_descriptor(self, root: Path) -> None:
        store = StateStore(root)
        put(store, 0, 1, BYTES)
        before = descriptors()
        held = [put(store, number, 1, BYTES) for number in range(1, 250)]
        held += [assert_hit(lookup(store, number, 1, BYTES), number, 1, BYTES) for number in range(250) if number % 2]
        assert descriptors() == before
        assert len(mappings(root)) <= 250 + 64
        for number, states in enumerate(held[:249], start=1):
            assert_hit(states, number, 1, BYTES)
        store.close()

    def test_what_nobody_uses_is_let_go(self, root: Path) -> None:
        store = StateStore(root)
        held = [put(store, number, 1, BYTES) for number in range(200)]
        assert len(mappings(root)) == 200
        del held
        assert len(mappings(root)) == 64, "a few for the next prompt"
        store.close()
        assert mappings(root) == []

    def test_one_object_and_one_mapping_for_all_who_ask(self, root: Path) -> None:
        with StateStore(root) as store:
            put(store, 1)
        store = StateStore(root)
        first = assert_hit(lookup(store, 1), 1)
        for number in range(2, 100):  # more than stay open for nobody
            put(store, number, 1, BYTES)
        assert lookup(store, 1) is first
        assert sum(f"{key_of(1)}.npy" in line for line in mappings(root)) == 1

    @pytest.mark.parametrize("way", ["evicted", "removed", "replaced"])
    def test_a_deleted_file_is_let_go_with_its_last_user(self, root: Path, way: str) -> None:
        store = StateStore(root)
        states = put(store, 1)
        if way == "evicted":
            store.gc(max_bytes=0)
        elif way == "removed":
            store.remove([key_of(1)])
        else:
            put(store, 1, 40)
        assert len([line for line in mappings(root) if "(deleted)" in line]) == 1
        assert_hit(states, 1)
        del states
        assert [line for line in mappings(root) if "(deleted)" in line] == []

    def test_a_long_process_can_evict(self, root: Path) -> None:
        """Whatever it used: the least recently used goes, once nobody holds it."""
        with StateStore(root, max_bytes=10 * 5500) as store:
            for number in range(100):
                assert_hit(put(store, number, 1, BYTES), number, 1, BYTES)
                assert_hit(lookup(store, number, 1, BYTES), number, 1, BYTES)
                if number:
                    assert_hit(lookup(store, number - 1, 1, BYTES), number - 1, 1, BYTES)
            left = files_in(root)
            assert left == [f"{key_of(number)}.npy" for number in range(100 - len(left), 100)]
            assert 5 < len(left) < 20
            assert store.totals().nbytes <= 10 * 5500


class TestBackgroundChecks:
    @pytest.fixture
    def filled(self, root: Path) -> Path:
        with StateStore(root) as store:
            for number in range(3):
                put(store, number, module=f"part {number}")
        return root

    def test_a_bit_that_flipped_is_found_said_and_encoded_again(
        self, filled: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        flip_a_bit(filled, key_of(1))
        store = StateStore(filled)
        found = [lookup(store, number) for number in range(3)]
        assert all(isinstance(states, KVStates) for states in found), "its time stamps are trusted"
        assert checking() == [], "not before an answer has begun"
        with caplog.at_level(logging.WARNING, "edge_pc"):
            finish_checks(store)
            finish_checks(store)
        (record,) = caplog.records
        assert "part 1 of s: its stored states have changed on the disk" in record.getMessage()
        assert "may be wrong" in record.getMessage()
        assert files_in(filled) == [f"{key_of(number)}.npy" for number in (0, 2)]
        assert assert_miss(lookup(store, 1), "checksum of the array does not match").damaged
        put(store, 1)
        assert_hit(lookup(store, 1), 1)
        assert lookup(store, 0) is found[0]
        store.close()

    def test_a_file_is_read_once_in_a_process(self, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checks: list[str] = []
        counted = "edge_pc.store.background.check_array"
        monkeypatch.setattr(counted, lambda _, metadata, rest: checks.append(metadata.key))
        with StateStore(filled) as store:
            lookup(store, 0)
            finish_checks(store)
            lookup(store, 1)
            for number in range(10, 100):  # 0 and 1 are closed and opened again
                put(store, number, 1, BYTES)
            lookup(store, 0)
            lookup(store, 1)
            finish_checks(store)
            finish_checks(store)
            assert checks == [key_of(0), key_of(1)], "and what was just written or checked needs none"
            os.utime(filled / key_of(2)[:2] / f"{key_of(2)}.npy")
            assert_hit(lookup(store, 2), 2)
            finish_checks(store)
            assert len(checks) == 2

    def test_only_the_very_file_is_deleted(self, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process has put a good one in its place while the damaged one was read."""
        from edge_pc.store.background import check_array

        flip_a_bit(filled, key_of(1))
        store = StateStore(filled)
        lookup(store, 1)

        def replaced(*arguments: object) -> None:
            with StateStore(filled) as other:
                put(other, 1)
            check_array(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr("edge_pc.store.background.check_array", replaced)
        finish_checks(store)
        assert_hit(lookup(store, 1), 1)

    def test_a_file_that_is_gone_or_replaced_is_no_matter(self, filled: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = StateStore(filled)
        for number in range(3):
            lookup(store, number)
        with StateStore(filled) as other:
            other.remove([key_of(0)])
            put(other, 1)
        path = filled / key_of(2)[:2] / f"{key_of(2)}.npy"
        path.unlink()
        path.mkdir()
        finish_checks(store)
        assert caplog.records == []
        assert checking() == []
        path.rmdir()

    def test_closing_stops_it_and_the_next_start_goes_on(self, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flip_a_bit(filled, key_of(1))
        with monkeypatch.context() as patch:
            patch.setattr("edge_pc.store.background._REST", 1e7)  # it rests after its first block until it is stopped
            store = StateStore(filled)
            lookup(store, 1)
            store.start_checks()
            (thread,) = checking()
            store.start_checks()
            assert checking() == [thread]
            store.close()
            thread.join(60)
            assert not thread.is_alive()
        assert isinstance(lookup(store, 1), KVStates)
        finish_checks(store)
        assert_miss(lookup(store, 1), "checksum")
        store.close()

    def test_the_end_of_the_process_does_not_wait_for_it(self, filled: Path) -> None:
        code = (
            "import sys, store_tools as t; from edge_pc.store import StateStore, background\n"
            "background._REST = 1e7\n"
            "store = StateStore(sys.argv[1]); found = t.lookup(store, 1); store.start_checks(); print('end')"
        )
        assert run_python(code, filled) == "end\n"

    @pytest.mark.skipif(sys.platform != "linux", reason="threads have separate priorities on Linux only")
    def test_it_has_the_lowest_priority_and_no_one_else(self, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []

        def look(*_: object) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

        monkeypatch.setattr("edge_pc.store.background.check_array", look)
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with StateStore(filled) as store:
            lookup(store, 1)
            finish_checks(store)
        assert seen == [19]
        assert os.getpriority(os.PRIO_PROCESS, 0) == before

    def test_it_rests_between_blocks(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edge_pc.store.format._READ_BYTES", 1024)
        rests: list[float] = []
        with StateStore(root) as store:
            put(store, 1)
        store = StateStore(root)
        lookup(store, 1)
        wait = threading.Event.wait

        def count(self: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread().name == CHECKS and timeout is not None:
                rests.append(timeout)
                time.sleep(0)
                return self.is_set()
            return wait(self, timeout)

        monkeypatch.setattr(threading.Event, "wait", count)
        finish_checks(store)
        assert len(rests) == 3 * 2 * 2 * 32 * 16 * 4 // 1024
        assert all(rest > 0 for rest in rests)
