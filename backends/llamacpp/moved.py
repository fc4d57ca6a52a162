"""Stored states at the place where a prompt has them, as blobs that libllama takes.

Keys of cells that are moved are rotated in the blob. libllama has a call of its own for it (`llama_memory_seq_add`),
but that one only notes the shift: until the next run, which goes over the whole cache for it, states are read as they
were.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from edge_pc.backends.base import IntArray, KVStates, Span
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes
from edge_pc.backends.llamacpp.float16 import Float16
from edge_pc.models.rotation import rotate
from edge_pc.models.spec import ModelSpec
from edge_pc.system.cpu import allowed_cpus


@dataclass(frozen=True, slots=True)
class Moved:
    """Stored states, `shift` positions after where they were encoded. The same states object and shift: the same cells.

    By the object, not by its key: states that were found to be damaged are made again under the same key.
    """

    states: KVStates
    shift: int

    @property
    def position_ids(self) -> IntArray:
        """Where all of the states' cells are, int32; below zero for cells that no prompt can have there."""
        positions: IntArray = self.states.position_ids + np.int32(self.shift)
        return positions


def moved(span: Span) -> Moved:
    """All states of a span, moved as it is."""
    return Moved(span.states, span.shift)


class BlobReader:
    """Makes blobs of stored states.

    Args:
        blobs: the format of the states.
        spec: of the model that they are of.
        float16: converts keys.
    """

    def __init__(self, blobs: BlobFormat, spec: ModelSpec, float16: Float16) -> None:
        self._blobs = blobs
        self._spec = spec
        self._float16 = float16
        self._threads = ThreadPoolExecutor(allowed_cpus())

    def read(self, source: Moved, start: int, stop: int) -> Bytes:
        """A blob of cells `[start, stop)` at their positions; the stored bytes themselves when these are all of it.

        Raises:
            StatesError: the states are not of the expected format, or the model's cannot be moved.
        """
        states, positions = source.states, source.position_ids[start:stop]
        blob = self._blobs.check(states.array, states.position_ids)
        if len(positions) < len(states.position_ids):
            blob = self._blobs.take(blob, np.arange(start, stop, dtype=np.int32), positions)
        return self._moved(blob, positions, source.shift) if source.shift else blob

    def _moved(self, blob: Bytes, positions: IntArray, shift: int) -> Bytes:
        """A new blob of all cells of a blob, now at `positions`."""
        spec, cells = self._spec, len(positions)
        result: Bytes = np.empty(self._blobs.nbytes(cells), dtype=np.uint8)
        self._blobs.frame(result, positions)
        old, new = self._blobs.parts(blob, cells), self._blobs.parts(result, cells)
        old_keys, new_keys = self._blobs.keys(blob, cells), self._blobs.keys(result, cells)

        def move(layer: int) -> None:
            new.values[layer] = old.values[layer]
            keys = self._float16.widen(old_keys[layer]).reshape(cells, spec.kv_heads, spec.head_dim)
            self._float16.narrow(rotate(keys, spec.position, shift), new_keys[layer])

        list(self._threads.map(move, range(spec.layers)))
        return result
