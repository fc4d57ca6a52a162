"""The tree that `edge-pc schema show` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from edge_pc.compose.length import ANONYMOUS
from edge_pc.pml.model import Module, Parameter, Scaffold, Turn, Union, Walk

if TYPE_CHECKING:
    from edge_pc.cli.schema import Explained
    from edge_pc.compose.schema_layout import Slot


def schema_tree(explained: Explained) -> Tree:
    """A schema's modules, unions, scaffolds, turns and parameters as a tree."""
    layout = explained.layout
    anonymous = len(layout.modules[""].token_ids) + len(layout.closing_ids)
    tree = Tree(
        Text.assemble(
            (layout.name, "bold"),
            f"  {layout.length} of the model's {explained.spec.max_positions} positions; "
            f"{anonymous} tokens of anonymous text, in every prompt",
        )
    )
    _Branches(explained).nodes(layout.schema.children, "", tree)
    return tree


class _Branches(Walk["Tree"]):
    """Grows a tree of a schema; the place is the branch to grow from. Plain text is counted with its module."""

    def __init__(self, explained: Explained) -> None:
        self._explained = explained

    def parameter(self, node: Parameter, path: str, place: Tree) -> Tree:
        slots = self._explained.layout.modules[path].slots
        place.add(_slot_line(next(slot for slot in slots if slot.name == node.name), node.default))
        return place

    def module(self, node: Module, path: str, place: Tree) -> Tree:
        super().module(node, path, place.add(_module_line(node, self._explained)))
        return place

    def union(self, node: Union, path: str, place: Tree) -> Tree:
        super().union(node, path, place.add(f"union: at most one of {len(node.members)}"))
        return place

    def scaffold(self, node: Scaffold, path: str, place: Tree) -> Tree:
        super().scaffold(node, path, place.add(f"scaffold {node.name}: imported together they see each other"))
        return place

    def turn(self, node: Turn, path: str, place: Tree) -> Tree:
        super().turn(node, path, place.add(f"{node.role} turn"))
        return place


def _module_line(module: Module, explained: Explained) -> Any:
    layout = explained.layout.modules[module.path]
    last = layout.start + max(layout.length - 1, 0)
    parts = [f"  positions {layout.start} to {last}, {len(layout.token_ids)} own tokens"]
    if not module.cache:
        parts.append("computed for each prompt")
    else:
        sees = ", ".join(f"{tokens} of {path or ANONYMOUS}" for path, tokens in explained.sees(module.path))
        parts.append(f"sees {sees}" if sees else "sees only itself")
    return Text.assemble((module.name, "bold cyan"), "; ".join(parts))


def _slot_line(slot: Slot, default: str | None) -> Any:
    last = slot.start + slot.length - 1
    needed = "an argument is needed" if default is None else f"default {default!r}"
    return Text.assemble("parameter ", (slot.name, "bold magenta"), f"  positions {slot.start} to {last}; {needed}")
