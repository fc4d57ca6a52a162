"""The llama.cpp backend: a GGUF file, and contexts that share one cache of cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_pc.backends.base import BackendOptions, DecodeStep, Logits
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.context import LlamaCppContext
from edge_pc.backends.llamacpp.describe import check_readable, describe
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.backends.llamacpp.native import Session
from edge_pc.backends.llamacpp.pool import Pool
from edge_pc.backends.llamacpp.selfcheck import check_cache
from edge_pc.errors import ModelError, OptionError
from edge_pc.system.cpu import allowed_cpus


class LlamaCppBackend:
    """A GGUF model, opened with libllama on the CPU.

    Args:
        path: the GGUF file.
        options: threads and verbosity; states are stored in float16, as they are computed, whatever `kv_storage`
            says, and there is no other provider than `cpu`.
        n_ctx: cells of the shared cache to begin with; it grows when the open prompts need more.

    Raises:
        MissingDependencyError: llama-cpp-python is not installed or does not load.
        ModelError: the file cannot be opened, or its cache cannot be composed of modules.
        OptionError: another provider is asked for.
    """

    name = "llamacpp"

    def __init__(self, path: Path, options: BackendOptions = BackendOptions(), n_ctx: int | None = None) -> None:
        if options.provider != "cpu":
            raise OptionError(f"the llama.cpp backend runs on the CPU only, not on {options.provider!r}")
        library = load_library()
        native_log.attach(library, verbose=options.verbose)
        self._library = library
        self._threads = options.threads or allowed_cpus()
        with ThreadPoolExecutor(1) as pool:  # libllama reads the weights and does not hold the interpreter
            reading = pool.submit(describe, path)
            self._model = _open_model(library, path)
        try:
            check_composable(library, self._model, path)
            described = reading.result()
            self.spec = described.spec
            self.tokenizer = described.tokenizer
            self.chat_template = described.chat_template
            blobs = BlobFormat(self.spec.layers, self.spec.kv_heads * self.spec.head_dim)
            self.kv_layout = blobs.kv_layout(library.LLAMA_STATE_SEQ_VERSION)
            self._pool = Pool(self._open_session, blobs, n_ctx)
            check_cache(self._pool.cells, blobs)
        except BaseException:
            library.llama_model_free(self._model)
            raise

    def new_context(self, capacity: int) -> LlamaCppContext:
        """A context with room for `capacity` cells.

        Raises:
            ContextLengthError: too many contexts are open at once.
        """
        return LlamaCppContext(self._pool, self.kv_layout, capacity)

    def decode(self, steps: Sequence[DecodeStep]) -> list[Logits]:
        """Compute the next token of each context in one pass over the weights."""
        contexts: list[LlamaCppContext] = [step.context for step in steps]  # type: ignore[misc]
        pool = self._pool
        with pool.lock:
            pool.make_room(2 * len(steps))  # a cell for each token, and one for each label that must change
            for context, step in zip(contexts, steps, strict=True):
                context.continue_at(step.position_id)
            rows = range(len(steps))
            pool.cells.compute(
                np.array([step.token_id for step in steps], dtype=np.int32),
                np.array([step.position_id for step in steps], dtype=np.int32),
                np.array([context.sequence for context in contexts], dtype=np.int32),
                rows,
            )
            return [pool.cells.logits(row) for row in rows]

    def close(self) -> None:
        """Free cache and model; contexts that are still open can only be closed then."""
        self._pool.close()
        model, self._model = self._model, None
        if model is not None:
            self._library.llama_model_free(model)

    def _open_session(self, cells: int) -> Session:
        return Session(self._library, self._model, cells, self._threads)


def _open_model(library: ModuleType, path: Path) -> Any:
    check_readable(path)
    native_log.take_error()
    model = library.llama_model_load_from_file(os.fsencode(path), model_params(library))
    if not model:
        raise ModelError(
            f"libllama cannot open {path}: {native_log.take_error() or 'no reason was given'}",
            hint="is it a whole GGUF file, of an architecture that this llama.cpp knows?",
        )
    return model


def check_composable(library: ModuleType, model: Any, path: Path) -> None:
    """Refuse models whose cache cannot be put together from separately computed pieces.

    Raises:
        ModelError: with the reason.
    """
    window = library.llama_model_n_swa(model)
    multi = (library.LLAMA_ROPE_TYPE_MROPE, library.LLAMA_ROPE_TYPE_IMROPE, library.LLAMA_ROPE_TYPE_VISION)
    reasons = {
        "it is recurrent: its state is one sum over all tokens": library.llama_model_is_recurrent(model),
        "it is a hybrid: some layers have one state for all tokens": library.llama_model_is_hybrid(model),
        "it has an encoder, which sees all text at once": library.llama_model_has_encoder(model),
        "it is a diffusion model, which sees all text at once": library.llama_model_is_diffusion(model),
        "its positions have several dimensions": library.llama_model_rope_type(model) in multi,
        "its positions are not encoded by rotation (but by ALiBi, or learned)": (
            library.llama_model_rope_type(model) == library.LLAMA_ROPE_TYPE_NONE
        ),
        f"its layers forget what is more than {window} tokens back (sliding window)": (
            0 < window < library.llama_model_n_ctx_train(model)
        ),
    }
    for reason, found in reasons.items():
        if found:
            raise ModelError(
                f"{path}: this model cannot reuse the states of modules: {reason}", hint="take another model"
            )
