"""`edge-pc pull` and `edge-pc export`: get a model, and make it ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc._version import __version__
from edge_pc.cli.options import GroupedCommand, OutputOptions, backend_option, option, output_options
from edge_pc.cli.output import Output
from edge_pc.errors import ModelError
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.export import Bits


@click.command(cls=GroupedCommand)
@click.argument("name", metavar="NAME")
@output_options
def pull(name: str, output: OutputOptions) -> None:
    """Download a model by its name: smollm2.

    A model that is already there is only checked; that needs no network.
    """
    from edge_pc.models import registry
    from edge_pc.models.pull import pull as download

    out = Output(output)
    registered = registry.REGISTRY.get(name)
    if registered is not None and not registry.gguf_path(name).is_file():
        out.note(
            f"getting {name}: {format_size(registered.nbytes)} from {registered.requirement}, {registered.licence}"
        )
    with out.progress(name) as update:
        path = download(name, update)
    out.note(f"{name} is at {path} ({format_size(path.stat().st_size)}, SHA-256 checked)")
    if not _is_exported(registry.export_folder(name)):
        out.note(f"next: edge-pc export {name}")


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="MODEL")
@option(
    "-o",
    "--output",
    "place",
    metavar="DIR",
    help="The folder to make; for llama.cpp the file.  [default for a pulled model: next to it]",
)
@option(
    "--bits",
    type=click.Choice([8, 4, 32]),
    default=8,
    show_default=True,
    help="Bits per weight; fewer make a smaller and less exact model.",
)
@option(
    "--quant",
    type=click.Choice(["q8_0", "q4_0"]),
    default="q8_0",
    show_default=True,
    help="Number type of the weights, with --backend llamacpp.",
)
@option("--force", is_flag=True, help="Export again, even if the result is already there.")
@backend_option
@output_options
def export(
    model: str, place: str | None, bits: Bits, quant: str, force: bool, backend: str, output: OutputOptions
) -> None:
    """Make a model ready to run.

    MODEL is a pulled model's name, a GGUF file, or a Hugging Face folder (config.json, safetensors, tokenizer.json).
    llama.cpp runs GGUF files as they are. For it, export converts the weights to a type that it has fast kernels for.
    """
    from edge_pc.backends import entry
    from edge_pc.models import registry

    if place is None and model not in registry.REGISTRY:
        raise click.UsageError("say where to write it: -o DIR")
    if entry(backend).model_kind == "gguf":
        _requantize(model, place, quant, force, Output(output))
    else:
        _export(model, place, bits, force, Output(output))


def _requantize(model: str, place: str | None, quant: str, force: bool, out: Output) -> None:
    """A GGUF file with other weights."""
    from edge_pc.backends.llamacpp.requantize import requantize, requantized_path
    from edge_pc.models import registry

    source = registry.locate(model, "gguf")
    target = Path(place) if place is not None else requantized_path(source, quant)
    if place is None and not force and target.is_file():
        out.note(f"{model} is already exported: {target}")
    else:
        out.note(f"requantizing {source} to {quant}")
        requantize(source, target, quant)
        out.note(f"{model} is exported to {target} ({format_size(target.stat().st_size)})")
    out.note(f"use it with: --backend llamacpp --model {target}")


def _export(model: str, folder: str | None, bits: Bits, force: bool, out: Output) -> None:
    """An exported folder."""
    from edge_pc.export import export as export_model
    from edge_pc.models import registry

    source = registry.export_source(model)
    target = Path(folder) if folder is not None else registry.export_folder(model, bits)
    if folder is None and not force and _is_exported(target):
        out.note(f"{model} is already exported: {target}")
        return
    with out.progress(f"exporting {model}") as update:
        export_model(source, target, bits=bits, progress=update)
    out.note(f"{model} is exported to {target}")
    if model not in registry.REGISTRY or target != registry.export_folder(model):
        out.note(f"use it with: --model {target}")


def _is_exported(folder: Path) -> bool:
    """Whether this version's export is there, and every file in it is as it was written."""
    from edge_pc.models.spec import read_spec

    try:
        spec, changed = read_spec(folder)
    except ModelError:
        return False
    return spec.exporter == f"edge-pc {__version__}" and not changed
