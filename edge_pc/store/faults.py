"""What a person is told when the store cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from edge_pc.errors import StoreError
from edge_pc.system.sizes import format_size

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP}
_ELSEWHERE = "choose another folder with --cache-dir or EDGE_PC_CACHE_DIR"


def cannot_write(exc: OSError, path: Path, needed: int) -> StoreError:
    """The error for an entry of `needed` bytes that cannot be written to `path`."""
    reason = exc.strerror or str(exc)
    if exc.errno in _NO_SPACE:
        free = free_bytes(path)
        space = f"{format_size(needed)} needed" + ("" if free is None else f", {format_size(free)} free")
        hint = f"free some space (edge-pc cache gc --max-bytes SIZE removes stored states), or {_ELSEWHERE}"
        return StoreError(f"cannot store states in {path}: {reason}: {space}", hint=hint)
    if exc.errno in _NO_PERMISSION:
        hint = f"make the folder writable for you, or {_ELSEWHERE}"
    elif exc.errno in _NO_FOLDER:
        hint = f"something stands where a folder or a file of the store belongs: move it away, or {_ELSEWHERE}"
    else:
        hint = f"look at the disk, or {_ELSEWHERE}"
    return StoreError(f"cannot store states in {path} ({format_size(needed)}): {reason}", hint=hint)


def free_bytes(path: Path) -> int | None:
    """The free space in bytes where `path` is or would be; None when the system does not tell."""
    for folder in (path, *path.parents):
        if os.path.isdir(folder):
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                return None
    return None
