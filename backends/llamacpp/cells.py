"""The cells of libllama's cache: every change of it goes through here and is noted in the books.

libllama gives new cells the lowest free places (`selfcheck.py` sees to it when a model is opened). They are steered to
others by *plugs*: cells that nobody attends to, in free places where nothing is to go yet.

A prompt's new cells go where its last block goes on if that is free; else its part of that block is copied to a fresh
one first. Then come whole free blocks, higher ones than it has. The free places of a block that a prompt has begun
belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes
from edge_pc.backends.llamacpp.books import BLOCK, Books, runs, up_to_block
from edge_pc.backends.llamacpp.native import SEQUENCES, NativeContext
from edge_pc.errors import ContextLengthError, ModelError, StatesError

# Sequences with a fixed part: cells in transit, plugs.
TRANSIT, PLUGS = 0, 1
FIRST_SEQUENCE = 2

# A larger cache is made at least by this factor larger, because all cells move into it.
_GROWTH = 1.5

# Plugs written at a time; their keys and values are zeros that must be allocated.
_PLUGS_AT_ONCE = 512

_END = np.iinfo(np.int32).max


class Cells:
    """The cache's cells, and the calls that change them.

    Args:
        open_context: makes an empty cache of the given number of cells.
        blobs: the format of its states.
        size: cells to begin with; there will be more when they are needed.

    Attributes:
        books: where which cells are.
    """

    def __init__(self, open_context: Callable[[int], NativeContext], blobs: BlobFormat, size: int) -> None:
        self._open_context = open_context
        self._blobs = blobs
        self._native = open_context(up_to_block(size))
        self.books = Books(SEQUENCES, self._native.cells)

    def room(self, after: int) -> int:
        """Cells of whole free blocks beyond the place `after`."""
        return len(self.books.free_blocks(after)) * BLOCK

    def make_room(self, count: int, after: int) -> None:
        """See to it that `count` cells find whole free blocks beyond the place `after`; a larger cache has them.

        Raises:
            ContextLengthError: there is not enough memory; all is as it was.
        """
        missing = up_to_block(count) - self.room(after)
        if missing > 0:
            self._grow(missing)

    def extend(self, sequence: int, count: int) -> IntArray:
        """The places of a sequence's next `count` cells, ascending; they belong to the sequence from now on.

        Raises:
            ContextLengthError: there is not enough memory for a larger cache.
        """
        if not self.books.goes_on(sequence):
            self._move_tail(sequence)
        last = self.books.last_place(sequence)
        rest = np.arange(last + 1, up_to_block(last + 1))
        needed = max(count - len(rest), 0)
        self.make_room(needed, last)
        blocks = self.books.free_blocks(last)[: up_to_block(needed) // BLOCK]
        self.books.reserved[np.concatenate([rest[:1] // BLOCK, blocks])] = sequence
        fresh = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return np.concatenate([rest, fresh])[:count].astype(np.int32)

    def load(self, sequence: int, blob: Bytes, labels: IntArray, places: IntArray) -> None:
        """Fill an empty sequence with a blob's cells, in `places`, ascending.

        Raises:
            StatesError: libllama refused the blob.
        """
        self._open(places)
        self._native.write(sequence, blob)
        self.books.add(places, labels, np.full(len(labels), sequence))

    def add(self, sequence: int, blob: Bytes, labels: IntArray) -> None:
        """Add a blob's cells to a sequence, after those it has.

        Raises:
            StatesError: libllama refused the blob.
            ContextLengthError: there is not enough memory for a larger cache.
        """
        self._add_at(sequence, blob, labels, self.extend(sequence, len(labels)))

    def compute(
        self,
        token_ids: IntArray,
        position_ids: IntArray,
        sequences: IntArray,
        places: IntArray,
        outputs: Sequence[int],
    ) -> None:
        """Compute tokens, each in its sequence and its place, places ascending; see `NativeContext.decode`."""
        self._open(places)
        self._native.decode(token_ids, position_ids, sequences, outputs)
        self.books.add(places, position_ids, sequences)

    def logits(self, row: int) -> Logits:
        """Logits of an output row of the last `compute`, float32 `[vocab]`."""
        return self._native.logits(row)

    def join(self, source: int, target: int, start: int = 0, stop: int = _END) -> None:
        """Let `target` share the cells of `source` labelled `[start, stop)`; nothing is copied."""
        self._native.join(source, target, start, stop)
        self.books.join(source, target, start, stop)

    def drop(self, sequence: int, start: int = 0, stop: int = _END) -> None:
        """Take the cells labelled `[start, stop)` from a sequence; places that no other has become free."""
        self._remove(sequence, start, stop)
        self.books.leave_blocks(sequence)
        end = self.books.end()
        if self.books.plugged[end:].any():  # nothing is beyond them any more
            self._native.drop(PLUGS, end, _END)
            self.books.plugged[end:] = False

    def relabel(self, sequence: int, label: int, new: int) -> None:
        """Give one cell of a sequence another position label; only this sequence sees the change.

        libllama has no call for it. The cell leaves and comes back as a copy, its key rotated as before.
        """
        if self.books.users[self.books.places(sequence, label, label + 1)] > 1 and self._is_last(sequence, label):
            self._move_tail(sequence)
        places = targets = self.books.places(sequence, label, label + 1)
        if self.books.users[places] > 1:  # not in order anyway
            targets = self.extend(sequence, 1)
        self._replace(sequence, places, targets, np.array([new], dtype=np.int32))

    def read(self, sequence: int, labels: IntArray) -> Bytes:
        """The blob of a sequence's cells of these labels, in the order of their places."""
        try:
            for first, last in runs(np.sort(labels)):
                self.join(sequence, TRANSIT, first, last + 1)
            return self._native.read(TRANSIT)
        finally:
            self._remove(TRANSIT)

    def read_all(self, sequence: int) -> tuple[Bytes, IntArray]:
        """The blob of all of a sequence's cells, in the order of their places, and their labels."""
        return self._native.read(sequence), self.books.labels(sequence)

    def clear(self) -> None:
        """Take all cells from all sequences, whatever state they are in."""
        self._native.clear()
        self.books = Books(SEQUENCES, self._native.cells)

    def check(self) -> None:
        """Compare the books with libllama: each sequence's cells, in the order of their places. Reads all cells.

        Raises:
            StatesError: they differ.
        """
        if not self.books.agree():
            raise StatesError("the books of the cache contradict themselves")
        for sequence in range(SEQUENCES):
            kept = np.flatnonzero(self.books.plugged) if sequence == PLUGS else self.books.labels(sequence)
            if self._native.last(sequence) != kept.max(initial=-1):
                raise StatesError(f"sequence {sequence} does not end where the books say")
            if len(kept) and not np.array_equal(self._blobs.positions(self._native.read(sequence)), kept):
                raise StatesError(f"sequence {sequence} has other cells, or in other places, than the books say")

    def close(self) -> None:
        """Free the cache."""
        self._native.close()

    def _is_last(self, sequence: int, label: int) -> bool:
        return bool(self.books.places(sequence, label, label + 1) == self.books.last_place(sequence))

    def _move_tail(self, sequence: int) -> None:
        """Replace a sequence's part of its last block by copies in a fresh one."""
        last = self.books.last_place(sequence)
        self.make_room(BLOCK, last)
        block = self.books.free_blocks(last)[0]
        self.books.reserved[block] = sequence
        places = self.books.tail(sequence)
        self._replace(sequence, places, block * BLOCK + places % BLOCK, self.books.labels_in(places))

    def _replace(self, sequence: int, places: IntArray, targets: IntArray, labels: IntArray) -> None:
        """Replace cells of a sequence by its own copies at `targets` with `labels`; others keep theirs."""
        old = self.books.labels_in(places)
        blob = self.read(sequence, old)
        for first, last in runs(np.sort(old)):
            self._remove(sequence, first, last + 1)
        self._blobs.frame(blob, labels)
        self._add_at(sequence, blob, labels, targets)

    def _add_at(self, sequence: int, blob: Bytes, labels: IntArray, places: IntArray) -> None:
        self.load(TRANSIT, blob, labels, places)
        self.join(TRANSIT, sequence)
        self._remove(TRANSIT)

    def _remove(self, sequence: int, start: int = 0, stop: int = _END) -> None:
        self._native.drop(sequence, start, stop)
        self.books.remove(sequence, start, stop)

    def _open(self, places: IntArray) -> None:
        """Let `places` be the lowest free ones."""
        books, end = self.books, int(places[-1]) + 1
        free = (books.users[:end] == 0) & ~books.plugged[:end]
        others = free.copy()
        others[places] = False
        if others.any():  # plugs take the lowest free places, too: some of `places`, maybe, which they leave below
            self._plug(np.flatnonzero(free[: int(np.flatnonzero(others)[-1]) + 1]).astype(np.int32))
        for first, last in runs(places[books.plugged[places]]):
            self._native.drop(PLUGS, first, last + 1)
        books.plugged[places] = False

    def _plug(self, places: IntArray) -> None:
        for start in range(0, len(places), _PLUGS_AT_ONCE):
            piece = places[start : start + _PLUGS_AT_ONCE]
            self._native.write(TRANSIT, self._blobs.build(piece))
            self._native.join(TRANSIT, PLUGS, 0, _END)
            self._native.drop(TRANSIT)
            self.books.plugged[piece] = True

    def _grow(self, missing: int) -> None:
        size = up_to_block(max(self.books.size + missing, int(_GROWTH * self.books.size)))
        try:
            larger = self._open_context(size)
        except ModelError as exc:
            raise ContextLengthError(
                f"the prompts that are open need a cache of {size} cells: {exc.message}",
                hint="close other prompts first",
            ) from exc
        self._move_to(larger)

    def _move_to(self, native: NativeContext) -> None:
        """Go on in a larger cache, which is empty: every cell keeps its place, its label and its sequences."""
        for sequence in range(FIRST_SEQUENCE, SEQUENCES):
            self._native.join(sequence, TRANSIT, 0, _END)
        everything = self._native.read(TRANSIT)
        self._native.close()
        old, self._native, self.books = self.books, native, Books(SEQUENCES, native.cells)
        self.books.reserved[: len(old.reserved)] = old.reserved
        read = 0
        for places, sequences in old.groups():
            labels, cells = old.labels_in(places), np.arange(read, read + len(places), dtype=np.int32)
            self.load(TRANSIT, self._blobs.take(everything, cells, labels), labels, places)
            for sequence in sequences:
                self.join(TRANSIT, sequence)
            self._remove(TRANSIT)
            read += len(places)
