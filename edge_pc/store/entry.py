"""One states file, opened: checked, and mapped."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import StatesError
from edge_pc.store.format import DESCRIPTORS, HEADER_BYTES, Metadata, check_array, read_metadata
from edge_pc.system.identity import identity_of, wait_for_clock_tick
from edge_pc.system.pages import can_map, map_over

# A file may be touched by another program while it is read.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An entry that was read: what its file says, the file's identity and size in bytes, and the mapped array.

    `checked` tells whether every byte was read and the file is still there; all but the array was checked in any case.
    """

    metadata: Metadata
    identity: str
    size: int
    array: NDArray[Any]
    checked: bool


@contextmanager
def open_entry(path: str) -> Iterator[tuple[FileIO, os.stat_result]]:
    """Open an entry for reading.

    Raises:
        StatesError: something else than a file stands there.
        OSError: it is not there or cannot be read.
    """
    # A named pipe would block in open().
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise StatesError(f"{path} is not a file", hint="remove it")
    with open(path, "rb", buffering=0) as file:
        yield file, os.fstat(file.fileno())


def read_entry(file: FileIO, status: os.stat_result, key: str, *, thorough: bool) -> Metadata:
    """Check the entry of `key`: all but the array, or with `thorough` every byte.

    Raises:
        StatesError: it is not a whole states file of this key.
        OSError: it cannot be read.
    """
    metadata = read_metadata(file, status.st_size)
    if metadata.key != key:
        raise StatesError(f"the file holds other states: {metadata.module!r} of {metadata.schema!r}")
    if thorough:
        wait_for_clock_tick(status)
        check_array(file, metadata)
    return metadata


def load_entry(path: str, key: str, trusted: str | None) -> Entry:
    """Read the entry of `key`, every byte of it unless the file's identity is `trusted`, and map its array.

    Raises:
        StatesError: it is not a whole states file of this key.
        OSError: it is not there or cannot be read.
    """
    for _ in range(_ATTEMPTS):
        with open_entry(path) as (file, status):
            identity = identity_of(status)
            metadata = read_entry(file, status, key, thorough=identity != trusted)
            array = map_array(file, metadata)
            after = os.fstat(file.fileno())
            # Removed or replaced meanwhile: what was read is whole, but is not what stands there now.
            gone = after.st_nlink == 0
            if gone or identity_of(after) == identity:
                return Entry(metadata, identity, status.st_size, array, checked=identity != trusted and not gone)
    raise StatesError("the file keeps changing")


def map_array(file: FileIO, metadata: Metadata) -> NDArray[Any]:
    """The array of an entry as a read-only view of its pages; the file may be closed or removed afterwards.

    Raises:
        StatesError: the file is shorter than it was.
        OSError: the system cannot map it.
    """
    length = HEADER_BYTES + metadata.nbytes
    if os.fstat(file.fileno()).st_size < length:
        raise StatesError("file truncated while it was mapped")
    dtype = np.dtype(DESCRIPTORS[metadata.dtype])
    flat = np.frombuffer(_pages(file, length), dtype, metadata.nbytes // dtype.itemsize, HEADER_BYTES)
    return flat.reshape(metadata.shape)


def _pages(file: FileIO, length: int) -> mmap.mmap:
    """The first `length` bytes of the file, mapped. What Python maps itself keeps a descriptor open (before 3.13)."""
    if not can_map():
        return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    map_over(np.frombuffer(pages, np.uint8).ctypes.data, length, file.fileno(), 0, writable=False)
    return pages
