"""Reads questions about documents: LongBench's JSONL, and lines with `input`, `docs`, `answers`; plain or gzipped."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edge_pc.errors import OptionError

# LongBench joins its documents into one text; these marks, each at the start of a line, say where one begins.
_MARK = re.compile(r"^(Passage|Paragraph) \d+:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """A document; `title` is empty where it has none."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """A question about documents.

    Attributes:
        key: unique in its file.
        dataset: name of the data set, which decides how answers are scored.
        question: may be empty where the task is the same for all items.
        documents: at least one.
        answers: right answers, at least one.
        gold: index of the document with the answer, where the data say it.
    """

    key: str
    dataset: str
    question: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...]
    gold: int | None = None


def read_items(path: Path) -> list[Item]:
    """All items of a file.

    Raises:
        OptionError: the file cannot be read or is empty; a line is malformed (the message names it).
    """
    items: dict[str, Item] = {}
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    item = _item(line, f"{path}:{number}", path, number)
                    if item.key in items:
                        raise OptionError(f"{path}:{number}: a second item has the id {item.key!r}")
                    items[item.key] = item
    except UnicodeDecodeError as exc:
        raise OptionError(f"{path} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc
    except EOFError as exc:
        raise OptionError(f"{path} is cut off: {exc}", hint="get the file again") from exc
    except OSError as exc:  # gzip's own complaint is one, too
        raise OptionError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if not items:
        raise OptionError(f"{path} holds no items")
    return list(items.values())


def dataset_name(path: Path) -> str:
    """The file's name without its endings."""
    return path.name.split(".jsonl")[0]


def split_context(context: str) -> tuple[Document, ...]:
    """Cut LongBench's joined text at its marks (`Passage 3:`), which become titles; without any it is one document."""
    starts = [match.start() for match in _MARK.finditer(context)]
    parts = [context[begin:end] for begin, end in zip([0, *starts], [*starts, None], strict=True)]
    documents = []
    for part in filter(str.strip, parts):
        mark = _MARK.match(part)
        title = mark[0][:-1] if mark else ""
        documents.append(Document(title, part[mark.end() if mark else 0 :].strip()))
    return tuple(documents)


def _open(path: Path) -> IO[str]:
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if zipped else open(path, encoding="utf-8")


def _item(line: str, place: str, path: Path, number: int) -> Item:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise OptionError(f"{place}: not JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise OptionError(f"{place}: expected an object, found {type(row).__name__}")
    fields = _Fields(row, place)
    given = tuple(fields.documents()) if "docs" in row else split_context(fields.text("context"))
    documents = tuple(document for document in given if document.text)
    if not documents:
        raise OptionError(f"{place}: there is no document with text")
    key = row.get("id", row.get("_id", number))
    name = fields.text("dataset") if "dataset" in row else dataset_name(path)
    gold = row.get("gold_doc")
    known = isinstance(gold, int) and 0 <= gold < len(given) == len(documents)
    return Item(str(key), name, fields.text("input"), documents, fields.answers(), gold if known else None)


class _Fields:
    """The fields of one line; a fault names the line and the field."""

    def __init__(self, row: dict[str, Any], place: str) -> None:
        self._row = row
        self._place = place

    def text(self, name: str) -> str:
        if name not in self._row:
            hint = "a line has input, answers, and docs (or LongBench's context)"
            raise OptionError(f"{self._place}: the field {name!r} is missing", hint=hint)
        return self._string(self._row[name], name)

    def answers(self) -> tuple[str, ...]:
        found = self._list("answers")
        if not found:
            raise OptionError(f"{self._place}: 'answers' is empty")
        return tuple(self._string(answer, "answers") for answer in found)

    def documents(self) -> Iterator[Document]:
        for document in self._list("docs"):
            if not isinstance(document, dict) or "text" not in document:
                raise OptionError(f"{self._place}: each of 'docs' is an object with 'text' and 'title'")
            yield Document(
                self._string(document.get("title", ""), "title").strip(),
                self._string(document["text"], "text").strip(),
            )

    def _list(self, name: str) -> Sequence[Any]:
        value = self._row.get(name)
        if not isinstance(value, list):
            raise OptionError(f"{self._place}: {name!r} is not a list")
        return value

    def _string(self, value: object, name: str) -> str:
        if not isinstance(value, str):
            raise OptionError(f"{self._place}: {name!r} holds {type(value).__name__}, expected text")
        return value
