"""Turns files into a schema, for questions about a person's own documents.

Each file is a module. A long one is cut at paragraphs into modules nested in one another: text before a part is then
surely present with it, so that the whole file is encoded as if in one piece, and an edit encodes again only what
follows it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from edge_pc.errors import OptionError
from edge_pc.pml.model import FreeText, Location, Module, Node, Schema, Selection, Text, Turn

SCHEMA_NAME = "documents"

# About 1,500 tokens of English: long enough that a part's pages are mapped rather than copied.
PART_CHARACTERS = 6000

_INSTRUCTION = "Answer the question using the documents below."

_NOWHERE = Location(None, 0, 0)


def read_documents(files: Sequence[Path]) -> list[tuple[str, str]]:
    """(name, text) of each file, names made unique.

    Raises:
        OptionError: there is no file, or one cannot be read as UTF-8 text or is empty.
    """
    if not files:
        raise OptionError("no file is given", hint="name at least one text file to ask about")
    documents: dict[str, str] = {}
    for file in files:
        name, count = file.name, 1
        while name in documents:
            count += 1
            name = f"{file.name}-{count}"
        documents[name] = _read(file)
    return list(documents.items())


def documents_schema(documents: Sequence[tuple[str, str]], *, chat: bool) -> tuple[Schema, tuple[str, ...]]:
    """A schema with a module for each document, and the paths of all modules.

    Args:
        documents: (name, text) of each.
        chat: put them into a system turn; otherwise the schema is plain text.
    """
    modules = [_document(name, text) for name, text in documents]
    children: tuple[Node, ...] = (Text(_INSTRUCTION, _NOWHERE), *modules)
    if chat:
        children = (Turn("system", children, _NOWHERE),)
    schema = Schema(SCHEMA_NAME, children, _NOWHERE)
    return schema, tuple(schema.modules())


def question(text: str, modules: Sequence[str], *, chat: bool) -> Selection:
    """The prompt that asks `text` about all of `modules`.

    Raises:
        OptionError: the question is empty.
    """
    if not text.strip():
        raise OptionError("the question is empty")
    free_text = FreeText(text.strip(), "user", _NOWHERE)
    if not chat:
        free_text = FreeText(f"\n\nQuestion: {text.strip()}\nAnswer:", None, _NOWHERE)
    return Selection(tuple(modules), free_text=(free_text,), at=_NOWHERE)


def cut_at_paragraphs(text: str, size: int = PART_CHARACTERS) -> list[str]:
    """Cut text into parts of at most about `size` characters; joined, they are the text again.

    A part ends behind a blank line where there is one, else behind a line, else at a space, else anywhere.
    """
    parts = []
    while len(text) > size:
        for boundary in (r"\n\s*\n", r"\n", r"\s"):
            ends = [match.end() for match in re.finditer(boundary, text[:size])]
            if ends and ends[-1] > size // 4:  # a boundary near the start would make a tiny part
                break
        else:
            ends = [size]
        parts.append(text[: ends[-1]])
        text = text[ends[-1] :]
    return [*parts, text] if text else parts


def _document(name: str, text: str) -> Module:
    parts = cut_at_paragraphs(f"\n\nDocument: {name}\n{text.strip()}\n")
    names = [name, *(f"part{number}" for number in range(2, len(parts) + 1))]
    return nested(parts, names)


def nested(parts: Sequence[str], names: Sequence[str], prefix: str = "") -> Module:
    """Modules one inside the other, each with one part; `prefix` is the path that they stand in, ending with `/`."""
    path = prefix + names[0]
    inner = (nested(parts[1:], names[1:], f"{path}/"),) if len(parts) > 1 else ()
    return Module(names[0], path, (Text(parts[0], _NOWHERE), *inner), True, _NOWHERE)


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise OptionError(f"{file} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except OSError as exc:
        raise OptionError(f"{file} cannot be read: {exc.strerror or exc}") from exc
    if not text.strip():
        raise OptionError(f"{file} is empty")
    return text
