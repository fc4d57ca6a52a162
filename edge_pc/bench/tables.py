"""A table as data: benches make them, reports hold them, pages and terminals show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from edge_pc.backends import BACKENDS

# Backend → what people call it.
TITLES = {name: entry.title for name, entry in BACKENDS.items()}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        title: what it shows.
        columns: headings; those that start with `>` are of numbers, which stand to the right.
        rows: the cells of each row, as many as there are columns.
        note: stands below it.
        worse: it shows where reuse is worse; a page puts such tables together.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    worse: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[T],
        columns: Mapping[str, Callable[[T], str]],
        note: str = "",
        *,
        worse: bool = False,
    ) -> Table:
        """A row for each item; `columns` says what stands under each heading."""
        rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
        return cls(title, tuple(columns), rows, note, worse)

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """Each column's name, and whether it holds numbers."""
        return [(column.lstrip("> "), column.startswith(">")) for column in self.columns]

    def markdown(self) -> str:
        """The table as Markdown, its title above it and its note below."""
        rule = [" ---: " if number else " --- " for _, number in self.headings]
        lines = [f"**{self.title}**", "", _markdown_row([name for name, _ in self.headings]), f"|{'|'.join(rule)}|"]
        lines += map(_markdown_row, self.rows)
        return "\n".join(lines + (["", self.note] if self.note else []))


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def milliseconds(value: float) -> str:
    """As many digits as matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
