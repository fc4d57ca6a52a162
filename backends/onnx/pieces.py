"""Pieces of stored states: which cells are placed from which slot of the arena on."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_pc.backends.base import KVStates, Span


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Cells `[start, stop)` of stored states, moved by `shift` positions, placed from `slot` on."""

    states: KVStates
    start: int
    stop: int
    slot: int
    shift: int = 0
    mapped: bool = False

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The slot after its last cell."""
        return self.slot + self.tokens

    def before(self, slot: int) -> Piece:
        """What of it lies before `slot`."""
        return replace(self, stop=self.start + min(max(slot - self.slot, 0), self.tokens))

    def same_as(self, other: Piece) -> bool:
        """Whether `other` puts the same cells in the same place: the same states object, so the same opened file."""
        mine = (self.start, self.stop, self.slot, self.shift)
        return self.states is other.states and mine == (other.start, other.stop, other.slot, other.shift)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A piece that lies in the arena, in which parts it was copied and mapped, and whether cells were changed since."""

    piece: Piece
    parts: Sequence[Piece]
    changed: bool = False

    @property
    def in_order(self) -> bool:
        """Whether its cells lie in the order of their positions."""
        return all(mine.stop == following.start for mine, following in zip(self.parts, self.parts[1:], strict=False))

    def serves(self, wanted: Piece, exact: bool) -> bool:
        """Whether the piece can stay for `wanted`: however it came there, unless the order of its cells matters."""
        return not self.changed and self.piece.same_as(wanted) and (not exact or self.in_order)

    def before(self, slot: int) -> Placed:
        """What of it lies before `slot`. Cells out of order that are cut are those of no piece any more."""
        if slot >= self.piece.end:
            return self
        parts = [part for part in (part.before(slot) for part in self.parts) if part.tokens]
        return replace(self, piece=self.piece.before(slot if self.in_order else self.piece.slot), parts=parts)


def in_position_order(spans: Sequence[Span], *, first_slot: int) -> list[Piece]:
    """The spans, one after the other by position from `first_slot` on, cut where another's cells lie between theirs."""
    if not spans:
        return []
    owner = np.repeat(np.arange(len(spans)), [span.tokens for span in spans])
    cell = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    order = np.argsort(np.concatenate([span.position_ids for span in spans]), kind="stable")
    owner, cell = owner[order], cell[order]
    starts = np.flatnonzero(np.diff(owner, prepend=-1) | (np.diff(cell, prepend=-1) - 1))
    stops = np.append(starts[1:], len(cell))
    return [
        Piece(spans[owner[a]].states, int(cell[a]), int(cell[b - 1]) + 1, first_slot + int(a), spans[owner[a]].shift)
        for a, b in zip(starts, stops, strict=True)
    ]


def common_prefix(placed: Sequence[Placed], wanted: Sequence[Piece], exact: bool) -> int:
    """How many pieces from the first on can stay."""
    count = 0
    for mine, theirs in zip(placed, wanted, strict=False):
        if not mine.serves(theirs, exact):
            break
        count += 1
    return count


def any_mapped(placed: Iterable[Placed]) -> bool:
    return any(part.mapped for each in placed for part in each.parts)


def mappable(states: KVStates) -> bool:
    """Whether the states lie in a file, in the arena's own dtype, from a page's start on."""
    return states.path is not None and states.array.dtype == np.float32 and states.offset % mmap.PAGESIZE == 0
