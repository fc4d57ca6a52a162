"""Which cells of libllama's cache each sequence has: every change of the cache goes through here.

libllama tells neither which cells are free nor where a sequence's cells lie, so this keeps the same books. New cells
take the lowest free places, in order (`selfcheck.py` sees to it when a model is opened).

Places matter for the last bits of a result. Attention sums over up to 16 places at a time (AVX-512), so two prompts
add up alike when their cells are in the same order and each lies in the same *lane* (its place modulo 16); places
between them that belong to others add nothing. A cell's lane is right when it equals its index in the prompt modulo 16:
so it is in full prefill of an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes
from edge_pc.backends.llamacpp.native import SEQUENCES, Session
from edge_pc.errors import ContextLengthError

LANES = 16

# Sequences with a fixed part: cells in transit, cells that only hold a place, places to be left free.
TRANSIT, PLUGS, HOLES = 0, 1, 2
FIRST_SEQUENCE = 3

_END = np.iinfo(np.int32).max


class Cells:
    """The cache's cells, and the calls that change them.

    Args:
        session: the context whose cells they are; empty.
        blobs: its states' format.
    """

    def __init__(self, session: Session, blobs: BlobFormat) -> None:
        self._blobs = blobs
        self._start(session)

    def _start(self, session: Session) -> None:
        self._session = session
        self._labels = np.full(session.cells, -1, dtype=np.int32)
        self._members = np.zeros((SEQUENCES, session.cells), dtype=np.bool_)
        self._owners = np.zeros(session.cells, dtype=np.int16)

    @property
    def size(self) -> int:
        """All cells there are."""
        return self._session.cells

    @property
    def free(self) -> int:
        """Cells that no sequence has."""
        return int(np.count_nonzero(self._owners == 0))

    def labels(self, sequence: int) -> IntArray:
        """Labels of a sequence's cells, in the order of their places."""
        labels: IntArray = self._labels[self._members[sequence]]
        return labels

    def places(self, sequence: int, start: int = 0, stop: int = _END) -> IntArray:
        """Places of a sequence's cells labelled `[start, stop)`, by ascending label."""
        found = np.flatnonzero(self._within(sequence, start, stop))
        return found[np.argsort(self._labels[found], kind="stable")].astype(np.int32)

    def last(self, sequence: int) -> int:
        """The largest position label in a sequence, -1 when it is empty."""
        return int(self.labels(sequence).max(initial=-1))

    def load(self, sequence: int, blob: Bytes, labels: IntArray) -> None:
        """Fill an empty sequence with a blob's cells.

        Raises:
            ContextLengthError: there are not enough free cells.
            StatesError: libllama refused the blob.
        """
        places = self._lowest_free(len(labels))
        self._session.write(sequence, blob)
        self._take(places, labels, np.full(len(labels), sequence))

    def compute(self, token_ids: IntArray, position_ids: IntArray, sequences: IntArray, outputs: Sequence[int]) -> None:
        """Compute tokens, each in its sequence; see `Session.decode`.

        Raises:
            ContextLengthError: there are not enough free cells.
        """
        places = self._lowest_free(len(token_ids))
        self._session.decode(token_ids, position_ids, sequences, outputs)
        self._take(places, position_ids, sequences)

    def join(self, source: int, target: int, start: int = 0, stop: int = _END) -> None:
        """Let `target` share the cells of `source` labelled `[start, stop)`; nothing is copied."""
        self._session.join(source, target, start, stop)
        added = self._within(source, start, stop) & ~self._members[target]
        self._members[target] |= added
        self._owners += added

    def drop(self, sequence: int, start: int = 0, stop: int = _END) -> None:
        """Take the cells labelled `[start, stop)` from a sequence; those that no other has become free."""
        dropped = self._within(sequence, start, stop)
        if not dropped.any():
            return
        self._session.drop(sequence, start, stop)
        self._members[sequence] &= ~dropped
        self._owners -= dropped
        self._labels[dropped & (self._owners == 0)] = -1

    def relabel(self, sequence: int, label: int, new: int) -> None:
        """Give one cell of a sequence another position label; only this sequence sees the change.

        libllama has no call for it. The cell leaves and comes back as a copy, its key rotated as before.
        """
        self.join(sequence, TRANSIT, label, label + 1)
        blob = self._session.read(TRANSIT)
        self.drop(TRANSIT)
        self.drop(sequence, label, label + 1)
        labels = np.array([new], dtype=np.int32)
        self._blobs.frame(blob, labels)
        self.load(TRANSIT, blob, labels)
        self.join(TRANSIT, sequence)
        self.drop(TRANSIT)

    def read(self, sequence: int) -> Bytes:
        """The blob of a sequence, in the order of places."""
        return self._session.read(sequence)

    def logits(self, row: int) -> Logits:
        """Logits of an output row of the last `compute`, float32 `[vocab]`."""
        return self._session.logits(row)

    def close(self) -> None:
        """Free the cache."""
        self._session.close()

    def in_lanes(self, places: IntArray) -> bool:
        """Whether cells of a prompt, in position order, lie as full prefill would put them."""
        return bool(np.all(np.diff(places) > 0) and np.all(places % LANES == np.arange(len(places)) % LANES))

    def align(self, index: int, after: int, count: int, limit: int) -> IntArray:
        """Plug free places until the next `count` cells come to lie in lanes, behind the place `after`.

        Args:
            index: of the first of these cells in its prompt.
            limit: give up rather than plug more.

        Returns:
            The plugs, to be given to `unplug`; none where nothing had to be done or nothing helps.
        """
        free = np.flatnonzero(self._owners == 0).astype(np.int32)
        # Consecutive free places follow one another in lanes as long as they skip whole multiples of 16.
        shift = (free - np.arange(len(free))) % LANES
        for first in np.flatnonzero((free > after) & (free % LANES == index % LANES)):
            if first > limit:
                break
            if first + count <= len(free) and np.all(shift[first : first + count] == shift[first]):
                plugs = free[:first]
                self._plug(plugs)
                return plugs
        return free[:0]

    def unplug(self, plugs: IntArray) -> None:
        """Free places that `align` plugged."""
        for place in plugs.tolist():
            self.drop(PLUGS, place, place + 1)

    def move_to(self, session: Session) -> None:
        """Go on in a larger cache, which is empty: every cell keeps its place, its label and its sequences.

        The old one is closed.
        """
        for sequence in range(FIRST_SEQUENCE, SEQUENCES):
            self._session.join(sequence, TRANSIT, 0, _END)
        self._session.join(PLUGS, TRANSIT, 0, _END)
        everything = self._session.read(TRANSIT)
        self._session.close()
        labels, members, owners = self._labels, self._members, self._owners
        self._start(session)
        index = np.cumsum(owners > 0, dtype=np.int32) - 1  # of a place's cell in the blob
        end = int(np.flatnonzero(owners)[-1]) + 1 if owners.any() else 0
        changes = np.flatnonzero(np.any(members[:, 1:end] != members[:, : max(end - 1, 0)], axis=0)) + 1
        for piece in np.split(np.arange(end, dtype=np.int32), changes):
            if not len(piece):
                continue
            if owners[piece[0]]:
                self.load(TRANSIT, self._blobs.take(everything, index[piece], labels[piece]), labels[piece])
                for sequence in np.flatnonzero(members[:, piece[0]]).tolist():
                    self.join(TRANSIT, sequence)
            else:
                self.load(TRANSIT, self._blobs.build(piece), piece)
                self.join(TRANSIT, HOLES)
            self.drop(TRANSIT)
        self.drop(HOLES)

    def _within(self, sequence: int, start: int, stop: int) -> NDArray[np.bool_]:
        within: NDArray[np.bool_] = self._members[sequence] & (self._labels >= start) & (self._labels < stop)
        return within

    def _lowest_free(self, count: int) -> IntArray:
        free = np.flatnonzero(self._owners == 0)[:count].astype(np.int32)
        if len(free) < count:
            raise ContextLengthError(
                f"the cache has {len(free)} free cells of {self._session.cells}, {count} are needed",
                hint="close other prompts first",
            )
        return free

    def _take(self, places: IntArray, labels: IntArray, sequences: IntArray) -> None:
        self._labels[places] = labels
        self._members[sequences, places] = True
        self._owners[places] = 1

    def _plug(self, places: IntArray) -> None:
        if len(places):
            self.load(TRANSIT, self._blobs.build(places), places)
            self.join(TRANSIT, PLUGS)
            self.drop(TRANSIT)
