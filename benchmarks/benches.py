"""The table of experiments; `edge_pc.bench.benches` says what an entry is."""

from __future__ import annotations

from benchmarks.rows import AccuracyRow, CaseRow, FidelityRow, PaperRow, PrefixRow, RatesRow
from edge_pc.bench.benches import Measuring

EXPERIMENTS = {
    "rates": Measuring(
        help="How fast this machine moves memory and computes, and what of the times to first token that explains.",
        module="benchmarks.explain",
        row=RatesRow,
        title="What the times are made of",
    ),
    "prefix": Measuring(
        help="Time to the first token with llama.cpp's own ways to reuse a prefix.",
        module="benchmarks.prefix_ways",
        row=PrefixRow,
        title="llama.cpp's own ways",
        about="Each reuses one prefix as it was; none composes modules. Times are medians over the same tokens and the "
        "same file as those of reuse on llama.cpp.",
    ),
    "paper": Measuring(
        help="Bytes per token of the models in the paper's Table 2, by calculation.",
        module="benchmarks.paper_models",
        row=PaperRow,
        title="Bytes per token in the paper",
        needs_model=False,
    ),
    "cases": Measuring(
        help="The paper's applications on the ready schemas: times, and both answers.",
        module="benchmarks.cases",
        row=CaseRow,
        title="Applications",
    ),
    "fidelity": Measuring(
        help="How close reuse is to full prefill, and under which conditions it is not.",
        module="benchmarks.fidelity",
        row=FidelityRow,
        title="Fidelity",
        one_backend=True,
    ),
    "accuracy": Measuring(
        help="Right answers with reuse and without, on questions about documents.",
        module="benchmarks.accuracy",
        row=AccuracyRow,
        title="Accuracy",
        one_backend=True,
    ),
}
