"""A second libllama context, beside the cache, in which tokens are computed at any positions in one run.

`llama_decode` wants the positions of a run to follow one another, and those that are there. Tokens scattered over a
prompt would have to be computed one by one. Here a run's tokens only seem to follow one another: their true positions,
and what each of them sees, are given to the graph itself (`hook.py`). Weights of attention are read there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes
from edge_pc.backends.llamacpp.books import up_to_block
from edge_pc.backends.llamacpp.hook import Hook
from edge_pc.backends.llamacpp.native import NativeContext
from edge_pc.backends.llamacpp.steps import batches
from edge_pc.errors import ContextLengthError, ModelError

# Tokens of a run that are computed at a time; memory for their intermediate results is taken for good.
RUN_TOKENS = 256

# The last tokens of a prompt, which ask for something, say enough of what it attends to.
ASKING_TOKENS = 64

_CELLS, _COMPUTED = 0, 1
SEQUENCES = 2

_GROWTH = 1.5


class Workbench:
    """Holds the cells of one prompt at a time. Its memory is taken when it is first needed.

    Args:
        open_context: makes an empty context of the given number of cells, whose graph the hook sees.
        hook: the one for it.
        blobs: the format of its states.
    """

    def __init__(self, open_context: Callable[[int], NativeContext], hook: Hook, blobs: BlobFormat) -> None:
        self._open_context = open_context
        self._hook = hook
        self._blobs = blobs
        self._native: NativeContext | None = None
        self._positions = np.empty(0, dtype=np.int32)

    def load(self, blob: Bytes, position_ids: IntArray, further: int) -> None:
        """Replace all cells by a blob's, which are at `position_ids`; `further` ones are computed then.

        Raises:
            ContextLengthError: there is not enough memory.
            StatesError: libllama refused the blob.
        """
        native, count = self._with_room(len(position_ids) + further), len(position_ids)
        native.drop(_CELLS)
        self._positions = position_ids
        if count:
            self._blobs.frame(blob, np.arange(count, dtype=np.int32))
            native.write(_CELLS, blob)

    def compute(self, token_ids: IntArray, position_ids: IntArray) -> tuple[Logits, Bytes]:
        """Compute a run over the cells that are there. Logits of its last token, and the blob of its cells.

        Raises:
            ModelError: libllama failed, or is not as expected.
        """
        native, first = self._with_room(0), len(self._positions)
        row = 0
        for start, stop in batches(0, len(token_ids), RUN_TOKENS):
            row = stop - start - 1
            self._run(token_ids[start:stop], position_ids[start:stop], [row])
        native.join(_CELLS, _COMPUTED, first, len(self._positions))
        blob = native.read(_COMPUTED)
        native.drop(_COMPUTED)
        self._blobs.frame(blob, position_ids)
        return native.logits(row), blob

    def attention(self, token_ids: IntArray, position_ids: IntArray) -> NDArray[np.float32]:
        """The weights of attention of a run's last tokens to the cells that are there, float32 `[cells]`.

        They are averaged over tokens, heads, and every third layer of the second half, and add up to 1. The run's cells
        are gone afterwards.

        Raises:
            ModelError: as `compute`.
        """
        before, layers = self._positions, range(self._blobs.layers // 2, self._blobs.layers, 3)
        try:
            weights: NDArray[np.float32] = self._run(
                token_ids[-ASKING_TOKENS:], position_ids[-ASKING_TOKENS:], [], layers
            )
        finally:
            self._with_room(0).drop(_CELLS, len(before))
            self._positions = before
        weights /= np.float32(len(layers))
        return weights

    def close(self) -> None:
        """Give the memory back until it is needed again."""
        native, self._native = self._native, None
        if native is not None:
            native.close()

    def _run(
        self, token_ids: IntArray, position_ids: IntArray, outputs: Sequence[int], layers: Sequence[int] = ()
    ) -> NDArray[np.float32]:
        first = len(self._positions)
        self._positions = np.concatenate([self._positions, position_ids])
        self._hook.prepare(position_ids, self._positions[None, :] <= position_ids[:, None], layers)
        labels = np.arange(first, len(self._positions), dtype=np.int32)
        self._with_room(0).decode(token_ids, labels, np.full_like(labels, _CELLS), outputs)
        return self._hook.finish()

    def _with_room(self, cells: int) -> NativeContext:
        if self._native is None or self._native.cells < cells:
            size = up_to_block(max(cells, int(_GROWTH * self._native.cells) if self._native else 0))
            self.close()
            try:
                self._native = self._open_context(size)
            except ModelError as exc:
                raise ContextLengthError(
                    f"computing tokens between cached ones needs {size} cells more: {exc.message}",
                    hint="close other prompts first",
                ) from exc
        return self._native
