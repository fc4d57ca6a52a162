"""Real processes at the same store: killed at any moment, racing, holding what others remove."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_tools import assert_hit, files_in, key_of, lookup, put, run_python, start_python

from edge_pc.backends.base import KVStates
from edge_pc.store import StateStore
from edge_pc.store.index import INDEX_FILE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")

TOKENS = 2000


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "states"
    assert_tidy_after_gc(tmp_path / "states")


def assert_tidy_after_gc(root: Path) -> None:
    """Whatever happened, `gc` leaves whole entries that are listed, and the index."""
    with StateStore(root) as store:
        store.gc()
    with StateStore(root) as store:
        listed = [entry.path for entry in store.entries()]
        assert store.verify() == []
    assert sorted(path for path in root.rglob("*") if not path.is_dir()) == sorted([*listed, root / INDEX_FILE])


# Encodes 0, 1, 2, …, going round, and says when it begins.
WRITER = f"""
import sys, store_tools as t
from edge_pc.store import StateStore
store = StateStore(sys.argv[1])
print("ready", flush=True)
while True:
    for number in range(8):
        with store.lock(t.key_of(number)):
            t.put(store, number, {TOKENS})
            t.lookup(store, number, {TOKENS})
"""


def test_killed_at_any_moment(root: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    moments = random.Random(seed)
    for attempt in range(12):
        process = start_python(WRITER, root)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if attempt % 2:
            assert_tidy_after_gc(root)
        with StateStore(root) as store:
            for number in range(8):
                found = lookup(store, number, TOKENS)
                if isinstance(found, KVStates):
                    assert_hit(found, number, TOKENS)
                else:
                    assert not found.damaged, found
    with StateStore(root) as store:
        for number in range(8):
            with store.lock(key_of(number)):
                if not isinstance(lookup(store, number, TOKENS), KVStates):
                    put(store, number, TOKENS)
            assert_hit(lookup(store, number, TOKENS), number, TOKENS)
        assert len(store.entries()) == 8


# Steps of `put`, in their order.
STEPS = {
    "lock": "filelock.FileLock.acquire",
    "new temporary file": "edge_pc.system.files.fcntl.flock",
    "first bytes": "edge_pc.store.files._write_all",
    "sync": "os.fsync",
    "rename": "os.replace",
    "clock": "edge_pc.store.files.wait_for_clock_tick",
    "map": "edge_pc.store.store.map_array",
    "new index": "edge_pc.store.index._checked",
    "index": "edge_pc.store.index.Index.put",
    "unlock": "edge_pc.store.locks._release",
}


@pytest.mark.parametrize("limit", [None, 10**6], ids=["no limit", "limit"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(root: Path, step: str, limit: int | None) -> None:
    code = f"""
import importlib, os, signal, sys, store_tools as t
from edge_pc.store import StateStore
store = StateStore(sys.argv[1], max_bytes={limit})
place, _, name = {STEPS[step]!r}.rpartition(".")
owner, path = None, place.split(".")
while owner is None:
    try:
        owner = importlib.import_module(".".join(path))
    except ImportError:
        path.pop()
for part in place.split(".")[len(path):]:
    owner = getattr(owner, part)
setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
with store.lock(t.key_of(1)):
    t.put(store, 1)
"""
    process = start_python(code, root)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    steps = list(STEPS)
    # With a limit, the index is asked before something is written.
    written = steps.index(step) > steps.index("rename") and not (limit and step == "new index")
    with StateStore(root) as store:
        with store.lock(key_of(2)):
            put(store, 2)  # the dead process's locks are no one's
        assert isinstance(lookup(store, 1), KVStates) == written
    assert_tidy_after_gc(root)
    with StateStore(root) as store:
        assert [entry.key for entry in store.entries()] == [key_of(1)] * written + [key_of(2)]
        assert_hit(put(store, 1), 1)


def test_verify_finds_nothing_in_a_store_that_others_write(root: Path) -> None:
    """Writers put, replace and remove all the time; what stands between two of their steps is no damage."""
    code = """
import random, sys, store_tools as t
from edge_pc.store import StateStore
store = StateStore(sys.argv[1], max_bytes=200_000)
while True:
    t.put(store, random.randrange(12), random.randrange(1, 100))
    store.remove([t.key_of(random.randrange(12))])
