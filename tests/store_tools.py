"""What the tests of the store share: layouts, contents by key, and separate processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from padded import PaddedLayout

from edge_pc.backends.base import KVLayout, KVStates
from edge_pc.backends.onnx.layout import PagedLayout
from edge_pc.store import Miss, StateStore
from edge_pc.store.index import INDEX_FILE

LAYOUT = PaddedLayout("test-float32", "float32", (3, 2, 2, 1, 16), 3, 16)
HALF = PaddedLayout("test-float16", "float16", (3, 2, 2, 1, 16), 3, 16)
PAGED = PagedLayout(layers=3, kv_heads=2, head_dim=16, dtype="float32", page_tokens=64)
# The name of the threads that check stores in the background.
CHECKS = "edge-pc-store-checks"

BYTES = PaddedLayout("test-blob", "uint8", (100,), 0, 1)


def cells(number: int, tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Token and position ids that differ for every `number`; positions with a gap."""
    token_ids = (np.arange(tokens, dtype=np.int32) * 7 + number) % 49152
    position_ids = np.arange(tokens, dtype=np.int32) + number
    position_ids[tokens // 2 :] += 5
    return token_ids, position_ids


def states_array(number: int, tokens: int, layout: KVLayout = LAYOUT) -> NDArray[Any]:
    """Contents that differ for every `number`; the padding is zero."""
    position_ids = cells(number, tokens)[1]
    axis, first, width = 3, 0, 1
    if isinstance(layout, PagedLayout):
        first = layout.lead(position_ids)
    elif isinstance(layout, PaddedLayout):
        axis, width = layout.token_axis, layout.shape[layout.token_axis]
    values = np.random.default_rng(number).integers(0, 256, layout.array_shape(position_ids)).astype(layout.dtype)
    along_tokens = np.moveaxis(values, axis, 0)
    along_tokens[: first * width] = 0
    along_tokens[(first + tokens) * width :] = 0
    return values


def put(store: StateStore, number: int, tokens: int = 20, layout: KVLayout = LAYOUT, module: str = "m") -> KVStates:
    array = states_array(number, tokens, layout)
    names = {"model": "tiny", "schema": "s", "module": module}
    return store.put(key_of(number), layout, array, *cells(number, tokens), **names)


def lookup(store: StateStore, number: int, tokens: int = 20, layout: KVLayout = LAYOUT) -> KVStates | Miss:
    return store.lookup(key_of(number), layout, *cells(number, tokens))


def key_of(number: int) -> str:
    return f"{number:02x}" * 8


def assert_hit(found: KVStates | Miss, number: int, tokens: int = 20, layout: KVLayout = LAYOUT) -> KVStates:
    assert isinstance(found, KVStates), found
    np.testing.assert_array_equal(found.array, states_array(number, tokens, layout))
    return found


def assert_miss(found: KVStates | Miss, reason: str) -> Miss:
    assert isinstance(found, Miss), "a hit"
    assert reason in found.reason
    return found


def files_in(root: Path) -> list[str]:
    """Names of the states files and temporary files below `root`."""
    return sorted(path.name for path in root.glob("??/*"))


def overwrite(path: Path, data: bytes, offset: int = 0) -> None:
    """Write into a file in place, as a broken disk or another program would."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def truncate(path: Path, size: int) -> None:
    path.chmod(0o600)
    os.truncate(path, size)


def flip_a_bit(root: Path, key: str) -> None:
    """Change a file so that nothing shows it."""
    data = bytearray((root / key[:2] / f"{key}.npy").read_bytes())
    data[5000] ^= 64
    change_unseen(root, key, bytes(data))


def lose_bytes(root: Path, key: str) -> None:
    """Put zeros into a file so that nothing shows it."""
    data = bytearray((root / key[:2] / f"{key}.npy").read_bytes())
    lost = slice(5000, 7000)
    data[lost] = bytes(lost.stop - lost.start)
    change_unseen(root, key, bytes(data))


def change_unseen(root: Path, key: str, data: bytes) -> None:
    """Change a file; its new time stamps are those that were noted when it was checked."""
    path = root / key[:2] / f"{key}.npy"
    overwrite(path, data, 0)
    status = path.stat()
    identity = f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
    with closing(sqlite3.connect(root / INDEX_FILE)) as connection, connection:
        connection.execute("UPDATE entries SET identity = ? WHERE key = ?", (identity, key))


def checking() -> list[threading.Thread]:
    """The threads that check stores in the background."""
    return [thread for thread in threading.enumerate() if thread.name == CHECKS]


def finish_checks(store: StateStore) -> None:
    """Have all checked that waits for it."""
    store.start_checks()
    for thread in checking():
        thread.join(60)
        assert not thread.is_alive()


def start_python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that may import these tools; `code` finds its arguments in `sys.argv`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment.update(options.pop("env", {}))
    # In the repository's root, `edge_pc` would be the folder there rather than the installed package.
    options.setdefault("cwd", Path(__file__).parent)
    options.setdefault("stdout", subprocess.PIPE)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, **options)


def run_python(code: str, *arguments: object, **options: Any) -> str:
    """What the process prints; it must succeed."""
    process = start_python(code, *arguments, **options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output
