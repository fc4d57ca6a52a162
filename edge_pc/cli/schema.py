"""`edge-pc schema`: explain a schema before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_pc.cli.options import GroupedCommand, OutputOptions, json_option, model_option, output_options
from edge_pc.cli.output import Output, read_stdin

if TYPE_CHECKING:
    from rich.tree import Tree

    from edge_pc.layout import SchemaLayout
    from edge_pc.model_spec import ModelSpec
    from edge_pc.pml import Node, Schema
    from edge_pc.tokenizer import Tokenizer


@click.group()
def schema() -> None:
    """Check a schema, or show its modules, positions and lengths."""
