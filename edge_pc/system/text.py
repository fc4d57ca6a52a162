"""Text from outside: which files are read as text, and which characters no text may hold.

A name may be that of a FIFO that nobody writes to, of a device that never ends, or of a file larger than the memory. So
only regular files of a bounded size are read.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from edge_pc.errors import OptionError
from edge_pc.system.sizes import format_size

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


_HEAD_BYTES = 4096


class TextFileError(OptionError):
    """A file that cannot be read as text; `problem` says why, without the file's name."""

    def __init__(self, path: Path, problem: str, *, hint: str | None = None) -> None:
        name = str(path)
        super().__init__(f"{name if name.isprintable() else repr(name)}: {problem}", hint=hint)
        self.problem = problem


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Args:
        path: of a regular file; symbolic links are followed.
        max_bytes: a larger file is refused.

    Raises:
        TextFileError: it is not a regular file, is too large, cannot be read, or is not UTF-8 text.
    """
    try:
        text = read_bytes(path, lambda head: max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        problem = f"the file is not UTF-8: byte {exc.start} is 0x{exc.object[exc.start]:02x}"
        raise TextFileError(path, problem, hint="save it as UTF-8") from exc
    if (unusable := unusable_character(text)) is not None:
        raise TextFileError(path, f"the file is not text: {unusable}", hint="save it as text in UTF-8")
    return text


def read_bytes(path: Path, limit: Callable[[bytes], int]) -> bytes:
    """What is in a file.

    Args:
        path: of a regular file; symbolic links are followed.
        limit: says how many bytes the file may have, given the first ones, at most 4096; a larger file is refused
            before more of it is read.

    Raises:
        TextFileError: it is not a regular file, is too large, or cannot be read.
    """
    try:
        info = path.stat()
        kind = next((name for is_kind, name in _KINDS if is_kind(info.st_mode)), None)
        if kind is not None:
            hint = "name the files in it" if kind == "a folder" else "save what it gives in a file first"
            raise TextFileError(path, f"this is {kind}, not a text file", hint=hint)
        with path.open("rb") as file:
            data = file.read(_HEAD_BYTES)
            max_bytes = limit(data)
            _check_size(path, info.st_size, max_bytes)
            # A file may grow, or not say its size (as those in /proc).
            data += file.read(max(max_bytes + 1 - len(data), 0))
    except OSError as exc:
        raise TextFileError(path, f"the file cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:  # a NUL, or half a character
        raise TextFileError(path, "this cannot be the name of a file") from exc
    _check_size(path, len(data), max_bytes)
    return data


def unusable_character(text: str) -> str | None:
    """Which character of `text` no model can be given, and where it stands; None where all of them can be."""
    index = text.find("\0")
    if index >= 0:
        return f"character {index + 1} is NUL (U+0000)"
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        return f"character {exc.start + 1} is half a character (U+{ord(text[exc.start]):04X})"
    return None


def _check_size(path: Path, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        problem = f"the file has {format_size(size)}, and there is room for {format_size(max_bytes)}"
        raise TextFileError(path, problem, hint="leave it out, or use only part of it")
