"""Turns files into a schema, for questions about a person's own documents.

Each file is a module. A long one is cut at paragraphs into modules nested in one another: text before a part is then
surely present with it, so that the whole file is encoded as if in one piece, and an edit encodes again only what
follows it.

Where not everything fits, a question is asked about parts of the files instead. These are shorter, and modules beside
one another: the states of each depend on no other part, so they serve whatever else is picked with it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_pc.compose.choices import DEFAULT_SYSTEM
from edge_pc.documents import Document
from edge_pc.errors import OptionError
from edge_pc.pml.model import NOWHERE, FreeText, Module, Node, Schema, Selection, Text, Turn

SCHEMA_NAME = "documents"

# About 1,500 tokens of English: long enough that a part's pages are mapped rather than copied.
PART_CHARACTERS = 6000
# A longer file has longer parts: each sees all parts before it, so many small ones would cost more than they save.
MAX_PARTS = 32

# Of parts that are picked: short enough that many fit, long enough that each says what it is about.
PICKED_CHARACTERS = 1500

_BOUNDARIES = tuple(map(re.compile, (r"\n\s*\n", r"\n", r"\s")))
# After a cut.
_DECIDING_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document, which may be asked about without the others.

    Attributes:
        document: its name.
        number: 1-based, of the parts of this document.
        written: as the model reads it.
    """

    document: str
    number: int
    written: str

    @property
    def name(self) -> str:
        return f"{self.document}#{self.number}"


def written(document: Document) -> str:
    """All of a document, as the model reads it."""
    return _titled(document.title, document.text)


def _titled(title: str, text: str) -> str:
    return f"\n\nDocument: {title}\n{text.strip()}\n"


def documents_schema(
    documents: Sequence[Document], *, chat: bool, system: str = DEFAULT_SYSTEM
) -> tuple[Schema, tuple[str, ...]]:
    """A schema with a module for each document, and the paths of all modules.

    Args:
        chat: put them into a system turn; otherwise the schema is plain text.
        system: stands before the documents; may be empty.
    """
    return _schema((nested_parts(document) for document in documents), chat, system)


def parts_schema(parts: Sequence[Part], *, chat: bool, system: str = DEFAULT_SYSTEM) -> tuple[Schema, tuple[str, ...]]:
    """As `documents_schema`, with a module for each of `parts`."""
    modules = (Module(part.name, part.name, (Text(part.written, NOWHERE),), True, NOWHERE) for part in parts)
    return _schema(modules, chat, system)


def _schema(modules: Iterable[Module], chat: bool, system: str) -> tuple[Schema, tuple[str, ...]]:
    text = (Text(system, NOWHERE),) if system else ()
    children: tuple[Node, ...] = (*text, *modules)
    if chat:
        children = (Turn("system", children, NOWHERE),)
    schema = Schema(SCHEMA_NAME, children, NOWHERE, made_of_files=True)
    return schema, tuple(schema.modules())


def question(text: str, modules: Sequence[str], *, chat: bool) -> Selection:
    """The prompt that asks `text` about all of `modules`.

    Raises:
        OptionError: the question is empty.
    """
    return Selection(tuple(modules), free_text=(question_text(text, chat=chat),), at=NOWHERE)


def question_text(text: str, *, chat: bool) -> FreeText:
    """A question as a turn of the user, or in plain text.

    Raises:
        OptionError: it is empty.
    """
    if not text.strip():
        raise OptionError("the question is empty")
    if chat:
        return FreeText(text.strip(), "user", NOWHERE)
    return FreeText(f"\n\nQuestion: {text.strip()}\nAnswer:", None, NOWHERE)


def parts_of(document: Document, size: int = PICKED_CHARACTERS) -> list[Part]:
    """A document as parts of at most about `size` characters, each under its title."""
    cuts = _cut(document.text.strip(), size)
    return [Part(document.name, number, _titled(document.title, cut)) for number, cut in enumerate(cuts, start=1)]


def cut_at_paragraphs(text: str, size: int = PART_CHARACTERS) -> list[str]:
    """Cut text into at most `MAX_PARTS` parts of at most about `size` characters; joined, they are the text again.

    Where there would be too many parts, `size` is doubled until there are not: an edit then seldom moves all the cuts.
    """
    while len(text) > size * MAX_PARTS:
        size *= 2
    while len(parts := _cut(text, size)) > MAX_PARTS:
        size *= 2
    return parts


def _cut(text: str, size: int) -> list[str]:
    """Cut text into parts of at most `size` characters.

    A part ends after a blank line where there is one, else after a line, else at a space, else anywhere. Which one of
    several is decided by the text that follows it alone: after an edit, the cuts are soon the same as before it.
    """
    parts = []
    start = 0
    while len(text) - start > size:
        end = start + size
        for boundary in _BOUNDARIES:
            # One near the start would make a tiny part.
            ends = [match.end() for match in boundary.finditer(text, start + size // 2, start + size)]
            if ends:
                end = min(ends, key=lambda place: zlib.crc32(text[place : place + _DECIDING_CHARACTERS].encode()))
                break
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]] if start < len(text) else parts


def nested_parts(document: Document) -> Module:
    """A document as modules one inside the other."""
    parts = cut_at_paragraphs(written(document))
    return nested(parts, [document.name, *(f"part{number}" for number in range(2, len(parts) + 1))])


def nested(parts: Sequence[str], names: Sequence[str], prefix: str = "") -> Module:
    """Modules one inside the other, each with one part; `prefix` is the path that they stand in, ending with `/`."""
    path = prefix + names[0]
    inner = (nested(parts[1:], names[1:], f"{path}/"),) if len(parts) > 1 else ()
    return Module(names[0], path, (Text(parts[0], NOWHERE), *inner), True, NOWHERE)
