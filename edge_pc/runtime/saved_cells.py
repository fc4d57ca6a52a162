"""The cells of a conversation in the store: in stretches, each of them an entry, so that a later save adds new ones.

The key of a stretch is a hash of the model, the layout, the stretch before it, its tokens and positions, and the bytes
of its cells: these depend on how the first question's cells were chosen, which tokens do not tell.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from edge_pc.backends.base import Backend, Span
from edge_pc.runtime.live_cells import LiveCells, Tokens
from edge_pc.store import Miss, StateStore, array_checksum
from edge_pc.system.home import SESSIONS

log = logging.getLogger("edge_pc")

# Cells of a stretch, at most. After `undo` a stretch that is cut is written anew; many small ones take longer to map.
STRETCH_TOKENS = 1024

_KEY_FORMAT = "session 1"


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A stored stretch: its key, and the tokens whose cells it holds."""

    key: str
    tokens: Tokens


class Stretches:
    """Stores and finds stretches.

    Args:
        backend: whose cells they are.
        store: keeps them.
        model: the model's name, for people.
    """

    def __init__(self, backend: Backend[Any], store: StateStore, model: str) -> None:
        self._backend = backend
        self._store = store
        self._model = model

    def save(self, name: str, cells: LiveCells, known: Iterable[Stretch]) -> list[Stretch]:
        """Store all cells, but those of stretches that are stored already; returns all stretches, in order.

        Args:
            name: of the conversation, for people.
            cells: of it.
            known: stretches of the same cells, from the first on.

        Raises:
            StoreError: that cannot be done.
            StatesError: the cells have been lost.
        """
        stretches, start = [], 0
        for stretch in known:
            if isinstance(self._found(stretch), Miss):
                break
            stretches.append(stretch)
            start += len(stretch.tokens)
        while start < len(cells.there):
            stop = min(start + STRETCH_TOKENS, len(cells.there))
            stretches.append(self._put(name, cells, start, stop, stretches[-1].key if stretches else ""))
            start = stop
        return stretches

    def spans(self, stretches: Iterable[Stretch]) -> list[Span]:
        """The stored states of stretches; those that cannot be used cost a warning."""
        return list(self._spans(stretches))

    def _spans(self, stretches: Iterable[Stretch]) -> Iterator[Span]:
        for stretch in stretches:
            found = self._found(stretch)
            if isinstance(found, Miss):
                log.warning("a saved part of the conversation is computed again: %s", found.reason)
            else:
                yield found

    def _found(self, stretch: Stretch) -> Span | Miss:
        tokens = stretch.tokens
        found = self._store.lookup(stretch.key, self._backend.kv_layout, tokens.token_ids, tokens.position_ids)
        if isinstance(found, Miss):
            return found
        return Span(found, 0, len(tokens), int(tokens.position_ids[0] - found.position_ids[0]))

    def _put(self, name: str, cells: LiveCells, start: int, stop: int, before: str) -> Stretch:
        array, tokens = cells.read(start, stop), cells.there.first(stop).after(start)
        stretch = Stretch(self._key(before, tokens, array), tokens)
        self._store.put(
            stretch.key, self._backend.kv_layout, array, tokens.token_ids, tokens.position_ids,
            model=self._model, schema=SESSIONS, module=f"{name}/{start}",
        )  # fmt: skip
        return stretch

    def _key(self, before: str, tokens: Tokens, array: Any) -> str:
        digest = hashlib.blake2b(digest_size=20)
        spec, layout = self._backend.spec, self._backend.kv_layout
        for part in (_KEY_FORMAT, spec.fingerprint, layout.name, before, array_checksum(array)):
            digest.update(part.encode() + b"\0")
        for ids in (tokens.token_ids, tokens.position_ids):
            digest.update(ids.astype("<i4").tobytes())
        return digest.hexdigest()


def still_valid(stretches: Iterable[Stretch], tokens: Tokens) -> list[Stretch]:
    """The stretches that are those of a conversation's first tokens."""
    valid, start = [], 0
    for stretch in stretches:
        stop = start + len(stretch.tokens)
        if stretch.tokens.common(tokens.first(stop).after(start)) < len(stretch.tokens):
            break
        valid.append(stretch)
        start = stop
    return valid
