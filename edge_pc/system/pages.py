"""Pages of a file put over memory that is mapped already, which Python's own `mmap` cannot do (Linux, macOS)."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from functools import cache

_MAP_FIXED = 0x10  # the same on Linux and macOS; Python's mmap module does not name it


def can_map() -> bool:
    """Whether this system can put file pages over existing memory."""
    return sys.platform in ("linux", "darwin")


def map_over(address: int, length: int, fd: int, offset: int, *, writable: bool = True) -> None:
    """Replace `length` bytes of memory at `address` by the file's pages from `offset`, or by anonymous ones (fd -1).

    Writes stay in memory. The file may be closed afterwards.

    Raises:
        OSError: the system refuses.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    error = _native_mmap()(address, length, protection, flags, fd, offset)
    if error:
        raise OSError(error, os.strerror(error))


@cache
def _native_mmap() -> Callable[[int, int, int, int, int, int], int]:
    """The system's mmap; what it returns is the error number, 0 for none."""
    import ctypes

    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long]
    failed = ctypes.c_void_p(-1).value

    def call(address: int, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
        result = function(address, length, protection, flags, fd, offset)
        return ctypes.get_errno() if result == failed else 0

    return call
