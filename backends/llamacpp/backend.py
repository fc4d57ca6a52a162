"""The llama.cpp backend: a GGUF file, and contexts that share one cache of cells."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_pc.backends.base import DecodeStep, Logits
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.context import LlamaCppContext
from edge_pc.backends.llamacpp.describe import check
from edge_pc.backends.llamacpp.entry import LlamaCppOptions
from edge_pc.backends.llamacpp.float16 import Float16
from edge_pc.backends.llamacpp.hook import Hook
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.backends.llamacpp.moved import BlobReader
from edge_pc.backends.llamacpp.native import NativeContext
from edge_pc.backends.llamacpp.pool import CacheUse, Pool
from edge_pc.backends.llamacpp.prompt import decode
from edge_pc.backends.llamacpp.selfcheck import check_cache
from edge_pc.backends.llamacpp.thread import NativeThread
from edge_pc.backends.llamacpp.workbench import RUN_TOKENS, SEQUENCES, Workbench
from edge_pc.errors import ModelError
from edge_pc.system.cpu import allowed_cpus


class LlamaCppBackend:
    """A GGUF model, opened with libllama on the CPU. Its contexts share one cache.

    What is computed with `exact` plans, and the tokens decoded after them one at a time, is equal bit for bit to
    full prefill of the same cells with nothing else in the cache: whatever other prompts are open, whoever computes at
    the same time, and however the work is cut into runs (not exact: tokens that several contexts decode in one call,
    because several rows go through another kernel than one). Plans that are not exact keep that promise as long as each
    of their modules lies directly after the one before it, as it does when they are loaded for the same prompt;
    elsewhere modules are shared where they lie, and logits may move by rounding errors.

    Args:
        path: the GGUF file.
        options: threads and verbosity.
        n_ctx: cells of the shared cache to begin with; it grows when the open prompts need more.

    Raises:
        MissingDependencyError: llama-cpp-python is not installed or does not load.
        ModelError: the file cannot be opened, or its cache cannot be composed of modules.
    """

    name = "llamacpp"

    def __init__(self, path: Path, options: LlamaCppOptions = LlamaCppOptions(), n_ctx: int | None = None) -> None:
        library = load_library()
        checked = check(path)
        native_log.attach(library, verbose=options.verbose)
        self._library = library
        self._hook = Hook(library)
        self._threads = options.threads or allowed_cpus()
        self._model: Any = None
        self._pool: Pool | None = None
        self._closing = False
        self._thread = NativeThread()
        try:
            loading = self._thread.begin(partial(self._load, path))  # meanwhile the file's own words are read
            described = checked.describe()
            described.chat_template.prepare()
            loading()
            self.spec = described.spec
            self.tokenizer = described.tokenizer
            self.chat_template = described.chat_template
            blobs = BlobFormat(self.spec.layers, self.spec.kv_heads * self.spec.head_dim)
            self.kv_layout = blobs.kv_layout(library.LLAMA_STATE_SEQ_VERSION)
            self._thread.run(partial(self._make_pool, blobs, n_ctx))
        except BaseException:
            self.close()
            raise

    def new_context(self, capacity: int) -> LlamaCppContext:
        """A context with room for `capacity` cells.

        Raises:
            ContextLengthError: too many contexts are open at once.
        """
        return LlamaCppContext(self._cache, self.kv_layout, capacity)

    def decode(self, steps: Sequence[DecodeStep[LlamaCppContext]]) -> list[Logits]:
        """Compute the next token of each context in one pass over the weights.

        Raises:
            StatesError: a context's cells have been lost, or hold infinite numbers.
            ContextLengthError: there is not enough memory for more cells.
        """
        prompts = [step.context.prompt for step in steps]
        token_ids = np.array([step.token_id for step in steps], dtype=np.int32)
        position_ids = np.array([step.position_id for step in steps], dtype=np.int32)
        pool = self._cache
        return pool.run(partial(decode, pool, prompts, token_ids, position_ids))

    def cache_use(self) -> CacheUse:
        """What the shared cache holds."""
        return self._cache.run(self._cache.use)

    def check(self) -> None:
        """Compare the books of the shared cache with libllama's; reads all of it.

        Raises:
            StatesError: they differ, which is a bug in this backend.
        """
        self._cache.run(self._cache.cells.check)

    def close(self) -> None:
        """Free cache and model; contexts that are still open can only be closed then."""
        self._closing = True
        self._thread.later(self._free)
        self._thread.close()

    @property
    def _cache(self) -> Pool:
        if self._pool is None:
            raise ModelError("the model is closed", hint="use the engine only until it is closed")
        return self._pool

    def _load(self, path: Path) -> None:
        self._model = _open_model(self._library, path, lambda: not self._closing)
        check_composable(self._library, self._model, path)

    def _make_pool(self, blobs: BlobFormat, n_ctx: int | None) -> None:
        reader = BlobReader(blobs, self.spec, Float16(self._library))
        workbench = Workbench(self._open_workbench, self._hook, blobs)
        self._pool = Pool(self._thread, self._open_context, blobs, reader, workbench, n_ctx)
        check_cache(self._pool.cells, blobs)

    def _open_context(self, cells: int) -> NativeContext:
        return NativeContext(self._library, self._model, cells, self._threads)

    def _open_workbench(self, cells: int) -> NativeContext:
        return NativeContext(
            self._library,
            self._model,
            cells,
            self._threads,
            batch_tokens=RUN_TOKENS,
            sequences=SEQUENCES,
            callback=self._hook.callback,
        )

    def _free(self) -> None:
        if self._pool is not None:
            self._pool.workbench.close()
            self._pool.cells.close()
        model, self._model = self._model, None
        if model is not None:
            self._library.llama_model_free(model)


def _open_model(library: ModuleType, path: Path, wanted: Callable[[], bool]) -> Any:
    """Load a file as long as it is wanted."""
    params = model_params(library)
    params.progress_callback = library.llama_progress_callback(lambda *_: wanted())
    native_log.take_error()
    model = library.llama_model_load_from_file(os.fsencode(path), params)
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
                f"{path}: this model cannot reuse the states of modules: {reason}", hint="use another model"
            )
