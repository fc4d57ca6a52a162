"""What is noted of libllama's cache: libllama tells neither which places are free nor where a sequence's cells lie.

Places matter for the last bits of a result. Attention adds up 16 places at a time, in up to four sums that take turns,
so the order of all sums is kept exactly when whole *blocks* of 64 places are: a prompt's cells lie as in full prefill
of an empty cache, but that blocks which hold nothing of it may be in between; they add nothing. (Measured with AVX-512:
prompts kept together in blocks of 16 answer with other bits; so do those with a block divided between two.)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray

BLOCK = 64

_END = np.iinfo(np.int32).max


class Books:
    """Which cells each sequence has, in which places, and to whom blocks belong.

    Args:
        sequences: sequences there may be, plugs aside.
        size: places.

    Attributes:
        users: int16 `[size]`: how many sequences have the cell in a place.
        plugged: bool `[size]`: free places that are kept from new cells by a plug.
        reserved: int16 `[size / BLOCK]`: the sequence that a block's free places belong to, 0 for none.
    """

    def __init__(self, sequences: int, size: int) -> None:
        self.size = size
        self._labels = np.full(size, -1, dtype=np.int32)
        self._members = np.zeros((sequences, size), dtype=np.bool_)
        self.users = np.zeros(size, dtype=np.int16)
        self.plugged = np.zeros(size, dtype=np.bool_)
        self.reserved = np.zeros(size // BLOCK, dtype=np.int16)

    def used(self, sequences: Iterable[int]) -> int:
        """Cells that any of these sequences has."""
        return int(np.count_nonzero(self._members[list(sequences)].any(axis=0)))

    def labels(self, sequence: int) -> IntArray:
        """Labels of a sequence's cells, in the order of their places."""
        labels: IntArray = self._labels[self._members[sequence]]
        return labels

    def labels_in(self, places: IntArray) -> IntArray:
        """Labels of the cells in `places`."""
        labels: IntArray = self._labels[places]
        return labels

    def last(self, sequence: int) -> int:
        """The largest position label in a sequence, -1 when it is empty."""
        return int(self.labels(sequence).max(initial=-1))

    def places(self, sequence: int, start: int = 0, stop: int = _END) -> IntArray:
        """Places of a sequence's cells labelled `[start, stop)`, by ascending label."""
        found = np.flatnonzero(self._within(sequence, start, stop))
        return found[np.argsort(self._labels[found], kind="stable")].astype(np.int32)

    def last_place(self, sequence: int) -> int:
        """The highest place of a sequence, -1 when it is empty."""
        return int(np.flatnonzero(self._members[sequence]).max(initial=-1))

    def tail(self, sequence: int) -> IntArray:
        """Places of a sequence's cells in the last block that it has cells in, ascending."""
        places: IntArray = np.flatnonzero(self._members[sequence]).astype(np.int32)
        tail: IntArray = places[places // BLOCK == places[-1] // BLOCK]
        return tail

    def follow(self, sequence: int, places: IntArray) -> bool:
        """Whether cells in `places` lie after a sequence's as in full prefill."""
        before, after = np.concatenate([[self.last_place(sequence)], places[:-1]])[: len(places)], places
        next_block = (after > before) & (before % BLOCK == BLOCK - 1) & (after % BLOCK == 0)
        return bool(np.all((after - before == 1) | next_block))

    def goes_on(self, sequence: int) -> bool:
        """Whether the places after a sequence's last one, to the end of their block, are free for it."""
        last = self.last_place(sequence)
        rest = self.users[last + 1 : up_to_block(last + 1)]
        return not len(rest) or (self.reserved[last // BLOCK] in (0, sequence) and not rest.any())

    def free_blocks(self, after: int) -> IntArray:
        """Blocks beyond the place `after` of which nobody has anything, ascending."""
        free = ~self.users.reshape(-1, BLOCK).any(axis=1) & (self.reserved == 0)
        free[: up_to_block(after + 1) // BLOCK] = False
        return np.flatnonzero(free).astype(np.int32)

    def groups(self) -> list[tuple[IntArray, list[int]]]:
        """All cells, as neighbouring places that the same sequences have, ascending: places, sequences."""
        places = np.flatnonzero(self.users).astype(np.int32)
        same = np.all(self._members[:, places[1:]] == self._members[:, places[:-1]], axis=0)
        groups = np.split(places, np.flatnonzero((np.diff(places) != 1) | ~same) + 1)
        return [(group, np.flatnonzero(self._members[:, group[0]]).tolist()) for group in groups if len(group)]

    def add(self, places: IntArray, labels: IntArray, sequences: IntArray) -> None:
        """New cells in free places, each of one sequence."""
        self._labels[places] = labels
        self._members[sequences, places] = True
        self.users[places] = 1

    def join(self, source: int, target: int, start: int, stop: int) -> None:
        """Cells of `source` labelled `[start, stop)` are also `target`'s."""
        added = self._within(source, start, stop) & ~self._members[target]
        self._members[target] |= added
        self.users += added

    def remove(self, sequence: int, start: int, stop: int) -> None:
        """Cells of a sequence labelled `[start, stop)` are its no longer."""
        removed = self._within(sequence, start, stop)
        self._members[sequence] &= ~removed
        self.users -= removed
        self._labels[removed & (self.users == 0)] = -1

    def leave_blocks(self, sequence: int) -> None:
        """Blocks that a sequence has no cell in are not reserved for it any more."""
        empty = ~self._members[sequence].reshape(-1, BLOCK).any(axis=1)
        self.reserved[(self.reserved == sequence) & empty] = 0

    def end(self) -> int:
        """The place after the last cell."""
        return int(np.flatnonzero(self.users).max(initial=-1)) + 1

    def agree(self) -> bool:
        """Whether what is noted twice is the same, and no plug is where a cell is."""
        users_right = np.array_equal(self.users, self._members.sum(axis=0))
        return users_right and not np.any(self.plugged & (self.users > 0))

    def _within(self, sequence: int, start: int, stop: int) -> NDArray[np.bool_]:
        within: NDArray[np.bool_] = self._members[sequence] & (self._labels >= start) & (self._labels < stop)
        return within


def up_to_block(places: int) -> int:
    """`places`, rounded up to whole blocks."""
    return -(-places // BLOCK) * BLOCK


def runs(numbers: IntArray) -> list[tuple[int, int]]:
    """The first and last of each run of consecutive numbers, of numbers that ascend."""
    pieces = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [(int(piece[0]), int(piece[-1])) for piece in pieces if len(piece)]
