"""stdin, stdout and stderr, whatever a shell has made of them: of another encoding, closed, full.

What cannot be written to stderr is lost, and changes nothing else. An answer that cannot be written is an error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

from edge_pc.errors import OptionError
from edge_pc.system.sizes import format_size
from edge_pc.system.text import unusable_character

# A closed stream gets the null device, opened the wrong way round for stdin and stdout: whoever uses them is refused.
_STREAMS = {"stdin": (os.O_WRONLY, "r"), "stdout": (os.O_RDONLY, "w"), "stderr": (os.O_WRONLY, "w")}


def prepare_streams() -> None:
    """Make all streams UTF-8 on every locale, and open those that are closed.

    What cannot be encoded (a file's name that is not UTF-8) is shown escaped. The number of a closed stream would be
    given to the next file that is opened, and what a native library says would go into that file.
    """
    for name, (flags, mode) in _STREAMS.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, flags), mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: what cannot be written would be gone, and `give_up_stdout` would know of nothing.
        sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def read_stdin() -> str:
    """The text on stdin, as UTF-8 on every locale.

    Raises:
        OptionError: it is no text in UTF-8, too large for any model, or cannot be read.
    """
    from edge_pc.pml.xml import MAX_BYTES

    try:
        text = read_stdin_bytes(MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise OptionError(f"stdin is not UTF-8 text (byte {exc.start})", hint="convert it to UTF-8") from exc
    if (unusable := unusable_character(text)) is not None:
        raise OptionError(f"stdin is not text: {unusable}", hint="give it text in UTF-8")
    return text


def read_stdin_bytes(max_bytes: int) -> bytes:
    """What is on stdin.

    Raises:
        OptionError: it is larger, or cannot be read.
    """
    try:
        data = sys.stdin.buffer.read(max_bytes + 1)  # it may never end
    except OSError as exc:
        raise OptionError(f"stdin cannot be read: {why(exc)}") from exc
    if len(data) > max_bytes:
        raise OptionError(f"stdin has more than {format_size(max_bytes)}", hint="give it only part of the text")
    return data


def say(text: str) -> None:
    """Write to stderr, as far as that is possible."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _drop_what_is_left_for(sys.stderr)


def say_error(message: str, hint: str | None) -> None:
    """`error: …` and `hint: …` on stderr, whatever -q says."""
    say(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


def give_up_stdout() -> str | None:
    """Why stdout could not be written, or None if it can be."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        _drop_what_is_left_for(sys.stdout)
        return why(exc)
    return None


def _drop_what_is_left_for(stream: TextIO) -> None:
    """The interpreter writes it on its way out, and would exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def why(exc: OSError) -> str:
    """What the system said, in words."""
    return "it is closed" if exc.errno == errno.EBADF else exc.strerror or str(exc)
