"""Turns files into a schema, for questions about a person's own documents.

Each file is a module. A long one is cut at paragraphs into modules nested in one another: text before a part is then
surely present with it, so that the whole file is encoded as if in one piece, and an edit encodes again only what
follows it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_pc.errors import OptionError
from edge_pc.pml.model import NOWHERE, FreeText, Module, Node, Schema, Selection, Text, Turn
from edge_pc.system.identity import identity_of, is_settled
from edge_pc.system.text import TextFileError, read_text

SCHEMA_NAME = "documents"

# About 1,500 tokens of English: long enough that a part's pages are mapped rather than copied.
PART_CHARACTERS = 6000
# A longer file has longer parts: each sees all parts before it, so many small ones would cost more than they save.
MAX_PARTS = 32

# No text has more in a token on average, so a file with more than this for each position need not be read.
BYTES_PER_TOKEN = 256

_INSTRUCTION = "Answer the question using the documents below."


# Files whose text is kept, those read last.
_KEPT_FILES = 256


class DocumentReader:
    """Reads text files; one that did not change since is not read again. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: OrderedDict[Path, tuple[str, str]] = OrderedDict()

    def read(self, path: Path, max_bytes: int) -> str:
        """The text of a file; see `read_text`."""
        try:
            status = path.stat()
        except (OSError, ValueError):
            return read_text(path, max_bytes)  # says what is wrong
        identity = identity_of(status)
        with self._lock:
            known = self._texts.get(path.absolute())
        if known is not None and known[0] == identity and status.st_size <= max_bytes:
            return known[1]
        text = read_text(path, max_bytes)
        if is_settled(status) and identity_of(path.stat()) == identity:
            with self._lock:
                self._texts[path.absolute()] = (identity, text)
                self._texts.move_to_end(path.absolute())
                if len(self._texts) > _KEPT_FILES:
                    self._texts.popitem(last=False)
        return text


def read_documents(
    files: Sequence[Path], max_bytes: int, read: Callable[[Path, int], str] = read_text
) -> list[tuple[str, str]]:
    """(name, text) of each file, names made unique.

    Args:
        max_bytes: of all files together.
        read: reads the text of a file of at most the given number of bytes.

    Raises:
        OptionError: there is no file, or one is too large, empty, no plain file, or cannot be read as UTF-8 text.
    """
    if not files:
        raise OptionError("no file is given", hint="name at least one text file to ask about")
    documents: dict[str, str] = {}
    for file in files:
        text = read(file, max_bytes)
        if not text.strip():
            raise TextFileError(file, "the file is empty", hint="leave it out")
        # A file's name is bytes; the model is given text.
        base = file.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        name, count = base, 1
        while name in documents:
            count += 1
            name = f"{base}-{count}"
        documents[name] = text
        max_bytes -= len(text.encode())
    return list(documents.items())


def documents_schema(documents: Sequence[tuple[str, str]], *, chat: bool) -> tuple[Schema, tuple[str, ...]]:
    """A schema with a module for each document, and the paths of all modules.

    Args:
        documents: (name, text) of each.
        chat: put them into a system turn; otherwise the schema is plain text.
    """
    modules = [_document(name, text) for name, text in documents]
    children: tuple[Node, ...] = (Text(_INSTRUCTION, NOWHERE), *modules)
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


def cut_at_paragraphs(text: str, size: int = PART_CHARACTERS) -> list[str]:
    """Cut text into at most `MAX_PARTS` parts of at most about `size` characters; joined, they are the text again.

    A part ends after a blank line where there is one, else after a line, else at a space, else anywhere. Where there
    would be too many parts, `size` is doubled until there are not: an edit then seldom moves all the cuts.
    """
    while len(text) > size * MAX_PARTS:
        size *= 2
    while len(parts := _cut(text, size)) > MAX_PARTS:
        size *= 2
    return parts


def _cut(text: str, size: int) -> list[str]:
    parts = []
    start = 0
    while len(text) - start > size:
        window = text[start : start + size]
        for boundary in (r"\n\s*\n", r"\n", r"\s"):
            ends = [match.end() for match in re.finditer(boundary, window)]
            if ends and ends[-1] > size // 4:  # a boundary near the start would make a tiny part
                break
        else:
            ends = [size]
        parts.append(text[start : start + ends[-1]])
        start += ends[-1]
    return [*parts, text[start:]] if start < len(text) else parts


def _document(name: str, text: str) -> Module:
    parts = cut_at_paragraphs(f"\n\nDocument: {name}\n{text.strip()}\n")
    names = [name, *(f"part{number}" for number in range(2, len(parts) + 1))]
    return nested(parts, names)


def nested(parts: Sequence[str], names: Sequence[str], prefix: str = "") -> Module:
    """Modules one inside the other, each with one part; `prefix` is the path that they stand in, ending with `/`."""
    path = prefix + names[0]
    inner = (nested(parts[1:], names[1:], f"{path}/"),) if len(parts) > 1 else ()
    return Module(names[0], path, (Text(parts[0], NOWHERE), *inner), True, NOWHERE)
