"""Writes the tables in `docs/results/README.md` from the reports in the folders beside it (`make docs`)."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from edge_pc.bench.report import Report

RESULTS = Path(__file__).resolve().parent / "results"
README = RESULTS / "README.md"
# <!-- results: SECTION FOLDER: WORDS OF TITLES, OF TITLES -->
BLOCK = re.compile(r"(<!-- results: (\S+) (\S+): (.+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def with_tables(readme: str) -> str:
    """The text with all its blocks made again: of a section of a report, the tables whose titles hold the words."""

    load = cache(lambda folder: Report.load(RESULTS / folder / "report.json"))

    def block(match: re.Match[str]) -> str:
        begin, section, folder, words, end = match.groups()
        tables = load(folder).tables(section)
        wanted = [table for word in words.split(", ") for table in tables if word in table.title]
        return begin + "\n\n".join(table.markdown() for table in wanted) + f"\n{end}"

    return BLOCK.sub(block, readme)


def main() -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote the tables in {README.relative_to(RESULTS.parent.parent)}\n")


if __name__ == "__main__":
    main()
