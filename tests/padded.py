"""A KV layout for tests of the store, which does not care what is in an array."""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.backends.base import IntArray


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Arrays of `shape` with `token_axis` as long as the tokens, padded to a multiple of `token_multiple`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    token_axis: int
    token_multiple: int = 1

    def array_shape(self, position_ids: IntArray) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.token_axis] *= -(-len(position_ids) // self.token_multiple) * self.token_multiple
        return tuple(shape)
