"""Pages: as HTML with everything inside (no script, no font, no picture from elsewhere), or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_pc.bench.charts import Picture
from edge_pc.bench.facts import machine_table, processor
from edge_pc.bench.report import Report
from edge_pc.bench.tables import Table

TEMPLATE = Path(__file__).with_name("page.html.jinja")

_COSTS = (
    "Reuse also costs disk, and its first use costs the encoding. It gains little for short modules, and when little "
    "of a prompt comes from modules. The time of later tokens does not change."
)


@dataclass(frozen=True, slots=True)
class Part:
    """A heading and what stands below it, in this order."""

    heading: str
    pictures: Sequence[Picture] = ()
    about: str = ""
    tables: Sequence[Table] = ()
    code: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A page."""

    title: str
    intro: str
    parts: Sequence[Part]

    def html(self) -> str:
        from jinja2 import Environment, StrictUndefined

        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        text: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(page=self)
        return text

    def markdown(self, picture: str) -> str:
        """All parts; in place of their pictures the name of one file."""
        blocks = [f"# {self.title}", self.intro]
        for part in self.parts:
            blocks += [f"## {part.heading}", *[f"![{each.caption}]({picture})" for each in part.pictures]]
            blocks += [part.about, *(table.markdown() for table in part.tables)]
        return "\n\n".join(filter(None, blocks)) + "\n"


def page(report: Report) -> Document:
    """The page of a report: what its sections hold, whoever filled them."""
    tables = {name: report.tables(name) for name in report.sections}
    parts = [
        Part(section["title"], report.pictures(name), section["about"], [t for t in tables[name] if not t.worse])
        for name, section in report.sections.items()
    ]
    worse = [table for found in tables.values() for table in found if table.worse]
    commands = [f"{name}: {section['command']}" for name, section in report.sections.items()]
    parts += [
        Part("Where reuse is worse", about=_COSTS, tables=worse),
        Part("Machine", tables=[machine_table([report])]),
        Part("How it was made", code=commands),
    ]
    model, created = report.settings["model"]["name"], report.data["created"]
    intro = f"{processor(report)}, model {model}, measured {created}."
    return Document("What reuse gives on this machine", intro, parts)
