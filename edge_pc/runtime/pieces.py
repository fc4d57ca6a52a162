"""The cells of a conversation in the store: pieces, each an entry of its own, so that a later save adds only new ones.

The key of a piece is a hash of the model, the layout, the piece before it, its tokens and positions, and the bytes of
its cells: these depend on how the first question's cells were chosen, which tokens do not tell.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from edge_pc.backends.base import Backend, Span
from edge_pc.runtime.live_cells import LiveCells, Tokens
from edge_pc.store import SESSIONS, Miss, StateStore, array_checksum

log = logging.getLogger("edge_pc")

# Cells of a piece, at most. After `undo` a piece that is cut is written anew; many small ones take longer to map.
PIECE_TOKENS = 1024

_KEY_FORMAT = "session 1"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A stored piece: its key, and the tokens whose cells it holds."""

    key: str
    tokens: Tokens


class Pieces:
    """Stores and finds pieces.

    Args:
        backend: whose cells they are.
        store: keeps them.
        model: the model's name, for people.
    """

    def __init__(self, backend: Backend[Any], store: StateStore, model: str) -> None:
        self._backend = backend
        self._store = store
        self._model = model

    def save(self, name: str, cells: LiveCells, known: Iterable[Piece]) -> list[Piece]:
        """Store all cells, but those of pieces that are stored already; returns all pieces, in order.

        Args:
            name: of the conversation, for people.
            cells: of it.
            known: pieces of the same cells, from the first on.

        Raises:
            StoreError: that cannot be done.
            StatesError: the cells have been lost.
        """
        pieces, start = [], 0
        for piece in known:
            if isinstance(self._found(piece), Miss):
                break
            pieces.append(piece)
            start += len(piece.tokens)
        while start < len(cells.there):
            stop = min(start + PIECE_TOKENS, len(cells.there))
            pieces.append(self._put(name, cells, start, stop, pieces[-1].key if pieces else ""))
            start = stop
        return pieces

    def spans(self, pieces: Iterable[Piece]) -> list[Span]:
        """The stored states of pieces; those that cannot be used cost a warning."""
        return list(self._spans(pieces))

    def _spans(self, pieces: Iterable[Piece]) -> Iterator[Span]:
        for piece in pieces:
            found = self._found(piece)
            if isinstance(found, Miss):
                log.warning("a saved part of the conversation is computed again: %s", found.reason)
            else:
                yield found

    def _found(self, piece: Piece) -> Span | Miss:
        tokens = piece.tokens
        found = self._store.lookup(piece.key, self._backend.kv_layout, tokens.token_ids, tokens.position_ids)
        if isinstance(found, Miss):
            return found
        return Span(found, 0, len(tokens), int(tokens.position_ids[0] - found.position_ids[0]))

    def _put(self, name: str, cells: LiveCells, start: int, stop: int, before: str) -> Piece:
        array, tokens = cells.read(start, stop), cells.there.first(stop).after(start)
        piece = Piece(self._key(before, tokens, array), tokens)
        self._store.put(
            piece.key, self._backend.kv_layout, array, tokens.token_ids, tokens.position_ids,
            model=self._model, schema=SESSIONS, module=f"{name}/{start}",
        )  # fmt: skip
        return piece

    def _key(self, before: str, tokens: Tokens, array: Any) -> str:
        digest = hashlib.blake2b(digest_size=20)
        spec, layout = self._backend.spec, self._backend.kv_layout
        for part in (_KEY_FORMAT, spec.fingerprint, layout.name, before, array_checksum(array)):
            digest.update(part.encode() + b"\0")
        for ids in (tokens.token_ids, tokens.position_ids):
            digest.update(ids.astype("<i4").tobytes())
        return digest.hexdigest()


def still_valid(pieces: Iterable[Piece], tokens: Tokens) -> list[Piece]:
    """The pieces that are those of a conversation's first tokens."""
    valid, start = [], 0
    for piece in pieces:
        stop = start + len(piece.tokens)
        if piece.tokens.common(tokens.first(stop).after(start)) < len(piece.tokens):
            break
        valid.append(piece)
        start = stop
    return valid
