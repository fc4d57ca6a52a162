"""A neutral view of a llama-family model: what the graph builder needs, whatever file the weights come from.

Every tensor has one canonical name and a shape that follows from the config. Names, completeness and shapes are
checked when a model is opened, so that an export fails before it has done any work; data is loaded on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import ModelError
from edge_pc.models.positions import RotaryEncoding
from edge_pc.models.spec import ModelSizes
from edge_pc.system.sizes import format_size

FloatArray = NDArray[np.float32]

# Of the cosines and sines of all positions, which the graph holds: 2^20 positions with heads of 128 dimensions.
_MAX_ROTARY_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LlamaConfig(ModelSizes):
    """Sizes and constants of a llama-family model.

    Attributes:
        position: by rotation.
        intermediate_size: of the feed-forward network.
        norm_epsilon: of every RMS norm.
        tied_embeddings: the output matrix is the embedding matrix; there is no tensor `lm_head`.
    """

    position: RotaryEncoding
    intermediate_size: int
    norm_epsilon: float
    tied_embeddings: bool

    def __post_init__(self) -> None:
        sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"the model's head_dim is {self.head_dim}, expected an even number")
        if self.position.dims != self.head_dim:
            raise ModelError(
                f"only {self.position.dims} of each head's {self.head_dim} dimensions are rotated; "
                "expected all of them, as in every llama model"
            )
        nbytes = self.max_positions * self.head_dim * 4
        if nbytes > _MAX_ROTARY_BYTES:
            raise ModelError(
                f"the model's max_positions is {self.max_positions}: the angles of so many positions would take "
                f"{format_size(nbytes)}, expected at most {format_size(_MAX_ROTARY_BYTES)}"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's canonical name and shape, in the order of computation; matrices are `[out, in]`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "attn_norm": (hidden,),
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "mlp_norm": (hidden,),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        shapes.update({f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()})
        shapes["norm"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        return shapes


class LlamaWeights:
    """The tensors of a model under their canonical names, as float32.

    Args:
        config: sizes; they decide which tensors there must be, and their shapes.
        stored: canonical name → shape as found in the file.
        read: loads the tensor with this canonical name; any dtype that converts to float32.
        source: the file or folder, for errors.

    Raises:
        ModelError: a tensor is missing, not known, or of another shape than the config says.
    """

    def __init__(
        self,
        config: LlamaConfig,
        stored: Mapping[str, tuple[int, ...]],
        read: Callable[[str], NDArray[Any]],
        source: Path,
    ) -> None:
        self.config = config
        self.source = source
        self._read = read
        self._shapes = config.shapes()
        unknown = sorted(stored.keys() - self._shapes.keys())
        if unknown:
            raise ModelError(
                f"{source}: {len(unknown)} tensors are no part of a llama model without biases and experts: "
                + _listed(unknown)
            )
        missing = [name for name in self._shapes if name not in stored]
        if missing:
            raise ModelError(f"{source}: {len(missing)} tensors are missing: {_listed(missing)}")
        for name, expected in self._shapes.items():
            if stored[name] != expected:
                raise ModelError(f"{source}: tensor {name!r} has shape {list(stored[name])}, expected {list(expected)}")

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, in the order of computation."""
        return tuple(self._shapes)

    def tensor(self, name: str) -> FloatArray:
        """Load one tensor: float32, C order, shape `config.shapes()[name]`; matrices are `[out, in]`.

        Raises:
            ModelError: the file does not hold what it announced, or values are not finite.
        """
        array: FloatArray = np.ascontiguousarray(self._read(name), dtype=np.float32)
        expected = self._shapes[name]
        if array.shape != expected:
            raise ModelError(f"{self.source}: tensor {name!r} has shape {list(array.shape)}, expected {list(expected)}")
        if not np.isfinite(array).all():
            raise ModelError(f"{self.source}: tensor {name!r} holds values that are not finite")
        return array


def _listed(names: list[str], limit: int = 5) -> str:
    return ", ".join(name[:80] for name in names[:limit]) + (", …" if len(names) > limit else "")
