"""`python -m benchmarks prefix`: other ways to reuse a prefix, as llama.cpp and llama-cpp-python offer them.

They run on the same tokens and the same file as `edge-pc bench ttft`. Each reuses one prefix, as it was; none composes
modules. Flash attention is off, which is faster for few tokens over a long prefix; at the base length it is on, too.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.rows import PrefixRow
from edge_pc.backends.base import IntArray
from edge_pc.backends.llamacpp.baseline import CHOICES, FullPrefill, as_tokens
from edge_pc.backends.llamacpp.library import load_library, model_params
from edge_pc.backends.llamacpp.log import native_log
from edge_pc.bench import ttft
from edge_pc.bench.rows import samples_of
from edge_pc.bench.tables import Table
from edge_pc.bench.texts import OWN_TEXT, Texts
from edge_pc.bench.timing import Sample, Way, interleave
from edge_pc.bench.ttft_tables import spread
from edge_pc.bench.work import Bench, Work
from edge_pc.errors import ModelError
from edge_pc.system.cpu import allowed_cpus

BACKEND = "llamacpp"
WAYS = {"state_file": "state file", "load_state": "load_state", "ram_cache": "RAM cache"}

# More than any state of the models that a CPU serves: the cache must not throw away what is to be measured.
_CACHE_BYTES = 16 << 30
_SEQUENCE = 0


def measure(work: Work[PrefixRow], settings: ttft.Settings) -> None:
    """Time each way over cached length."""
    if BACKEND not in work.backends:
        return
    with work.engine(BACKEND) as engine:
        texts, positions = Texts(engine.tokenizer), engine.spec.max_positions
    shapes = ttft.axes(settings, positions)["length"]
    wanted = [(shape, 0) for shape in shapes] + [(shape, 1) for shape in shapes if shape.cached == settings.base_cached]
    path, threads = work.options.model_path(BACKEND), work.options.threads or allowed_cpus()
    for index, (shape, flash) in enumerate(wanted):
        work.progress(index, len(wanted), f"{shape.cached} cached, flash attention {'on' if flash else 'off'}")
        keys = {way: f"{BACKEND}/{shape.name}/{'flash' if flash else 'plain'}/{way}" for way in WAYS}
        if all(work.section.row(key) for key in keys.values()):
            continue
        # The tokens of `Texts.case` for the same shape.
        prefix, new = texts.token_ids(shape.cached, 0), texts.token_ids(shape.new, OWN_TEXT)
        choice = {**CHOICES[0], "flash": flash}
        with prefix_ways(path, threads, choice, prefix, new, work.folder) as ways:
            samples = interleave(ways, dict.fromkeys(ways, settings.repeats))
        for way, taken in samples.items():
            times = samples_of(taken)
            work.section.add(
                PrefixRow(
                    key=keys[way], backend=BACKEND, way=way, flash=bool(flash), samples_ms=times,
                    cached_tokens=shape.cached, new_tokens=shape.new,
                )
            )  # fmt: skip
    work.progress(len(wanted), len(wanted), "done")


# (Cached tokens, flash attention), and the rows by way.
Point = tuple[tuple[int, bool], dict[str, PrefixRow]]


def tables(rows: Sequence[PrefixRow]) -> list[Table]:
    by_point: dict[tuple[int, bool], dict[str, PrefixRow]] = {}
    for row in rows:
        by_point.setdefault((row.cached_tokens, row.flash), {})[row.way] = row

    def time_of(way: str) -> Callable[[Point], str]:
        return lambda line: spread(line[1].get(way))

    columns: dict[str, Callable[[Point], str]] = {
        "> cached tokens": lambda line: str(line[0][0]),
        "flash attention": lambda line: "on" if line[0][1] else "off",
        **{f"> {title} (ms)": time_of(way) for way, title in WAYS.items()},
    }
    note = (
        "State file: llama_state_seq_load_file, then the new tokens. load_state: of llama-cpp-python, then the new "
        "tokens. RAM cache: a completion of llama-cpp-python with its LlamaRAMCache set. Median and quartiles."
    )
    return [Table.of("Time to first token with llama.cpp's own ways of reuse", by_point.items(), columns, note)]


@contextmanager
def prefix_ways(
    path: Path, threads: int, choice: Mapping[str, int], prefix: IntArray, new: IntArray, folder: Path
) -> Iterator[dict[str, Way]]:
    """The ways, ready to run: `state_file`, `load_state` and `ram_cache`.

    Args:
        path: the GGUF file.
        threads: compute threads.
        choice: settings of all contexts, as in `baseline.CHOICES`.
        prefix: tokens whose states are reused.
        new: tokens that are computed after them.
        folder: where the state file is put, and deleted.
    """
    cells = len(prefix) + len(new) + 64
    with TemporaryDirectory(prefix="llama-state-", dir=folder) as temporary:
        direct = FullPrefill(path, threads, cells)
        with closing(direct), closing(_bindings(path, threads, choice, cells)) as bindings:
            file = Path(temporary) / "prefix.state"
            direct.append(prefix, choice)
            _save(direct, choice, file, prefix)
            own = _binding_ways(bindings, prefix, new)
            yield {"state_file": lambda: _state_file(direct, choice, file, len(prefix), new), **own}


def _save(direct: FullPrefill, choice: Mapping[str, int], path: Path, token_ids: IntArray) -> None:
    """Write the state of all tokens present to a file."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    context = direct.context(choice)
    if not direct.library.llama_state_seq_save_file(context, os.fsencode(path), _SEQUENCE, as_tokens(ids), len(ids)):
        raise ModelError(f"libllama cannot write its state to {path}: {native_log.take_error()}")


def _load(direct: FullPrefill, choice: Mapping[str, int], path: Path, tokens: int) -> None:
    """Replace all that is present by a state file of `tokens` tokens."""
    direct.clear(choice)
    ids, count = np.empty(tokens, dtype=np.int32), ctypes.c_size_t()
    read = direct.library.llama_state_seq_load_file(
        direct.context(choice), os.fsencode(path), _SEQUENCE, as_tokens(ids), tokens, ctypes.byref(count)
    )
    if not read or count.value != tokens:
        raise ModelError(f"libllama cannot read the state file {path}: {native_log.take_error()}")


def _state_file(direct: FullPrefill, choice: Mapping[str, int], file: Path, tokens: int, new: IntArray) -> Sample:
    submitted = time.perf_counter()
    _load(direct, choice, file, tokens)
    loaded = time.perf_counter()
    int(np.argmax(direct.append(new, choice)))
    return _sample(submitted, loaded)


def _bindings(path: Path, threads: int, choice: Mapping[str, int], cells: int) -> Any:
    """llama-cpp-python's high-level object."""
    import llama_cpp

    with _our_model_params():
        return llama_cpp.Llama(
            str(path),
            n_ctx=cells,
            n_batch=choice["batch"],
            n_ubatch=choice["batch"],
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=bool(choice["flash"]),
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
    stages = {"assembly": (loaded - submitted) * 1e3, "forward": (done - loaded) * 1e3}
    return {"ttft": (done - submitted) * 1e3, **stages}


BENCH = Bench(
    title="llama.cpp's own ways",
    about="Each reuses one prefix as it was; none composes modules. Times are medians over the same tokens and the "
    "same file as those of reuse on llama.cpp.",
    row=PrefixRow,
    settings=ttft.Settings,
    measure=measure,
    tables=tables,
)
