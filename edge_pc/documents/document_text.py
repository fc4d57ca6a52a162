"""A document's text, and how bytes become text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_pc.documents.charsets import decoded
from edge_pc.documents.formats import format_of
from edge_pc.documents.kept import KeptTexts
from edge_pc.system.text import TextFileError, unusable_character


@dataclass(frozen=True, slots=True)
class Document:
    """A text to ask about.

    Attributes:
        name: unique among the documents of a question.
        title: what the model reads as its name. The same wherever the file is and whatever it is asked about with, so
            that its states are, too.
        text: all of it.
    """

    name: str
    title: str
    text: str


def document_of(data: bytes, name: str) -> Document:
    """The document in the bytes of a file, or of stdin.

    Raises:
        TextFileError: there is no text in them.
        MissingDependencyError: what converts this format is not installed.
    """
    return Document(name, name, text_of(data, Path(name)))


def text_of(data: bytes, path: Path, kept: KeptTexts | None = None) -> str:
    """The text in the bytes of the file `path`, converted if need be.

    Args:
        kept: texts that were converted before.

    Raises:
        TextFileError: there is no text in them.
        MissingDependencyError: what converts this format is not installed.
    """
    format = format_of(data, path)
    if format is None:
        text = decoded(data, path)
    else:
        convert = format.converter(path)
        text = convert(data) if kept is None else kept.get(data, format.version, convert)
    if (unusable := unusable_character(text)) is not None:
        raise TextFileError(path, f"the file is not text: {unusable}", hint="save it as text in UTF-8")
    if not text.strip():
        raise TextFileError(path, "the file is empty", hint="leave it out")
    return text
