"""What a person names: a file, or - for stdin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_pc.cli.streams import read_stdin

if TYPE_CHECKING:
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
