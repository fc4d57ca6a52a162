"""Reads documents: files, what is in folders, what matches patterns."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edge_pc.documents.charsets import refuse_binary
from edge_pc.documents.document_text import Document, text_of
from edge_pc.documents.finding import find_files
from edge_pc.documents.formats import MAX_FILE_BYTES, format_of
from edge_pc.documents.kept import KeptTexts
from edge_pc.errors import EdgePCError, OptionError
from edge_pc.system.identity import identity_of, is_settled
from edge_pc.system.sizes import format_size
from edge_pc.system.text import read_bytes

log = logging.getLogger("edge_pc")

Source = str | Path | Document
Sources = Source | Sequence[Source]

# Of all texts together. Parts of so much are compared with a question in seconds.
MAX_TEXT_BYTES = 32 << 20

# Files whose text is kept in memory, those read last.
_KEPT_FILES = 256
# Files of a folder that were left out, named one by one.
_NAMED = 5


class DocumentReader:
    """Reads documents; a file that did not change since is not read again. Safe to use from several threads.

    Args:
        kept: texts that were converted before; None: every file is converted.
        max_bytes: of all texts together.
    """

    def __init__(self, kept: KeptTexts | None = None, max_bytes: int = MAX_TEXT_BYTES) -> None:
        self._kept = kept
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._texts: OrderedDict[Path, tuple[str, str]] = OrderedDict()
        self._said: dict[str, str] = {}  # of each folder or pattern: the last warning, given once

    def read(self, sources: Sources) -> list[Document]:
        """The documents that `sources` mean, in their order, each file once.

        A file of a folder or of a pattern that has no text is left out, with a warning.

        Args:
            sources: a file, a folder, a pattern (`notes/*.md`), a document, or several of these.

        Raises:
            OptionError: there is no file, or one is too large, empty, no plain file, no text, or a URL.
            MissingDependencyError: what reads a file's format is not installed.
        """
        documents: dict[str, Document] = {}
        room = self._max_bytes
        for document in self._each([sources] if isinstance(sources, Source) else sources):
            room -= len(document.text.encode())
            if room < 0:
                size = format_size(self._max_bytes)
                raise OptionError(f"the texts have more than {size} together", hint="leave some of the files out")
            name, count = document.name, 1
            while name in documents:
                count += 1
                name = f"{document.name}-{count}"
            documents[name] = replace(document, name=name)
        if not documents:
            raise OptionError("no file is given", hint="name at least one file to ask about")
        return list(documents.values())

    def _each(self, sources: Sequence[Source]) -> Iterator[Document]:
        seen: set[Path] = set()
        for source in sources:
            if isinstance(source, Document):
                yield source
                continue
            files, is_named = find_files(source)
            new = [file for file in files if file.absolute() not in seen]
            seen.update(file.absolute() for file in new)
            yield from map(self._document, new) if is_named else self._readable(new, source)

    def _readable(self, files: Sequence[Path], source: str | Path) -> Iterator[Document]:
        """Those of the files that have text; a warning tells of the others."""
        left_out: list[str] = []
        some = False
        for file in files:
            try:
                yield self._document(file)
                some = True
            except EdgePCError as exc:  # noqa: PERF203
                left_out.append(exc.message)
        if not left_out:
            return
        shown = "".join(f"\n  {message}" for message in left_out[:_NAMED])
        more = f"\n  and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
        if not some:
            raise OptionError(f"{source}: no file has text:{shown}{more}")
        message = f"{source}: left out:{shown}{more}"
        if message != self._said.get(str(source)):
            self._said[str(source)] = message
            log.warning("%s", message)

    def _document(self, path: Path) -> Document:
        text = self._text(path)
        # A file's name is bytes; the model is given text.
        title = path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return Document(title, title, text)

    def _text(self, path: Path) -> str:
        with suppress(OSError, ValueError):  # reading says what is wrong
            status = path.stat()
            identity = identity_of(status)
            with self._lock:
                known = self._texts.get(path.absolute())
            if known is not None and known[0] == identity:
                return known[1]
            text = self._read(path)
            if is_settled(status) and identity_of(path.stat()) == identity:
                with self._lock:
                    self._texts[path.absolute()] = (identity, text)
                    self._texts.move_to_end(path.absolute())
                    if len(self._texts) > _KEPT_FILES:
                        self._texts.popitem(last=False)
            return text
        return self._read(path)

    def _read(self, path: Path) -> str:
        def limit(head: bytes) -> int:
            if format_of(head, path) is not None:
                return MAX_FILE_BYTES
            refuse_binary(head, path)
            return self._max_bytes

        return text_of(read_bytes(path, limit), path, self._kept)
