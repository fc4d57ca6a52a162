"""How KV states lie in an array: each head's tokens from the start of a page on, so that files can be mapped."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from edge_pc.backends.base import IntArray
from edge_pc.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Arrays `[layers, 2, kv_heads, tokens, head_dim]`, keys at index 0 of the second axis.

    A head's row of tokens is padded with zeros to whole pages. Zeros stand before it, too, so many that the row of a
    cell is congruent to its position modulo `page_tokens`: where cells lie at their positions, pages of the array fit
    pages of the arena.

    Attributes:
        dtype: of the array, `float32` or `float16`.
        page_tokens: tokens whose rows of float32 `[tokens, head_dim]` fill whole pages.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int

    @property
    def name(self) -> str:
        return f"onnx-2-{self.dtype}-{self.page_tokens}"

    def lead(self, position_ids: IntArray) -> int:
        """The row of the first cell in the array that holds cells at `position_ids`."""
        return int(position_ids[0]) % self.page_tokens if len(position_ids) else 0

    def array_shape(self, position_ids: IntArray) -> tuple[int, ...]:
        """The shape of the array that holds cells at `position_ids`, padding included."""
        tokens = self.padded(self.lead(position_ids) + len(position_ids))
        return (self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def padded(self, tokens: int) -> int:
        """`tokens`, rounded up to whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens


def paged_layout(spec: ModelSpec, dtype: str) -> PagedLayout:
    """The layout of a model's KV states."""
    return PagedLayout(spec.layers, spec.kv_heads, spec.head_dim, dtype, tokens_per_page(spec.head_dim))


def tokens_per_page(head_dim: int) -> int:
    """The smallest number of tokens whose rows of float32 `[tokens, head_dim]` fill whole pages."""
    return int(np.lcm(mmap.PAGESIZE, head_dim * 4)) // (head_dim * 4)
