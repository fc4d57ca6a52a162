"""Backends run a model behind one protocol (`base.py`); this table is the only place that lists them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.base import Backend, BackendOptions
    from edge_pc.models.description import Description


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """Where a backend is, and the kind of model it opens: an exported folder (`onnx`) or a GGUF file (`gguf`).

    `describe_module` has the function `describe`, which reads such a model without its weights.
    """

    module: str
    class_name: str
    model_kind: Literal["onnx", "gguf"]
    describe_module: str


BACKENDS = {
    "onnx": BackendEntry("edge_pc.backends.onnx.backend", "OnnxBackend", "onnx", "edge_pc.models.description"),
    "llamacpp": BackendEntry(
        "edge_pc.backends.llamacpp.backend", "LlamaCppBackend", "gguf", "edge_pc.backends.llamacpp.describe"
    ),
}


def entry(name: str) -> BackendEntry:
    """The table's entry for `name`.

    Raises:
        OptionError: there is no such backend.
    """
    if name not in BACKENDS:
        raise OptionError(f"there is no backend {name!r}; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def describe(name: str, model: Path) -> Description:
    """What of `model` deals with text, as the backend `name` would see it; no weights are loaded.

    Raises:
        OptionError: there is no such backend.
        ModelError: the model is missing or broken.
    """
    description: Description = import_module(entry(name).describe_module).describe(model)
    return description


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
