"""Backends run a model through one protocol (`base.py`); this table is the only place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edge_pc.backends.entry import BackendEntry
from edge_pc.backends.llamacpp.entry import ENTRY as LLAMACPP
from edge_pc.backends.onnx.entry import ENTRY as ONNX
from edge_pc.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.base import Backend

BACKENDS: dict[str, BackendEntry] = {entry.name: entry for entry in (ONNX, LLAMACPP)}
DEFAULT_BACKEND = ONNX.name


def entry(name: str) -> BackendEntry:
    """The table's entry for `name`.

    Raises:
        OptionError: there is no such backend.
    """
    if name not in BACKENDS:
        raise OptionError(f"there is no backend {name!r}; expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def open_backend(name: str, model: Path, options: Mapping[str, Any]) -> Backend[Any]:
    """Open `model` with the backend `name`.

    Args:
        options: values of the backend's own options, by name; those left out have their defaults.

    Raises:
        OptionError: there is no such backend, it has no such option, or a value is wrong.
        MissingDependencyError: what the backend needs is not installed.
        ModelError: the model cannot be opened.
    """
    found = entry(name)
    return found.open(model, found.make_options(options))
