"""`python -m benchmarks paper`: bytes of KV states per token, by calculation, for the models of the paper's Table 2.

The paper's figures are, in MiB cut off after two digits,

    2 (K and V) × layers × heads × head_dim × 2 bytes

with *all* attention heads counted, thus layers × hidden size × 4 bytes. Models that share K and V among heads (grouped
or multi-query attention: Falcon 40B, Llama 2 70B) need to store only the KV heads: 16 and 8 times less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import PaperRow
from edge_pc.bench.tables import Table
from edge_pc.bench.work import Bench, Work

_BYTES_EACH = 2  # 16 bit
_MIB = 1024 * 1024

# Name, layers, heads, KV heads, size of a head (all from published configurations), and the paper's figure.
PAPER_MODELS = (
    ("BERT", 12, 12, 12, 64, 0.03),
    ("Falcon 1B", 24, 32, 32, 64, 0.18),
    ("Llama 7B", 32, 32, 32, 128, 0.50),
    ("Llama 13B", 40, 40, 40, 128, 0.78),
    ("MPT 7B", 32, 32, 32, 128, 0.50),
    ("MPT 30B", 48, 64, 64, 112, 1.31),
    ("Falcon 40B", 60, 128, 8, 64, 1.87),
    ("Llama 70B", 80, 64, 8, 128, 2.50),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """There is nothing to choose."""

    @classmethod
    def quick(cls) -> Settings:
        return cls()


def calculated() -> list[PaperRow]:
    """A row for each model."""
    rows = []
    for model, layers, heads, kv_heads, head_dim, figure in PAPER_MODELS:
        per_head = 2 * layers * head_dim * _BYTES_EACH
        rows.append(
            PaperRow(
                key=model,
                model=model,
                figure_mb=figure,
                calculated_mb=math.floor(per_head * heads / _MIB * 100) / 100,
                bytes_per_token=per_head * heads,
                stored_bytes_per_token=per_head * kv_heads,
            )
        )
    return rows


def measure(work: Work[PaperRow], settings: Settings) -> None:
    for row in calculated():
        work.section.add(row)


def tables(rows: Sequence[PaperRow]) -> list[Table]:
    columns = {
        "model": lambda row: row.model,
        "> paper, MB per token": lambda row: f"{row.figure_mb:.2f}",
        "> calculated": lambda row: f"{row.calculated_mb:.2f}",
        "> bytes that need to be stored": lambda row: f"{row.stored_bytes_per_token:,}",
    }
    note = (
        "16 bit. The paper counts all attention heads: 2 × layers × heads × head size × 2 bytes, in MiB cut off after "
        "two digits. Models with grouped or multi-query attention need to store their KV heads only (last column)."
    )
    return [Table.of("Bytes per token of the models in the paper's Table 2", rows, columns, note)]


BENCH = Bench(
    title="Bytes per token in the paper",
    row=PaperRow,
    settings=Settings,
    measure=measure,
    tables=tables,
    needs_model=False,
)
