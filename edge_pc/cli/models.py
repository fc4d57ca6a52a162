"""`edge-pc pull`, `models` and `export`: get a model, see what is there, make one ready to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_pc.cli.getting import export_model, get, is_exported
from edge_pc.cli.options import GroupedCommand, OutputOptions, backend_option, json_option, option, output_options
from edge_pc.cli.output import Output
from edge_pc.system.sizes import format_size

if TYPE_CHECKING:
    from edge_pc.export import Bits


@click.command(cls=GroupedCommand)
@click.argument("name", metavar="NAME")
@output_options
def pull(name: str, output: OutputOptions) -> None:
    """Download a model by its name: smollm2, or one of the Hugging Face Hub.

    ORG/NAME brings a model in safetensors, ORG/NAME:Q4_K_M a GGUF file of a repository, and ORG/NAME@REVISION another
    revision than the newest. The Hub's own cache, login (HF_TOKEN), mirror (HF_ENDPOINT) and offline mode
    (HF_HUB_OFFLINE) are used. Files that came whole before a download was cut off are kept.

    A model that is already there is only checked.
    """
    from edge_pc.models import registry

    out = Output(output)
    if not registry.has_name(name):
        registry.registered(name)
    get(name, out)
    if not is_exported(registry.export_folder(name)):
        out.note(f"next: edge-pc export {name}")


@click.command(cls=GroupedCommand)
@json_option
@output_options
def models(as_json: bool, output: OutputOptions) -> None:
    """List the models on this machine, and those that can be pulled.

    Sizes are those on disk; the context is how many tokens prompt and answer together may have.
    """
    from edge_pc.cli.shelf import known, on_this_machine

    out = Output(output)
    here = on_this_machine()
    if as_json:
        out.json({"here": [asdict(each) for each in here], "known": known()})
        return
    if here:
        out.table(
            ["model", "form", ">size", ">context", "place"],
            [(each.name, each.form, format_size(each.nbytes), each.context, each.place) for each in here],
        )
    else:
        out.note("no model is on this machine yet")
    out.note("\n" + known())


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

    MODEL is the name of a pulled model, a GGUF file, or a Hugging Face folder (config.json, safetensors,
    tokenizer.json). llama.cpp runs GGUF files as they are; for it, export converts the weights to a type that it has
    fast kernels for.
    """
    from edge_pc.backends import entry
    from edge_pc.models import registry

    if place is None and not registry.has_name(model):
        raise click.UsageError("say where to write it: -o DIR")
    if entry(backend).model_kind == "gguf":
        _requantize(model, place, quant, force, Output(output))
    else:
        export_model(model, place, bits, Output(output), force=force)


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
