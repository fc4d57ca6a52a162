"""What a person is told when states cannot be stored, and what can be found out before they are computed."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path

from edge_pc.errors import StoreError
from edge_pc.system.sizes import exact_size, format_size

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP}
_ELSEWHERE = "choose another folder with --cache-dir or EDGE_PC_CACHE_DIR"


def cannot_write(exc: OSError, path: Path, needed: int) -> StoreError:
    """The error for states of `needed` bytes that cannot be written to `path`."""
    reason = exc.strerror or str(exc)
    if exc.errno in _NO_SPACE:
        free = free_bytes(path)
        space = f"{format_size(needed)} needed" + ("" if free is None else f", {format_size(free)} free")
        hint = f"free some space (edge-pc cache gc --max-size SIZE removes stored states), or {_ELSEWHERE}"
        return StoreError(f"cannot store states in {path}: {reason}: {space}", hint=hint)
    if exc.errno in _NO_PERMISSION:
        hint = f"make the folder writable, or {_ELSEWHERE}"
    elif exc.errno in _NO_FOLDER:
        hint = f"something else is where a folder or a file of the store belongs: move it away, or {_ELSEWHERE}"
    else:
        hint = f"look at the disk, or {_ELSEWHERE}"
    return StoreError(f"cannot store states in {path} ({format_size(needed)}): {reason}", hint=hint)


def check_limit(path: Path, stored: int, needed: int, max_bytes: int) -> None:
    """Refuse what the limit of the store in `path` does not allow, whatever would be evicted for it.

    Raises:
        StoreError: more than the limit is already stored, which only a person may decide to remove; or `needed` bytes
            are more than the limit.
    """
    limit = format_size(max_bytes)
    if stored > max_bytes:
        command = f"edge-pc cache gc --max-size {exact_size(max_bytes)} --cache-dir {shlex.quote(str(path))}"
        raise StoreError(
            f"nothing is stored: the store in {path} holds {format_size(stored)}, more than its limit of {limit}",
            hint=f"raise the limit, or remove the least recently used states: {command}",
        )
    if needed > max_bytes:
        raise StoreError(
            f"cannot store states of {format_size(needed)}: they are larger than the limit of the store, {limit}",
            hint="raise the limit",
        )


def check_space(path: Path, needed: int) -> None:
    """Refuse `needed` bytes that are more than what is free where `path` is or would be.

    Raises:
        StoreError: with both sizes.
    """
    free = free_bytes(path)
    if free is not None and needed > free:
        raise cannot_write(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path, needed)


def check_writable(path: Path, needed: int) -> None:
    """Check whether a file can be created where the folder `path` is or would be. Nothing is left.

    Raises:
        StoreError: it cannot.
    """
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=next(folder for folder in (path, *path.parents) if os.path.lexists(folder))):
            pass
    except OSError as exc:
        raise cannot_write(exc, path, needed) from exc


def free_bytes(path: Path) -> int | None:
    """The free space in bytes where `path` is or would be; None when the system does not tell."""
    for folder in (path, *path.parents):
        if os.path.isdir(folder):
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                return None
    return None
