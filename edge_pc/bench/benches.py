"""The table of benches: whatever `edge-pc bench` can run is one entry, and nothing else lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from edge_pc.bench.rows import EncodeRow, MemoryRow, Row, TtftRow


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench.

    Attributes:
        help: one line, for the command.
        module: where it is, imported when it runs.
        needs_model: it measures a model; else it reads reports.
    """

    help: str
    module: str
    needs_model: bool = False

    def load(self) -> Any:
        """The module."""
        return import_module(self.module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring(Bench):
    """A bench that fills the section of its name in a report.

    Its module has `Settings` (a dataclass with a classmethod `quick`), `measure(work, settings)`, which adds rows, and
    `tables(rows)`; and where a page is to have pictures, `pictures(rows)`.

    Attributes:
        row: the dataclass of its rows.
        title: heads the section on a page.
        about: what a reader of the section has to know.
        one_backend: it measures the first backend only.
    """

    row: type[Row]
    title: str
    about: str = ""
    needs_model: bool = True
    one_backend: bool = False


_TIMED = """The time to the first token (TTFT) runs from the submission of a prompt to its first token: reading and
checking the prompt, tokenizing it, finding stored states, placing them, and the forward pass of what is computed. It
does not include the start of the process, loading the model and the schema, or encoding, which is timed on its own. The
model is warm. Reuse is timed after another prompt was served, so that states are really placed; the limit computes the
same tokens over cells that are already in place, without reading a prompt. Full prefill computes all tokens at the best
settings that a short search found. Ways are timed in turn, in changing order, after a warm-up; the quartiles show the
spread, and the report keeps every sample."""

BENCHES: Mapping[str, Bench] = {
    "ttft": Measuring(
        help="Time to the first token: reuse, full prefill, and the limit.",
        module="edge_pc.bench.ttft",
        row=TtftRow,
        title="Time to the first token",
        about=" ".join(_TIMED.split()),
    ),
    "encode": Measuring(
        help="Speed of encoding a schema, against full prefill of as many tokens.",
        module="edge_pc.bench.encode",
        row=EncodeRow,
        title="Encoding",
    ),
    "memory": Measuring(
        help="Bytes per token, disk use, and what prompts that are open at once share.",
        module="edge_pc.bench.memory",
        row=MemoryRow,
        title="Memory",
    ),
    "report": Bench("Make one HTML page of a report, with its pictures inside.", "edge_pc.bench.page"),
    "compare": Bench("Compare machines: times, and their ratios.", "edge_pc.bench.comparison"),
}


def measuring(benches: Mapping[str, Bench]) -> dict[str, Measuring]:
    """The benches that fill a section, in order."""
    return {name: bench for name, bench in benches.items() if isinstance(bench, Measuring)}
