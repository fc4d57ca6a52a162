"""Takes files out of the system's page cache, and looks whether they are in it, without special rights.

Linux drops clean pages that no process has mapped when it is told `POSIX_FADV_DONTNEED`. Other systems have no such
call, and file systems in memory cannot drop anything: `resident_share` tells.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

# Below this share of pages in memory a file counts as cold.
COLD_SHARE = 0.05


def can_drop() -> bool:
    """Whether this system has the call."""
    return hasattr(os, "posix_fadvise") and hasattr(os, "POSIX_FADV_DONTNEED")


def drop(paths: Iterable[Path]) -> None:
    """Write the files back and ask the system to forget their pages. Pages that are mapped anywhere stay."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_share(paths: Iterable[Path]) -> float | None:
    """The share of the files' pages that are in memory; None where the system does not tell."""
    pages = resident = 0
    for path in paths:
        found = _resident_pages(path)
        if found is None:
            return None
        resident += sum(found)
        pages += len(found)
    return resident / pages if pages else None


def _resident_pages(path: Path) -> list[int] | None:
    """One number a page, 1 when it is in memory (mincore); None where the system does not tell."""
    size = path.stat().st_size
    if not size or os.name == "nt":
        return [] if not size else None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        count = -(-size // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * count)()
        buffer = (ctypes.c_ubyte * size).from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_size_t(size), flags)
        del buffer  # it would keep the mapping from being closed
    return None if failed else [flag & 1 for flag in flags]
