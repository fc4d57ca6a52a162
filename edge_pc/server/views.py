"""Schemas and prompts as the page shows them: what can be chosen, and where each module lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import ROOT, SchemaLayout
from edge_pc.engine import Engine
from edge_pc.pml.model import Module, Parameter, Union, Walk
from edge_pc.runtime.prefill import found_for
from edge_pc.runtime.serving import Fidelity
from edge_pc.store import Miss

# Of a module's text, to tell what it is.
_SHOWN_CHARACTERS = 200


def schema_tree(layout: SchemaLayout) -> dict[str, Any]:
    """A schema's modules in document order, each with what it needs and what it excludes."""
    walk = _Tree(layout)
    walk.nodes(layout.schema.children, "", None)
    return {"name": layout.name, "length": layout.length, "chat": bool(layout.roles), "modules": walk.modules}


class _Tree(Walk[None]):
    def __init__(self, layout: SchemaLayout) -> None:
        self._layout = layout
        self._union: int | None = None
        self._unions = 0
        self.modules: list[dict[str, Any]] = []

    def module(self, node: Module, path: str, place: None) -> None:
        laid_out = self._layout.modules[node.path]
        union, self._union = self._union, None
        parameters = [child for child in node.children if isinstance(child, Parameter)]
        text = "".join(getattr(child, "text", "…") for child in node.children if not isinstance(child, Module | Union))
        self.modules.append(
            {
                "path": node.path,
                "name": node.name,
                "parent": laid_out.parent or None,
                "union": union,
                "start": laid_out.start,
                "tokens": len(laid_out.token_ids),
                "text": " ".join(text.split())[:_SHOWN_CHARACTERS],
                "parameters": [
                    {"name": each.name, "length": each.length, "default": each.default} for each in parameters
                ],
            }
        )
        super().module(node, path, place)

    def union(self, node: Union, path: str, place: None) -> None:
        self._unions += 1
        number = self._unions
        for member in node.members:
            self._union = number
            self.module(member, path, place)


def layout_of(prompt: LaidOut, engine: Engine, fidelity: Fidelity, tokens_per_s: float | None) -> dict[str, Any]:
    """Where each part of a prompt lies, and whether its states are stored."""
    found = {path: encoding for encoding, states in found_for(prompt, engine.encoder, fidelity)
             if not isinstance(states, Miss) for path in encoding.paths}  # fmt: skip
    placed = {path: prompt.places_of(path) for path in prompt.modules}
    rest = np.setdiff1d(prompt.position_ids, np.concatenate([*placed.values()]))
    parts: list[dict[str, Any]] = [
        {"path": prompt.schema.name if path == ROOT else path, "stored": path in found, **piece}
        for path, places in placed.items()
        for piece in _pieces(places)
    ]
    parts += [{"path": "", "stored": False, **piece} for piece in _pieces(rest)]
    parts.sort(key=lambda part: part["start"])
    estimate = None if tokens_per_s is None else round(prompt.tokens / tokens_per_s * 1e3, 1)
    return {
        "end": prompt.end,
        "tokens": prompt.tokens,
        "max_positions": engine.spec.max_positions,
        "full_prefill_estimate_ms": estimate,
        "parts": parts,
    }


def _pieces(places: NDArray[Any]) -> Iterator[dict[str, int]]:
    """The runs of positions without a gap."""
    if len(places):
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield {"start": int(run[0]), "tokens": len(run)}
