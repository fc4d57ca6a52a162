"""Backends run a model behind one protocol (`base.py`); this table is the only place that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.base import Backend, BackendOptions


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend is, and the kind of model it opens: an exported folder (`onnx`) or a GGUF file (`gguf`)."""

    module: str
    class_name: str
    model_kind: Literal["onnx", "gguf"]


BACKENDS = {
    "onnx": BackendEntry("edge_pc.backends.onnx.backend", "OnnxBackend", "onnx"),
    "llamacpp": BackendEntry("edge_pc.backends.llamacpp.backend", "LlamaCppBackend", "gguf"),
}


def entry(name: str) -> BackendEntry:
    """The table's entry for `name`.

    Raises:
        OptionError: there is no such backend.
    """
    if name not in BACKENDS:
        raise OptionError(f"there is no backend {name!r}; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def open_backend(name: str, model: Path, options: BackendOptions) -> Backend:
    """Open `model` with the backend `name`.

    Raises:
        OptionError: there is no such backend.
        MissingDependencyError: what the backend needs is not installed.
        ModelError: the model cannot be opened.
    """
    found = entry(name)
    backend: Backend = getattr(import_module(found.module), found.class_name)(model, options)
    return backend
