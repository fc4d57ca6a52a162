"""`edge-pc pull` and `edge-pc export`: get a model, and make it ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc._version import __version__
from edge_pc.cli.options import GroupedCommand, OutputOptions, option, output_options
from edge_pc.cli.output import Output
from edge_pc.errors import ModelError
from edge_pc.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.export import Bits

_BITS: dict[str, Bits] = {"8": 8, "4": 4, "32": 32}


@click.command(cls=GroupedCommand)
@click.argument("name", metavar="NAME")
@output_options
def pull(name: str, output: OutputOptions) -> None:
    """Download a model by its name: smollm2.

    What is there already is only checked; that needs no network.
    """
    from edge_pc import models
    from edge_pc.pull import pull as download

    out = Output(output)
    registered = models.REGISTRY.get(name)
    if registered is not None and not models.gguf_path(name).is_file():
        out.note(
            f"getting {name}: {format_size(registered.nbytes)} from {registered.requirement}, {registered.licence}"
        )
    with out.progress(name) as update:
        path = download(name, lambda step, done, total: update(done, total, step))
    out.note(f"{name} is at {path} ({format_size(path.stat().st_size)}, SHA-256 checked)")
    if not _is_exported(models.export_folder(name)):
        out.note(f"next: edge-pc export {name}")


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="MODEL")
@option("-o", "--output", "folder", metavar="DIR", help="The folder to make.  [default for a pulled model: beside it]")
@option(
    "--bits",
    type=click.Choice(list(_BITS)),
    default="8",
    show_default=True,
    help="Of the weights; less is smaller and less exact.",
)
@option("--force", is_flag=True, help="Export again what is there already.")
@output_options
def export(model: str, folder: str | None, bits: str, force: bool, output: OutputOptions) -> None:
    """Make a model ready to run.

    MODEL is a pulled model's name, a GGUF file, or a Hugging Face folder (config.json, safetensors, tokenizer.json).
    """
    from edge_pc import models
    from edge_pc.export import export as export_model

    out = Output(output)
    source = models.export_source(model)
    if folder is None and model not in models.REGISTRY:
        raise click.UsageError("say where to: -o DIR")
    target = Path(folder) if folder is not None else models.export_folder(model, _BITS[bits])
    if folder is None and not force and _is_exported(target):
        out.note(f"{model} is exported already: {target}")
        return
    with out.progress(f"exporting {model}") as update:
        export_model(source, target, bits=_BITS[bits], progress=lambda step, done, total: update(done, total, step))
    out.note(f"{model} is exported to {target}")
    if model not in models.REGISTRY or target != models.export_folder(model):
        out.note(f"use it with: --model {target}")


def _is_exported(folder: Path) -> bool:
    """Whether this version's export is there, and whole."""
    from edge_pc.model_spec import ModelSpec

    try:
        return ModelSpec.load(folder).exporter == f"edge-pc {__version__}"
    except ModelError:
        return False
