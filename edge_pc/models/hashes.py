"""Hashes of large files, computed once: a file is known again by its identity as long as nobody writes to it.

What was hashed is kept in one small file under the home. A home that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.files import make_private_folder, replacing_file
from edge_pc.system.home import home
from edge_pc.system.identity import identity_of, wait_for_clock_tick

# Files remembered at most; those hashed longest ago are forgotten first.
_MAX_REMEMBERED = 256

_BLOCK = 1 << 20


def content_hash(path: Path) -> str:
    """A hash of a file's bytes, as `xxh3-128:` and 32 hexadecimal digits.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    _, digest = _hash(os.fspath(path))
    return digest


def sha256(path: Path, progress: OnProgress = ignore) -> str:
    """The SHA-256 of a file's bytes in hexadecimal, as publishers of models give it.

    Args:
        progress: in bytes, of the step `check`.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(Progress(done, total, "check"))
    return digest.hexdigest()


def remembered_hashes(paths: Iterable[Path]) -> list[str]:
    """`content_hash` of each file; one that was hashed before, and not touched since, is not read again.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    known = _remembered()
    new: dict[str, list[str]] = {}
    found = []
    for path in paths:
        name = os.path.realpath(path)
        identity, digest = known.get(name, ("", ""))
        if identity != identity_of(os.stat(name)):
            new[name] = identity, digest = list(_hash(name))
        found.append(digest)
    if new:
        _remember(known, new)
    return found


def _hash(name: str) -> tuple[str, str]:
    """The identity and the hash of a file."""
    import xxhash

    with open(name, "rb") as file:
        status = os.fstat(file.fileno())
        # A change from now on gives the file another identity than the one that is remembered.
        wait_for_clock_tick(status)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
        return identity_of(status), f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


def _note() -> Path:
    return home() / "hashes.json"


def _remembered() -> dict[str, list[str]]:
    """Path → [identity, hash]; empty when there is no note, or none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        known = json.loads(_note().read_text(encoding="utf-8"))
        if isinstance(known, dict) and all(_is_record(record) for record in known.values()):
            return known
    return {}


def _is_record(record: object) -> bool:
    return isinstance(record, list) and len(record) == 2 and all(isinstance(text, str) for text in record)


def _remember(known: dict[str, list[str]], new: dict[str, list[str]]) -> None:
    """Processes that write at the same time may lose each other's hashes; those are computed again."""
    kept = {name: record for name, record in known.items() if name not in new} | new
    newest = dict(list(kept.items())[-_MAX_REMEMBERED:])
    with suppress(OSError):
        make_private_folder(home())
        with replacing_file(_note()) as file:
            file.write(json.dumps(newest).encode())
