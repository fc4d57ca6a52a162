"""Bytes of a text file to text: UTF-8, UTF-16 and UTF-32 by their byte order marks, else what old Windows wrote."""

from __future__ import annotations

import codecs
import logging
import re
from pathlib import Path

from edge_pc.system.text import TextFileError

log = logging.getLogger("edge_pc")

# The longer ones first: that of UTF-32 begins like that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# What a file is that is no text, by its first bytes.
_SIGNATURES = (
    (rb"\x89PNG|GIF8|\xff\xd8\xff|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*", "a picture"),
    (rb"ID3|OggS|fLaC|\xff[\xf2\xf3\xfb]|RIFF....(WAVE|AVI)|....ftyp|\x1aE\xdf\xa3", "sound or film"),
    (rb"PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd", "an archive"),
    (rb"\x7fELF|MZ|\xcf\xfa\xed\xfe|\xca\xfe\xba\xbe|\0asm", "a program"),
    (rb"SQLite format 3\0", "a database"),
    (rb"\xd0\xcf\x11\xe0", "an old Office file, or one that is protected by a password"),
)
_KINDS = tuple((re.compile(signature, re.DOTALL), kind) for signature, kind in _SIGNATURES)

# No text has them: all but white space, form feeds, and what colours a terminal's output.
_CONTROL = rb"[\x00-\x07\x0e-\x1a\x1c-\x1f]"

_AS_TEXT = "save it as text, PDF, DOCX or HTML"


def decoded(data: bytes, path: Path) -> str:
    """The text that `data` is; a warning says so where its encoding had to be guessed.

    Raises:
        TextFileError: it is no text.
    """
    refuse_binary(data, path)
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        if encoding != "utf-8":
            problem = f"the file is not {encoding.removesuffix('-sig').upper()}, though it begins so"
            raise TextFileError(path, problem, hint="save it as UTF-8") from exc
        text, used = _of_one_byte(data)
        byte = f"byte {exc.start} is 0x{data[exc.start]:02x}"
        log.warning("%s: the file is not UTF-8 (%s); it is read as %s", path, byte, used)
        return text


def refuse_binary(data: bytes, path: Path) -> None:
    """Raise TextFileError where the first bytes of a file, or all of them, are no text in any encoding."""
    if any(data.startswith(mark) for mark, _ in _MARKS):
        return
    control = re.search(rb"\0" if _is_utf8(data) else _CONTROL, data)
    if control:
        kind = next((kind for signature, kind in _KINDS if signature.match(data)), None)
        if kind is not None:
            raise TextFileError(path, f"the file is not text, but {kind}", hint=_AS_TEXT)
        problem = f"the file is not text: byte {control.start()} is 0x{data[control.start()]:02x}"
        raise TextFileError(path, problem, hint=_AS_TEXT)


def _is_utf8(data: bytes) -> bool:
    """Whether it is, but for a character that is cut off at the end."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _of_one_byte(data: bytes) -> tuple[str, str]:
    """The text in an encoding of one byte a character, and which one."""
    try:
        return data.decode("cp1252"), "Windows-1252"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "Latin-1"
