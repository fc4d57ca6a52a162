"""Checks on known states what is taken for granted of libllama's cache, though no document promises it."""

from __future__ import annotations

import numpy as np

from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import FIRST_SEQUENCE, TRANSIT, Cells
from edge_pc.errors import ModelError, StatesError


def check_cache(cells: Cells, blobs: BlobFormat) -> None:
    """Let states go through an empty cache: they must come back as they were, from the places that the books say.

    Raises:
        ModelError: this libllama's states or its choice of places are not as expected.
    """
    try:
        _check(cells, blobs)
    except (StatesError, ValueError) as exc:
        raise ModelError(
            f"this libllama does not keep its cache the way this version of edge-pc expects: {exc}",
            hint="install the llama-cpp-python that edge-pc was tested with",
        ) from exc


def _check(cells: Cells, blobs: BlobFormat) -> None:
    rng = np.random.default_rng(0)
    first, second, third = range(FIRST_SEQUENCE, FIRST_SEQUENCE + 3)
    # The last one goes to places that the first leaves free, below the others.
    for sequence, start, places in ((first, 0, [0, 1, 2]), (second, 10, [70, 71]), (third, 20, [1, 2, 69, 130])):
        labels = np.arange(start, start + len(places), dtype=np.int32)
        blob = blobs.build(labels)
        parts = blobs.parts(blob, len(places))
        parts.keys[:] = rng.integers(0, 60, parts.keys.shape)
        parts.values[:] = rng.integers(0, 60, parts.values.shape)
        if sequence == third:
            cells.drop(first)
        cells.load(sequence, blob, labels, np.array(places, dtype=np.int32))
        blobs.frame(blob, labels, TRANSIT)
        if not np.array_equal(cells.read(sequence, labels), blob):
            raise StatesError("a saved state does not load back unchanged")
    cells.join(second, third)
    cells.check()
    for sequence in (second, third):
        cells.drop(sequence)
