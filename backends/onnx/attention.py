"""How much tokens attend to cells, from their queries and the cells' keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

# The last tokens of a prompt, which ask for something, say enough.
MAX_QUERIES = 64


def mean_attention(
    queries: Mapping[int, NDArray[np.float32]], keys: Mapping[int, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The weights of attention, averaged over tokens, heads and layers, float32 `[cells]`; they add up to 1.

    Every token is taken to see every cell, and nothing else.

    Args:
        queries: layer → float32 `[n, heads × head_dim]`, rotated as the keys are.
        keys: layer → float32 `[kv_heads, cells, head_dim]`.
    """
    layers = []
    for layer, key in keys.items():
        kv_heads, _, head_dim = key.shape
        query = queries[layer].reshape(len(queries[layer]), kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        scores = query.reshape(kv_heads, -1, head_dim) @ key.transpose(0, 2, 1)
        scores *= 1 / np.sqrt(np.float32(head_dim))
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        rows = 1 / (scores.sum(axis=2) * scores.shape[0] * scores.shape[1])
        layers.append(np.einsum("hnc,hn->c", scores, rows))
    mean: NDArray[np.float32] = np.mean(layers, axis=0, dtype=np.float32)
    return mean
