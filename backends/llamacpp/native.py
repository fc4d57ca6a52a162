"""A libllama context: one cache of cells that all sequences share, and the few calls that are made on it.

Settings were measured with SmolLM2-135M (Q8_0 and Q4_0, AVX-512), 32 tokens over 4096 cached ones:

- Flash attention off: 210 ms against 1650 ms, one token 23 ms against 69 ms (2 cores). libllama's CPU kernel for it is
  slow for few rows. Full prefill of 4128 tokens gains little from it: 49 s against 55 s (Q8_0, 1 core), 13.4 s against
  15.4 s (Q4_0, 2 cores). Without it, results depend neither on how a run is cut nor on whole blocks of other prompts'
  cells between a prompt's own (see `cells.py`).
- float16 keys and values: 8-bit keys or bfloat16 are not faster and cost a KL of 0.004, float32 doubles the bytes.
- Batches of 512 tokens: 256 to 1024 are equally fast.
- Threads: all CPUs the process may use. Where other work takes its share of them, fewer are faster by far, because
  libllama's threads wait for one another at every operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.blob import TYPE_F16, Bytes
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.errors import ModelError, StatesError

BATCH_TOKENS = 512

# Sequence numbers of a context (libllama's limit is 256; its buffers for logits grow with it).
SEQUENCES = 128

_TO_THE_END = -1


class NativeContext:
    """An allocated libllama context. Called by one thread only (see `thread.py`).

    Args:
        library: the bindings.
        model: the opened `llama_model`.
        cells: room, in tokens; the memory is taken at once.
        threads: compute threads.
        batch_tokens: tokens computed at a time, at most.
        sequences: how many there are; as many tokens of a batch can have logits.
        callback: sees the graph while it is computed (see `hook.py`).

    Attributes:
        cells: room, rounded up by libllama.

    Raises:
        ModelError: there is not enough memory.
    """

    def __init__(
        self,
        library: ModuleType,
        model: Any,
        cells: int,
        threads: int,
        *,
        batch_tokens: int = BATCH_TOKENS,
        sequences: int = SEQUENCES,
        callback: Any = None,
    ) -> None:
        params = library.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_seq_max = params.n_outputs_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = TYPE_F16
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = True
        if callback is not None:
            params.cb_eval = callback
        native_log.take_error()
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise ModelError(
                f"libllama cannot make a context of {cells} cells: {native_log.take_error() or 'no reason was given'}",
                hint="is there enough memory?",
            )
        self._library = library
        self._memory = library.llama_get_memory(self._context)
        self._vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._batch = _Batch(library)
        self.cells = int(library.llama_n_ctx(self._context))

    def decode(self, token_ids: IntArray, position_ids: IntArray, sequences: IntArray, outputs: Sequence[int]) -> None:
        """Compute tokens, at most `BATCH_TOKENS`, each in its sequence; `outputs` are the rows that get logits.

        Raises:
            ModelError: libllama refused or failed; nothing of the batch is left in the cache.
        """
        self._require_open()
        native_log.take_error()
        batch = self._batch.filled(token_ids, position_ids, sequences, outputs)
        code = self._library.llama_decode(self._context, batch)
        if code:
            reason = native_log.take_error() or f"code {code}"
            raise ModelError(f"libllama cannot compute {len(token_ids)} tokens: {reason}")

    def logits(self, row: int) -> Logits:
        """Logits of a row of the last `decode` that was among its outputs, float32 `[vocab]`."""
        address = self._library.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(address, (self._vocab,)).astype(np.float32)

    def join(self, source: int, target: int, start: int, stop: int) -> None:
        """Let `target` share the cells of `source` at positions `[start, stop)`."""
        self._require_open()
        self._library.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def drop(self, sequence: int, start: int = 0, stop: int = _TO_THE_END) -> None:
        """Take the cells at positions `[start, stop)` from a sequence; nothing is left to take when all is closed."""
        if self._context is not None:
            self._library.llama_memory_seq_rm(self._memory, sequence, start, stop)

    def last(self, sequence: int) -> int:
        """The largest position label in a sequence, -1 when it is empty."""
        self._require_open()
        return int(self._library.llama_memory_seq_pos_max(self._memory, sequence))

    def clear(self) -> None:
        """Take all cells from all sequences, and put zeros into their places."""
        self._require_open()
        self._library.llama_memory_clear(self._memory, True)

    def write(self, sequence: int, blob: Bytes) -> None:
        """Replace a sequence by the cells of a blob.

        Raises:
            StatesError: libllama refused it; the sequence is empty then.
        """
        self._require_open()
        native_log.take_error()
        read = self._library.llama_state_seq_set_data(self._context, self._address(blob), len(blob), sequence)
        if read != len(blob):
            raise StatesError(f"libllama refused KV states: {native_log.take_error() or f'{read} bytes read'}")

    def read(self, sequence: int) -> Bytes:
        """The blob of a sequence."""
        self._require_open()
        size = self._library.llama_state_seq_get_size(self._context, sequence)
        blob: Bytes = np.empty(size, dtype=np.uint8)
        written = self._library.llama_state_seq_get_data(self._context, self._address(blob), size, sequence)
        if written != size:
            raise StatesError(f"libllama gave {written} of {size} bytes of KV states")
        return blob

    def close(self) -> None:
        """Free the context; a second time nothing happens."""
        context, self._context = self._context, None
        if context is not None:
            self._library.llama_free(context)

    def _require_open(self) -> None:
        # A call on memory that was freed would take the process down.
        if self._context is None:
            raise ModelError("the model is closed", hint="use the engine only until it is closed")

    def _address(self, blob: NDArray[Any]) -> Any:
        return ctypes.cast(blob.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


class _Batch:
    """The arrays of a `llama_batch`, which numpy fills again for each call: a loop over ctypes would take longer."""

    def __init__(self, library: ModuleType) -> None:
        self._token_ids = np.zeros(BATCH_TOKENS, dtype=np.int32)
        self._position_ids = np.zeros(BATCH_TOKENS, dtype=np.int32)
        self._counts = np.ones(BATCH_TOKENS, dtype=np.int32)
        self._sequences = np.zeros(BATCH_TOKENS, dtype=np.int32)
        self._rows = np.arange(BATCH_TOKENS, dtype=np.uintp) * self._sequences.itemsize
        self._rows += np.uintp(self._sequences.ctypes.data)
        self._outputs = np.zeros(BATCH_TOKENS, dtype=np.int8)
        self._struct = library.llama_batch()
        for name, address in {
            "token": self._token_ids.ctypes.data,
            "pos": self._position_ids.ctypes.data,
            "n_seq_id": self._counts.ctypes.data,
            "seq_id": self._rows.ctypes.data,
            "logits": self._outputs.ctypes.data,
        }.items():
            kind = dict(library.llama_batch._fields_)[name]
            setattr(self._struct, name, ctypes.cast(address, kind))

    def filled(self, token_ids: IntArray, position_ids: IntArray, sequences: IntArray, outputs: Sequence[int]) -> Any:
        count = len(token_ids)
        self._token_ids[:count] = token_ids
        self._position_ids[:count] = position_ids
        self._sequences[:count] = sequences
        self._outputs[:count] = 0
        self._outputs[list(outputs)] = 1
        self._struct.n_tokens = count
        return self._struct
