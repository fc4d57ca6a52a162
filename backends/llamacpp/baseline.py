"""What benches measure llama.cpp with: full prefill at any settings, weights with fast kernels, the kernels in use."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import numpy as np

from edge_pc.backends.base import IntArray, Logits
from edge_pc.backends.llamacpp.library import AMX_FLAG, load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.backends.llamacpp.requantize import requantize, requantized_path
from edge_pc.backends.probe import probe_in_child
from edge_pc.errors import ModelError

# Settings to try beside the number of threads; the engine's own come first. `batch` tokens are computed at a time
# (`n_batch` and `n_ubatch`); `flash` is flash attention.
CHOICES = tuple({"batch": batch, "flash": flash} for flash in (0, 1) for batch in (512, 2048))

_PROBE_SECONDS = 60


def fair_weights(model: Path) -> Path:
    """The GGUF file with weights in Q8_0, made once beside `model`.

    They are as precise as the 8 bit of an exported model, and of all quantizations the one with fast kernels everywhere
    (Q4_1, in which SmolLM2 comes, has none).

    Raises:
        ModelError: it cannot be made.
        MissingDependencyError: llama-cpp-python is not installed.
    """
    made = requantized_path(model, "q8_0")
    return made if made.is_file() else requantize(model, made, "q8_0")


def kernels(instruction_sets: Collection[str]) -> str:
    """What libllama says it was built with, without AMX, which is not used; empty when it does not load."""
    try:
        child = probe_in_child("llamacpp", _PROBE_SECONDS)
        return str(json.loads(child.stdout.splitlines()[-1])["built with"]).replace(f"{AMX_FLAG} | ", "")
    except (SubprocessError, ValueError, IndexError):
        return ""


class FullPrefill:
    """Full prefill in separate contexts, one for each set of settings, over one opened model.

    Args:
        model: the GGUF file.
        threads: compute threads.
        capacity: the longest prompt, in tokens.

    Raises:
        MissingDependencyError: llama-cpp-python is not installed.
        ModelError: the file cannot be opened.
    """

    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        self.library = load_library()
        native_log.attach(self.library, verbose=False)
        self._threads = threads
        self._capacity = capacity
        self._contexts: dict[tuple[int, int], Any] = {}
        self._model = self.library.llama_model_load_from_file(os.fsencode(model), model_params(self.library))
        if not self._model:
            raise ModelError(f"libllama cannot open {model}: {native_log.take_error()}")
        self._vocab = int(self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self._model)))

    def prefill(self, token_ids: IntArray, settings: Mapping[str, int]) -> Logits:
        """Compute all tokens; logits of the last, float32 `[vocab]`.

        Raises:
            ModelError: there is not enough memory.
        """
        self.clear(settings)
        return self.append(token_ids, settings)

    def clear(self, settings: Mapping[str, int]) -> None:
        """Forget all tokens."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context(settings)), False)

    def append(self, token_ids: IntArray, settings: Mapping[str, int]) -> Logits:
        """Compute tokens after those present; logits of the last, float32 `[vocab]`."""
        context = self.context(settings)
        for start in range(0, len(token_ids), settings["batch"]):
            part = np.ascontiguousarray(token_ids[start : start + settings["batch"]], dtype=np.int32)
            if self.library.llama_decode(context, self.library.llama_batch_get_one(as_tokens(part), len(part))):
                raise ModelError(f"libllama cannot compute {len(part)} tokens: {native_log.take_error()}")
        address = self.library.llama_get_logits_ith(context, -1)
        return np.ctypeslib.as_array(address, (self._vocab,)).astype(np.float32)

    def context(self, settings: Mapping[str, int]) -> Any:
        """The context of these settings."""
        key = settings["batch"], settings["flash"]
        if key not in self._contexts:
            params = self.library.llama_context_default_params()
            params.n_ctx = self._capacity
            params.n_batch = params.n_ubatch = settings["batch"]
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = int(settings["flash"])  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED
            context = self.library.llama_init_from_model(self._model, params)
            if not context:
                raise ModelError(f"libllama cannot make a context of {self._capacity} cells: {native_log.take_error()}")
            self._contexts[key] = context
        return self._contexts[key]

    def close(self) -> None:
        """Free the contexts and the model."""
        for context in self._contexts.values():
            self.library.llama_free(context)
        self.library.llama_model_free(self._model)


def as_tokens(array: IntArray) -> Any:
    """The array as the bindings want it; it must outlive the call."""
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_int32))
