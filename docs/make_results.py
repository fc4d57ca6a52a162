"""Writes the tables in `docs/results/README.md` from the reports in the folders beside it (`make docs`)."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from edge_pc.bench.answer_tables import accuracy_tables, fidelity_table
from edge_pc.bench.report import Report
from edge_pc.bench.tables import Table, encode_table, memory_tables
from edge_pc.bench.ttft_tables import length_tables

RESULTS = Path(__file__).resolve().parent / "results"
README = RESULTS / "README.md"
# <!-- results: TABLES FOLDER -->
BLOCK = re.compile(r"(<!-- results: (\S+) (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def tables(report: Report, name: str) -> list[Table]:
    """The tables that stand in the block `name`."""
    makers = {
        "ttft": ("ttft", length_tables),
        "encode": ("encode", lambda section: [encode_table(section)]),
        "memory": ("memory", lambda section: memory_tables(section)[:1]),
        "fidelity": ("fidelity", lambda section: [fidelity_table(section)]),
        "accuracy": ("accuracy", lambda section: accuracy_tables(section)[:2]),
        "lost": ("accuracy", lambda section: accuracy_tables(section)[2:]),
    }
    section_name, make = makers[name]
    return make(report.sections[section_name])


def with_tables(readme: str) -> str:
    """The text with all its blocks made anew."""

    load = cache(lambda folder: Report.load(RESULTS / folder / "report.json"))

    def block(match: re.Match[str]) -> str:
        text = "\n\n".join(table.markdown() for table in tables(load(match[3]), match[2]))
        return f"{match[1]}{text}\n{match[4]}"

    return BLOCK.sub(block, readme)


def main() -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote the tables in {README.relative_to(RESULTS.parent.parent)}\n")


if __name__ == "__main__":
    main()