"""
    writers = [start_python(code, root, stdout=subprocess.DEVNULL) for _ in range(3)]
    try:
        with StateStore(root) as store:
            verified = 0
            while verified < 150:
                assert store.verify() == []
                verified += len(store.entries())
                assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_gc_leaves_what_is_being_written(root: Path) -> None:
    code = (
        "import sys, time, store_tools as t\n"
        "import edge_pc.store.files as files\n"
        "from edge_pc.store import StateStore\n"
        "write = files._write_all\n"
        "def slow(file, data):\n"
        "    write(file, data); print('writing', flush=True); sys.stdin.readline()\n"
        "files._write_all = slow\n"
        "t.put(StateStore(sys.argv[1]), 1)\n"
    )
    process = start_python(code, root, stdin=-1)
    assert process.stdout is not None
    process.stdout.readline()
    with StateStore(root) as store:
        store.gc(max_bytes=0, older_than=0)
        assert store.verify() == []
    assert len(files_in(root)) == 1
    process.communicate("\n" * 3, timeout=60)
    assert process.returncode == 0
    assert_hit(lookup(StateStore(root), 1), 1)


def test_two_processes_encode_the_same_key_once(root: Path) -> None:
    code = """
import sys, time, store_tools as t
from edge_pc.store import Miss, StateStore
store = StateStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
encoded = []
for number in range(10):
    with store.lock(t.key_of(number)):
        if isinstance(t.lookup(store, number), Miss):
            time.sleep(0.02)
            t.put(store, number)
            encoded.append(number)
    t.assert_hit(t.lookup(store, number), number)
print(*encoded)
"""
    processes = [start_python(code, root, stdin=-1) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    encoded = []
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        encoded += output.split()
    assert sorted(map(int, encoded)) == list(range(10))


def test_processes_write_the_same_key_without_a_lock(root: Path) -> None:
    code = (
        "import sys, store_tools as t; from edge_pc.store import StateStore; store = StateStore(sys.argv[1])\n"
        "for _ in range(20): t.assert_hit(t.put(store, 1), 1); t.assert_hit(t.lookup(store, 1), 1)"
    )
    processes = [start_python(code, root) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert files_in(root) == [f"{key_of(1)}.npy"]


def test_processes_share_a_limit(root: Path) -> None:
    code = (
        "import sys, store_tools as t; from edge_pc.store import StateStore\n"
        "store = StateStore(sys.argv[1], max_bytes=200_000); first = int(sys.argv[2])\n"
        "for number in range(first, first + 15): t.assert_hit(t.put(store, number), number)"
    )
    processes = [start_python(code, root, first) for first in (0, 20, 40)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with StateStore(root) as store:
        assert 0 < store.totals().nbytes <= 200_000


@pytest.mark.parametrize("way", ["removed and encoded again", "evicted"])
def test_a_process_keeps_what_it_has_mapped(root: Path, way: str) -> None:
    put(StateStore(root), 1, TOKENS)
    code = (
        "import sys, store_tools as t; from edge_pc.store import StateStore; store = StateStore(sys.argv[1])\n"
        f"found = t.lookup(store, 1, {TOKENS}); print('mapped', flush=True); sys.stdin.readline()\n"
        f"t.assert_hit(found, 1, {TOKENS}); print('same')"
    )
    process = start_python(code, root, stdin=-1)
    assert process.stdout is not None
    process.stdout.readline()
    if way == "evicted":
        StateStore(root).gc(max_bytes=0)
    else:
        with StateStore(root) as store:
            store.remove([key_of(1)])
            put(store, 1, TOKENS)
    output, _ = process.communicate("\n", timeout=60)
    assert output.split() == ["same"]


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}, {"LC_ALL": "tr_TR.UTF-8"}, {"LC_ALL": "C"}],
    ids=str,
)
def test_found_in_another_environment(root: Path, environment: dict[str, str], tmp_path: Path) -> None:
    name = "ünï/🎌"
    with StateStore(root) as store:
        put(store, 1, module=name)
    code = (
        "import sys, store_tools as t; from edge_pc.store import StateStore; store = StateStore(sys.argv[1])\n"
        f"t.assert_hit(t.lookup(store, 1), 1); assert store.entries()[0].module == {name!a}"
    )
    run_python(code, root, env={**environment, "PYTHONUTF8": "0"}, cwd="/")
    run_python(code, os.path.relpath(root, tmp_path), env=environment, cwd=tmp_path)


def test_a_store_that_was_moved_or_copied(root: Path, tmp_path: Path) -> None:
    with StateStore(root) as store:
        put(store, 1)
    root.rename(tmp_path / "moved")
    with StateStore(tmp_path / "moved") as store:
        assert_hit(lookup(store, 1), 1)
        assert store.entries()[0].path.is_relative_to(tmp_path / "moved")
    run_python("import shutil, sys; shutil.copytree(*sys.argv[1:])", tmp_path / "moved", root)
    (root / INDEX_FILE).unlink()
    with StateStore(root) as store:
        assert_hit(lookup(store, 1), 1)


def test_a_current_folder_that_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    monkeypatch.chdir(root.parent)
    store = StateStore(Path(root.name))
    monkeypatch.chdir("/")
    put(store, 1)
    assert_hit(lookup(store, 1), 1)
    assert files_in(root) == [f"{key_of(1)}.npy"]
