"""The table of experiments; `edge_pc.bench.benches` says what an entry is."""

from __future__ import annotations

from edge_pc.bench.benches import BenchEntry

EXPERIMENTS = {
    "rates": BenchEntry(
        "How fast this machine moves memory and computes, and what of the times to first token that explains.",
        "benchmarks.explain",
    ),
    "prefix": BenchEntry(
        "Time to the first token with llama.cpp's own ways to reuse a prefix.", "benchmarks.prefix_ways"
    ),
    "paper": BenchEntry(
        "Bytes per token of the models in the paper's Table 2, by calculation.", "benchmarks.paper_models"
    ),
    "cases": BenchEntry("The paper's applications on the ready schemas: times, and both answers.", "benchmarks.cases"),
    "fidelity": BenchEntry(
        "How close reuse is to full prefill, and under which conditions it is not.", "benchmarks.fidelity"
    ),
    "accuracy": BenchEntry(
        "Right answers with reuse and without, on questions about documents.", "benchmarks.accuracy"
    ),
}
