"""Bytes of KV states per token, by calculation, for the models of the paper's Table 2.

The paper's figures are, in MiB cut off after two digits,

    2 (K and V) × layers × heads × head_dim × 2 bytes

with *all* attention heads counted, thus layers × hidden size × 4 bytes. Models that share K and V among heads (grouped
or multi-query attention: Falcon 40B, Llama 2 70B) need to store only the KV heads: 16 and 8 times less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BYTES_EACH = 2  # 16 bit
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model of Table 2; `figure` is what the paper prints, in MB per token."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    figure: float

    @property
    def paper_bytes(self) -> int:
        """Bytes per token as the paper counts: all heads."""
        return 2 * self.layers * self.heads * self.head_dim * _BYTES_EACH

    @property
    def stored_bytes(self) -> int:
        """Bytes per token that need to be stored: KV heads only."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES_EACH

    @property
    def paper_mb(self) -> float:
        """`paper_bytes` in MiB, cut off after two digits."""
        return math.floor(self.paper_bytes / _MIB * 100) / 100


# Sizes from the models' published configurations.
PAPER_MODELS = (
    PaperModel("BERT", 12, 12, 12, 64, 0.03),
    PaperModel("Falcon 1B", 24, 32, 32, 64, 0.18),
    PaperModel("Llama 7B", 32, 32, 32, 128, 0.50),
    PaperModel("Llama 13B", 40, 40, 40, 128, 0.78),
    PaperModel("MPT 7B", 32, 32, 32, 128, 0.50),
    PaperModel("MPT 30B", 48, 64, 64, 112, 1.31),
    PaperModel("Falcon 40B", 60, 128, 8, 64, 1.87),
    PaperModel("Llama 70B", 80, 64, 8, 128, 2.50),
)
