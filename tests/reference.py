"""An independent llama in numpy, float64, that says for every token exactly which cells it sees.

It knows nothing of caches, slots or runs: the semantics are one matrix of what is visible to what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tiny
from numpy.typing import NDArray

from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import ROOT, SchemaLayout

Floats = NDArray[np.float64]
# Of each layer the key, not rotated, and the value: `[kv_heads, head_dim]`.
Cell = list[tuple[Floats, Floats]]


class Reference:
    """The logits of a tiny model, given what each token sees.

    Attributes:
        attention: the weights of the last tokens that were computed, by layer, `[heads, n, m + n]`.
    """

    attention: list[Floats]

    def __init__(self, model: tiny.TinyModel = tiny.TinyModel()) -> None:
        self._model = model
        self._weights = {name: array.astype(np.float64) for name, array in tiny.tensors(model).items()}

    def logits(
        self, token_ids: NDArray[np.int32], position_ids: NDArray[np.int32], visible: NDArray[np.bool_]
    ) -> Floats:
        """Logits `[n, vocab]` of n tokens; `visible[i, j]`: token i sees the cell of token j."""
        return self.over([], token_ids, position_ids, visible)[0]

    def over(
        self,
        past: Sequence[Cell],
        token_ids: NDArray[np.int32],
        position_ids: NDArray[np.int32],
        visible: NDArray[np.bool_],
    ) -> tuple[Floats, list[Cell]]:
        """Logits of n tokens, and their cells, over cells that are there already.

        Args:
            past: m cells; they have their positions anew in `position_ids`, and stand first in it.
            token_ids: of the n tokens.
            position_ids: of all `[m + n]`.
            visible: `[n, m + n]`.
        """
        model, w = self._model, self._weights
        x = w["embed"][token_ids]
        made: list[Cell] = [[] for _ in token_ids]
        new = position_ids[len(past) :]
        self.attention = []
        for layer in range(model.layers):
            name = f"layers.{layer}."
            normed = _norm(x, w[name + "attn_norm"])
            q, k, v = (self._heads(normed @ w[name + part].T) for part in "qkv")
            for token, cell in enumerate(made):
                cell.append((k[:, token], v[:, token]))
            k, v = (
                np.concatenate([*(cell[layer][part][:, np.newaxis] for cell in past), mine], axis=1)
                for part, mine in enumerate((k, v))
            )
            q, k = self._rotated(q, new), self._rotated(k, position_ids)
            x = x + self._attend(q, k, v, visible) @ w[name + "o"].T
            normed = _norm(x, w[name + "mlp_norm"])
            gate = normed @ w[name + "gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[name + "up"].T)) @ w[name + "down"].T
        logits: Floats = _norm(x, w["norm"]) @ w["embed"].T
        return logits, made

    def _heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1, self._model.head_dim).swapaxes(0, 1)

    def _rotated(self, x: Floats, position_ids: NDArray[np.int32]) -> Floats:
        half = self._model.head_dim // 2
        angles = np.outer(position_ids, self._model.rope_base ** (-np.arange(half) / half))
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attend(self, q: Floats, k: Floats, v: Floats, visible: NDArray[np.bool_]) -> Floats:
        share = self._model.heads // self._model.kv_heads
        k, v = np.repeat(k, share, axis=0), np.repeat(v, share, axis=0)
        scores = np.where(visible, q @ k.swapaxes(1, 2) / np.sqrt(self._model.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self.attention.append(weights)
        joined: Floats = (weights @ v).swapaxes(0, 1).reshape(len(visible), -1)
        return joined


def _norm(x: Floats, weight: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight
    return normed


# (path of the module that is encoded, path of a module before it) → whether the first sees the second's own text
Sees = Callable[[str, str], bool]


def guaranteed(layout: SchemaLayout) -> Sees:
    """A module sees itself and the modules around it."""
    return lambda path, other: other == path or other in layout.ancestors(path)


def isolated(path: str, other: str) -> bool:
    return path == other


def jointly(sees: Sees, *group: str) -> Sees:
    """As `sees`, and the modules of `group` see one another."""
    return lambda path, other: (path in group and other in group) or sees(path, other)


def expected_logits(
    reference: Reference,
    prompt: LaidOut,
    sees: Sees,
    placeholders: dict[str, list[tuple[int, int]]] | None = None,
    *,
    at_least: int = 1,
) -> Floats:
    """First-token logits `[vocab]` of a prompt, by the rules alone.

    Args:
        at_least: cells that are computed for the prompt; where it has fewer, the last stored ones are computed again.
        sees: what the stored text of a module sees, besides being causal by position.
        placeholders: path → (position, token) of cells that its text sees while it is encoded, and nothing else does.
    """
    cells = []  # (position, token, owner or None for computed tokens, is a placeholder)
    reused = {path for encoding in prompt.encodings for path in encoding.paths}
    for path in reused:
        module = prompt.schema.modules[path]
        cells += [(p, t, path, False) for p, t in zip(module.position_ids, module.token_ids, strict=True)]
        cells += [(p, t, path, True) for p, t in (placeholders or {}).get(path, [])]
    cells += [(p, t, None, False) for p, t in zip(prompt.position_ids, prompt.token_ids, strict=True)]
    positions = sorted(p for p, _, _, placeholder in cells if not placeholder)
    recomputed = {positions[-1], *prompt.position_ids}
    recomputed |= set(positions[-at_least:]) if len(recomputed) < at_least else set()
    cells = [(p, t, None if p in recomputed and not filler else owner, filler) for p, t, owner, filler in cells]
    cells.sort(key=lambda cell: (cell[0], cell[3]))
    visible = np.zeros((len(cells), len(cells)), dtype=bool)
    for i, (position, _, owner, placeholder) in enumerate(cells):
        for j, (other_position, _, other_owner, other_placeholder) in enumerate(cells):
            if other_position > position or (other_placeholder and other_owner != owner):
                continue
            if owner is None:
                visible[i, j] = True
            elif other_owner is not None:
                visible[i, j] = sees(owner, other_owner) and (i == j or other_position < position or not placeholder)
    token_ids = np.array([token for _, token, _, _ in cells], dtype=np.int32)
    position_ids = np.array([position for position, _, _, _ in cells], dtype=np.int32)
    logits: Floats = reference.logits(token_ids, position_ids, visible)[-1]
    return logits


def served_logits(reference: Reference, prompt: LaidOut, *, at_least: int = 1) -> Floats:
    """First-token logits `[vocab]` of a prompt whose encodings are made one by one, each in its own positions, and are
    then put in their places.

    Args:
        at_least: as `expected_logits` takes it.
    """
    cells: dict[int, Cell] = {}
    for encoding, place in zip(prompt.encodings, prompt.places, strict=True):
        cells |= dict(zip(place.tolist(), _cells(reference, encoding), strict=True))
    tokens = dict(zip(prompt.computed_plan().position_ids.tolist(), prompt.in_position_order().tolist(), strict=True))
    everything = sorted(tokens)
    recomputed = {everything[-1], *prompt.position_ids.tolist()}
    recomputed |= set(everything[-at_least:]) if len(recomputed) < at_least else set()
    past = [position for position in everything if position not in recomputed]
    new = sorted(recomputed)
    positions = np.array([*past, *new], dtype=np.int32)
    visible = positions <= np.array(new)[:, np.newaxis]
    token_ids = np.array([tokens[position] for position in new], dtype=np.int32)
    logits, _ = reference.over([cells[position] for position in past], token_ids, positions, visible)
    return logits[-1]


def _cells(reference: Reference, encoding: Encoding) -> list[Cell]:
    """The cells of an encoding, made after those of its context."""
    past: list[Cell] = []
    positions: list[int] = []
    for prefix in encoding.context:
        past += _cells(reference, prefix.encoding)[: prefix.tokens]
        positions += prefix.encoding.encoded_position_ids[: prefix.tokens].tolist()
    new = encoding.run_position_ids
    all_positions = np.array([*positions, *new], dtype=np.int32)
    _, made = reference.over(past, encoding.token_ids, all_positions, all_positions <= new[:, np.newaxis])
    return [made[index] for index in encoding.keep]


__all__ = ["ROOT", "Reference", "expected_logits", "guaranteed", "isolated", "jointly", "served_logits"]
