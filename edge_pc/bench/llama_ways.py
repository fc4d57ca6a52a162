"""Other ways to reuse a prefix, as llama.cpp and llama-cpp-python offer them, on the same tokens and the same file.

Each reuses one prefix, as it was; none composes modules.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge_pc.backends.base import IntArray
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.bench.llama_direct import LlamaDirect, LlamaSettings
from edge_pc.bench.timing import Sample, Way

# More than any state of the models that a CPU serves: the cache must not throw away what is to be measured.
_CACHE_BYTES = 16 << 30

# Of the ways the last in order.
LAST_WAY = "ram_cache"


@contextmanager
def prefix_ways(
    path: Path, settings: LlamaSettings, prefix: IntArray, new: IntArray, folder: Path
) -> Iterator[dict[str, Way]]:
    """The ways, ready to run: `state_file`, `load_state` and `ram_cache`.

    Args:
        path: the GGUF file.
        settings: of both contexts.
        prefix: tokens whose states are reused.
        new: tokens that are computed behind them.
        folder: where the state file is put, and deleted.
    """
    cells = len(prefix) + len(new) + 64
    with TemporaryDirectory(prefix="llama-state-", dir=folder) as temporary:
        direct = LlamaDirect(path, settings, cells)
        bindings = _bindings(path, settings, cells)
        try:
            file = Path(temporary) / "prefix.state"
            direct.append(prefix)
            direct.save(file, prefix)
            yield {
                "state_file": lambda: _state_file(direct, file, len(prefix), new),
                **_binding_ways(bindings, prefix, new),
            }
        finally:
            direct.close()
            bindings.close()


def _state_file(direct: LlamaDirect, file: Path, tokens: int, new: IntArray) -> Sample:
    submitted = time.perf_counter()
    direct.load(file, tokens)
    loaded = time.perf_counter()
    int(np.argmax(direct.append(new)))
    return _sample(submitted, loaded)


def _bindings(path: Path, settings: LlamaSettings, cells: int) -> Any:
    """llama-cpp-python's high-level object."""
    import llama_cpp

    with _our_model_params():
        return llama_cpp.Llama(
            str(path),
            n_ctx=cells,
            n_batch=settings.batch,
            n_ubatch=settings.batch,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            flash_attn=settings.flash,
            verbose=False,
        )


@contextmanager
def _our_model_params() -> Iterator[None]:
    """Let `Llama`, which has no argument for it, begin with the parameters that all other ways open the model with."""
    library: Any = load_library()
    default = library.llama_model_default_params
    params = model_params(library)
    library.llama_model_default_params = lambda: params
    try:
        yield
    finally:
        library.llama_model_default_params = default


def _binding_ways(llama: Any, prefix: IntArray, new: IntArray) -> dict[str, Way]:
    from llama_cpp.llama_cache import LlamaRAMCache

    head, tail = prefix.tolist(), new.tolist()
    llama.eval(head)
    state = llama.save_state()
    cache = LlamaRAMCache(capacity_bytes=_CACHE_BYTES)
    cache[head] = state

    def load_state() -> Sample:
        submitted = time.perf_counter()
        llama.load_state(state)
        loaded = time.perf_counter()
        llama.eval(tail)
        llama.sample(temp=0.0)
        return _sample(submitted, loaded)

    def ram_cache() -> Sample:
        llama.reset()  # or the prefix would be found in place
        llama.set_cache(cache)
        submitted = time.perf_counter()
        # One token; the state that is stored after it is not the reader's to wait for.
        next(iter(llama.create_completion(head + tail, max_tokens=1, temperature=0.0, stream=True)))
        sample = {"ttft": (time.perf_counter() - submitted) * 1e3}
        llama.set_cache(None)
        for key in [key for key in cache.cache_state if len(key) > len(head)]:
            del cache.cache_state[key]
        return sample

    return {"load_state": load_state, "ram_cache": ram_cache}


def _sample(submitted: float, loaded: float) -> Sample:
    done = time.perf_counter()
    return {
        "ttft": (done - submitted) * 1e3,
        "assembly": (loaded - submitted) * 1e3,
        "forward": (done - loaded) * 1e3,
    }
