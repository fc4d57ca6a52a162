"""Stored states at the positions that a prompt wants them at."""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.backends.base import IntArray, KVStates, Span
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes


@dataclass(frozen=True, slots=True)
class MovedStates:
    """States, moved by `shift` positions. Equal ones have the same cells: of one states object, at the same places."""

    states: KVStates
    shift: int

    @classmethod
    def of(cls, span: Span) -> MovedStates:
        return cls(span.states, span.shift)

    @property
    def tokens(self) -> int:
        return len(self.states.position_ids)

    @property
    def position_ids(self) -> IntArray:
        positions: IntArray = self.states.position_ids + self.shift
        return positions

    def blob(self, blobs: BlobFormat) -> Bytes:
        """The blob of all cells at these positions.

        Raises:
            StatesError: the states are not of the expected format, or cells of this model cannot be moved.
        """
        blob = blobs.check(self.states.array, self.states.position_ids)
        return blobs.moved(blob, self.states.position_ids, self.shift) if self.shift else blob
