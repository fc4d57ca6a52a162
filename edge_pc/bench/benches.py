"""The table of benches: whatever `edge-pc bench` can measure is one entry, and nothing else lists them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_pc.bench.work import Bench


@dataclass(frozen=True, slots=True)
class BenchEntry:
    """A bench before it is loaded.

    Attributes:
        help: one line, for the command.
        module: has it as `BENCH`.
    """

    help: str
    module: str

    def load(self) -> Bench[Any]:
        bench: Bench[Any] = import_module(self.module).BENCH
        return bench


BENCHES = {
    "ttft": BenchEntry("Time to the first token: reuse, full prefill, and the limit.", "edge_pc.bench.ttft"),
    "encode": BenchEntry("Speed of encoding a schema, against full prefill of as many tokens.", "edge_pc.bench.encode"),
    "memory": BenchEntry(
        "Bytes per token, disk use, and what prompts that are open at once share.", "edge_pc.bench.memory"
    ),
}
