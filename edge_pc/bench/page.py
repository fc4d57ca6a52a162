"""`bench report`: one report as one HTML page."""

from __future__ import annotations

from edge_pc.bench.document import Document, Part
from edge_pc.bench.facts import machine_table, processor
from edge_pc.bench.report import Report

_COSTS = (
    "Reuse also costs disk, and its first use costs the encoding. It gains little for short modules, and when little "
    "of a prompt comes from modules. The time of later tokens does not change."
)


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
