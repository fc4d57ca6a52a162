"""What models are on this machine, and what can be had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_pc.errors import EdgePCError
from edge_pc.models import registry
from edge_pc.system.sizes import format_size


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model on this machine.

    Attributes:
        name: as --model takes it.
        form: `GGUF`, `safetensors`, or `export` and the bits of its weights.
        nbytes: on disk.
        context: how many positions it has; None: the file does not say so, or cannot be read.
        place: the file or folder.
    """

    name: str
    form: str
    nbytes: int
    context: int | None
    place: str


def on_this_machine() -> list[ModelHere]:
    """The models that have a name: files that were pulled, and exports; by name."""
    return sorted([*_pulled(), *_exported()], key=lambda each: (each.name.lower(), each.form))


def known() -> str:
    """What can be pulled and works, in words."""
    from edge_pc.export.hf_config import SUPPORTED

    registered = ", ".join(
        f"{name} ({format_size(model.nbytes)}, {model.licence})" for name, model in registry.REGISTRY.items()
    )
    return (
        f"can be pulled: {registered}; any model of the Hugging Face Hub as ORG/NAME, or "
        f"ORG/NAME:Q4_K_M for a GGUF file, whose architecture (model_type) is one of {', '.join(SUPPORTED)}"
    )


def _pulled() -> Iterator[ModelHere]:
    from edge_pc.models.hub import cached_models

    for name in registry.REGISTRY:
        path = registry.source(name)
        if path is not None:
            yield _gguf(name, path)
    for model, path in cached_models():
        if path.is_dir():
            yield ModelHere(str(model), "safetensors", _size(path), _context_of_folder(path), str(path))
        else:
            yield _gguf(str(model), path)


def _exported() -> Iterator[ModelHere]:
    from edge_pc.models.spec import ModelSpec

    for name, folder in registry.exports():
        try:
            context: int | None = ModelSpec.load(folder).max_positions
        except EdgePCError:
            context = None  # of another version
        yield ModelHere(name, f"export, {folder.name.removeprefix('onnx-q')} bits", _size(folder), context, str(folder))


def _gguf(name: str, path: Path) -> ModelHere:
    from edge_pc.models.gguf_model import check_gguf, model_sizes

    try:
        context: int | None = model_sizes(check_gguf(path)).max_positions
    except EdgePCError:
        context = None
    return ModelHere(name, "GGUF", path.stat().st_size, context, str(path))


def _context_of_folder(folder: Path) -> int | None:
    from edge_pc.export.hf_config import read_config

    try:
        return int(read_config(folder).sizes()["max_positions"])
    except EdgePCError:
        return None  # an architecture that cannot be exported


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
