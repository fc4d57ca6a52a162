"""What all benches share: which model, which backends, where states lie while they are measured."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from edge_pc.backends import BACKENDS, entry
from edge_pc.engine import Engine
from edge_pc.errors import MissingDependencyError, ModelError, OptionError
from edge_pc.models import registry
from edge_pc.system.cpu import allowed_cpus
from edge_pc.system.home import make_home

STATES_FOLDER = "bench-states"
LLAMA_QUANT = "q8_0"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured, and with what.

    Attributes:
        model: as `Engine` takes it.
        gguf: the file for the llama.cpp backend; None: of a registered model, its weights in Q8_0 (made once).
        backends: names; empty: all that are installed.
        threads: compute threads; None: the search chooses.
        cache_dir: where states lie meanwhile, each deleted when it is not needed any more; None: a folder below
            `edge_pc.system.home.home()`, deleted at the end.
    """

    model: str = "smollm2"
    gguf: Path | None = None
    backends: tuple[str, ...] = ()
    threads: int | None = None
    cache_dir: Path | None = None


def chosen_backends(options: BenchOptions) -> list[str]:
    """The backends to measure.

    Raises:
        OptionError: there is no such backend.
        MissingDependencyError: one was asked for that is not installed.
    """
    installed = [name for name in BACKENDS if name != "llamacpp" or importlib.util.find_spec("llama_cpp")]
    for name in options.backends:
        entry(name)
        if name not in installed:
            raise MissingDependencyError(
                "the llama.cpp backend needs llama-cpp-python", hint='pip install "edge-prompt-cache[llamacpp]"'
            )
    return list(options.backends) or installed


def model_path(options: BenchOptions, backend: str) -> Path:
    """The file or folder that a backend opens.

    For llama.cpp the weights of a registered model are brought to Q8_0 first: as precise as our 8 bit, and of all
    quantizations the one with fast kernels everywhere (Q4_1, in which SmolLM2 comes, has none).

    Raises:
        ModelError: there is no such model for this backend.
    """
    if entry(backend).model_kind == "onnx":
        return registry.locate(options.model, "onnx")
    if options.gguf is not None:
        return options.gguf
    if options.model not in registry.REGISTRY:
        raise ModelError(f"no GGUF file of {options.model} is known", hint="give one with --gguf FILE")
    from edge_pc.backends.llamacpp.requantize import requantize, requantized_path

    source = registry.locate(options.model, "gguf")
    made = requantized_path(source, LLAMA_QUANT)
    return made if made.is_file() else requantize(source, made, LLAMA_QUANT)


@contextmanager
def states_folder(options: BenchOptions) -> Iterator[Path]:
    """Where states lie while they are measured: not among a person's own.

    Below the home, not in the system's folder for temporary files: that one is often in memory, and nothing is ever
    cold there. After an interruption the folder is left to the next run, which deletes it.

    Raises:
        OptionError: another bench uses the folder now.
    """
    folder = options.cache_dir or make_home() / STATES_FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise OptionError(
            f"another bench is running on {folder}", hint="wait for it: two at once would measure each other"
        ) from exc
    try:
        yield folder
        if options.cache_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def open_engine(options: BenchOptions, backend: str, folder: Path, threads: int | None = None) -> Engine:
    """An engine on the bench's own states. Its caller closes it."""
    path = model_path(options, backend)
    return Engine(path, backend=backend, cache_dir=folder / backend, threads=threads or options.threads)


def shared_settings(options: BenchOptions) -> dict[str, Any]:
    """What a report says once for all its sections: the model and its sizes."""
    backend = chosen_backends(options)[0]
    spec = _spec(options, backend)
    sizes = ("architecture", "layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size", "max_positions")
    facts = asdict(spec)
    return {
        # A folder's name alone: its path may hold a person's name.
        "model": {"name": Path(options.model).name, **{name: facts[name] for name in sizes}},
        "threads": options.threads or allowed_cpus(),
    }


def backend_facts(options: BenchOptions, backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each backend: how the weights are stored, how many bytes of them there are, and their parameters."""
    from edge_pc.bench.weights import matmul_parameters, weight_bytes

    facts = {}
    for backend in backends:
        path = model_path(options, backend)
        facts[backend] = {
            "quantization": _spec(options, backend).quantization,
            "weight_bytes": weight_bytes(path),
            "matmul_parameters": matmul_parameters(path),
        }
    return facts


def _spec(options: BenchOptions, backend: str) -> Any:
    from edge_pc.models.spec import ModelSpec

    path = model_path(options, backend)
    if path.is_dir():
        return ModelSpec.load(path)
    from edge_pc.backends.llamacpp.describe import describe

    return describe(path).spec
