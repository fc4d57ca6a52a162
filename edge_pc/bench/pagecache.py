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

import numpy as np


def can_drop() -> bool:
    """Whether this system has the call."""
    return hasattr(os, "posix_fadvise")


def drop(paths: Iterable[Path]) -> None:
    """Write the files back and ask the system to forget their pages. Pages that are mapped anywhere stay."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in memory (mincore), on a system that can drop them."""
    flags = []
    for path in paths:
        mapped = np.memmap(path, mode="r")
        pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), dtype=np.uint8)
        address, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes)
        if ctypes.CDLL(None, use_errno=True).mincore(address, size, ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        flags.append(pages & 1)
    return float(np.concatenate(flags).mean())
