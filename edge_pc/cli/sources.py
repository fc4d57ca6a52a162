"""What a person names: a file, a folder, a pattern, or - for stdin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_pc.cli.streams import read_stdin, read_stdin_bytes
from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from edge_pc.documents import Source
    from edge_pc.pml import Schema


def read_schema(source: str) -> Schema:
    """The schema in a file, or on stdin (-).

    Raises:
        PMLError: it is wrong.
        OptionError: stdin cannot be read as UTF-8 text.
    """
    from edge_pc.pml import load_schema, parse_schema

    return parse_schema(read_stdin()) if source == "-" else load_schema(Path(source))


def read_text(source: str) -> str:
    """The text itself, or that on stdin (-)."""
    return read_stdin() if source == "-" else source


def document_sources(names: Sequence[str]) -> list[Source]:
    """What an engine asks about for `names`: the text on stdin for -, all others as they are.

    Raises:
        OptionError: - is named twice; there is no text on stdin.
    """
    from edge_pc.documents import document_of
    from edge_pc.documents.reader import MAX_TEXT_BYTES

    if names.count("-") > 1:
        raise OptionError("stdin (-) can be read only once", hint="give - once")
    return [document_of(read_stdin_bytes(MAX_TEXT_BYTES), "stdin") if name == "-" else name for name in names]
