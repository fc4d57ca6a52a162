"""llama.cpp used as its own documentation shows, without us: full prefill at any settings, and its state files.

Candidates for the baseline of the llama.cpp backend, and one of the other ways to reuse a prefix.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.errors import ModelError

_SEQUENCE = 0


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Settings that full prefill's speed depends on.

    Attributes:
        threads: compute threads.
        batch: tokens computed at a time (`n_ubatch`, and `n_batch` at least as much).
        flash: flash attention.
    """

    threads: int
    batch: int
    flash: bool


class LlamaDirect:
    """One libllama context over one GGUF file.

    Args:
        path: the GGUF file.
        settings: of the context.
        cells: room, in tokens.

    Raises:
        MissingDependencyError: llama-cpp-python is not installed.
        ModelError: the file cannot be opened, or there is not enough memory.
    """

    def __init__(self, path: Path, settings: LlamaSettings, cells: int) -> None:
        library = load_library()
        native_log.attach(library, verbose=False)
        self._library = library
        self._batch = settings.batch
        self._model = library.llama_model_load_from_file(os.fsencode(path), model_params(library))
        if not self._model:
            raise ModelError(f"libllama cannot open {path}: {native_log.take_error()}")
        self._context = library.llama_init_from_model(self._model, self._context_params(settings, cells))
        if not self._context:
            library.llama_model_free(self._model)
            raise ModelError(f"libllama cannot make a context of {cells} cells: {native_log.take_error()}")
        self._vocab = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))

    def clear(self) -> None:
        """Forget all tokens."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def append(self, token_ids: IntArray) -> Logits:
        """Compute tokens behind those present; logits of the last, float32 `[vocab]`."""
        for start in range(0, len(token_ids), self._batch):
            part = np.ascontiguousarray(token_ids[start : start + self._batch], dtype=np.int32)
            batch = self._library.llama_batch_get_one(_tokens(part), len(part))
            if self._library.llama_decode(self._context, batch):
                raise ModelError(f"libllama cannot compute {len(part)} tokens: {native_log.take_error()}")
        address = self._library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(address, (self._vocab,)).astype(np.float32)

    def save(self, path: Path, token_ids: IntArray) -> None:
        """Write the state of all tokens present to a file (`llama_state_seq_save_file`)."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        if not self._library.llama_state_seq_save_file(
            self._context, os.fsencode(path), _SEQUENCE, _tokens(ids), len(ids)
        ):
            raise ModelError(f"libllama cannot write its state to {path}: {native_log.take_error()}")

    def load(self, path: Path, tokens: int) -> None:
        """Replace all that is present by a state file of `tokens` tokens (`llama_state_seq_load_file`)."""
        self.clear()
        ids = np.empty(tokens, dtype=np.int32)
        count = ctypes.c_size_t()
        read = self._library.llama_state_seq_load_file(
            self._context, os.fsencode(path), _SEQUENCE, _tokens(ids), tokens, ctypes.byref(count)
        )
        if not read or count.value != tokens:
            raise ModelError(f"libllama cannot read the state file {path}: {native_log.take_error()}")

    def close(self) -> None:
        """Free the context and the model."""
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _context_params(self, settings: LlamaSettings, cells: int) -> Any:
        library = self._library
        params = library.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = settings.batch
        params.n_threads = params.n_threads_batch = settings.threads
        enabled, disabled = library.LLAMA_FLASH_ATTN_TYPE_ENABLED, library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = enabled if settings.flash else disabled
        return params


def _tokens(array: IntArray) -> Any:
    """The array as the bindings want it; it must outlive the call."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_int32))
