"""One report as one HTML page, with everything inside: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from edge_pc.bench import charts, explain, memory, ttft_summary
from edge_pc.bench.answer_tables import accuracy_tables, fidelity_table, losses
from edge_pc.bench.names import BACKEND_NAMES
from edge_pc.bench.report import Report, Section
from edge_pc.bench.tables import Table, cases_table, encode_table, machine_table, memory_tables, processor
from edge_pc.bench.ttft_tables import PAPER_NOTE, length_tables, search_table, stages_table, worse_table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 1120px; margin: 2em auto;
  padding: 0 1.2em; }
h1 { font-size: 1.7em; margin-bottom: 0.2em; } h2 { margin-top: 2.2em; border-bottom: 1px solid #999; }
h3 { margin: 1.6em 0 0.4em; font-size: 1.05em; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { padding: 3px 9px; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #333; vertical-align: bottom; } td { white-space: pre-line; }
.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: pre; }
img { width: 100%; height: auto; } figure { margin: 1em 0; } figcaption, .note { color: #444; font-size: 13px; }
code { background: #f2f2f2; padding: 0 4px; overflow-wrap: anywhere; } li { margin: 0.2em 0; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""

_TIMED = """<p>TTFT is the time from the submission of a prompt to its first token: reading and checking the prompt,
tokenizing it, finding stored states, placing them, and the forward pass of what is computed. Process start, loading of
the model and of the schema, and encoding are not in it; encoding is timed on its own. The model is warm.
<em>Reuse</em> comes after another prompt was served, so that states are really placed; <em>the limit</em> computes the
same tokens over cells that are in place already, without reading a prompt. <em>Full prefill</em> computes all tokens at
the best settings that a short search found. Ways are timed in turn, in changing order, after a warm-up; the quartiles
show the spread, and the report keeps every sample.</p>"""

_WORSE = """<p>Reuse also costs disk, and its first use costs the encoding (uses to pay, above). It gains little for
short modules, and when little of a prompt comes from modules. The time of later tokens does not change.</p>"""

# Sections that are tables only: name → heading, what makes the tables.
_SECTIONS: dict[str, tuple[str, Callable[[Section], list[Table]]]] = {
    "encode": ("Encoding", lambda section: [encode_table(section)]),
    "fidelity": ("Fidelity", lambda section: [fidelity_table(section)]),
    "accuracy": ("Accuracy", accuracy_tables),
    "cases": ("Applications", lambda section: [cases_table(section)]),
}


def page(report: Report) -> str:
    """The page of a report.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    parts = [
        "<h1>What reuse gives on this machine</h1>",
        f"<p>{escape(processor(report))}, model {escape(report.settings['model']['name'])}, measured "
        f"{escape(report.created)}.</p>",
    ]
    sections = report.sections
    if "ttft" in sections:
        parts += _ttft(report, sections["ttft"])
    if "memory" in sections:
        parts += _memory(sections["memory"])
    for name, (title, tables) in _SECTIONS.items():
        if name in sections:
            parts += [f"<h2>{title}</h2>", *map(table_html, tables(sections[name]))]
    parts += _worse(report)
    parts += ["<h2>Machine</h2>", table_html(machine_table([report])), "<h2>How it was made</h2>"]
    parts.append(_list([f"{name}: {section.command}" for name, section in sections.items()], code=True))
    return document(f"edge-pc bench: {processor(report)}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole HTML document of these parts."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _ttft(report: Report, section: Section) -> list[str]:
    rows = section.rows
    backends = ttft_summary.measured_backends(rows)
    parts = [
        "<h2>Time to the first token</h2>",
        _list(ttft_summary.findings(ttft_summary.summarize(rows))),
        figure(charts.length_chart(rows, backends), "Over cached length, on logarithmic axes. " + PAPER_NOTE),
        *[table_html(table) for table in length_tables(section)],
        figure(
            charts.prompt_chart(rows, backends),
            "Over the length of the prompt's own text, and over the share of it that comes from modules.",
        ),
        figure(charts.stages_chart(rows, backends), "What reuse is made of: by number of modules, and by page cache."),
        "<h3>What is timed</h3>",
        _TIMED,
        table_html(stages_table(section)),
        table_html(search_table(section)),
        "<h3>What the times are made of</h3>",
    ]
    fits = {backend: explain.fit([report], backend) for backend in backends}
    sentences = [f"{BACKEND_NAMES[name]}: {explain.sentence(fit)}." for name, fit in fits.items() if fit]
    return [*parts, _list(sentences)]


def _worse(report: Report) -> list[str]:
    """The honest part: where reuse is slower, and where answers are worse."""
    found = losses(report)
    times = [table_html(worse_table(report.sections["ttft"]))] if "ttft" in report.sections else []
    answers = ["<h3>Worse answers</h3>", _list(found)] if found else []
    return ["<h2>Where reuse is worse</h2>", *times, *answers, _WORSE]


def _memory(section: Section) -> list[str]:
    drawn, (axes,) = charts.new_figure()
    groups, added, copies = _added(memory.summarize(section.rows))
    parts = ["<h2>Memory</h2>"]
    if groups:
        charts.grouped_bars(axes, groups, {"private memory that prompts add": added, "as copies": copies})
        axes.set_ylabel("MiB")
        axes.set_xlabel("prompts open at once in one process")
        parts.append(f'<div style="max-width: 620px">{figure(drawn, "Private memory, without the model.")}</div>')
    return parts + [table_html(table) for table in memory_tables(section)]


def _added(summary: dict[str, Any]) -> tuple[list[str], list[float], list[float]]:
    """(names, MiB added, MiB as copies) of each number of prompts."""
    groups, added, copies = [], [], []
    for backend, found in summary.items():
        if isinstance(found, dict):
            for prompts, sizes in found.items():
                groups.append(f"{BACKEND_NAMES[backend]}\n{prompts}")
                added.append(max(0, sizes["added_private_bytes"]) / 2**20)
                copies.append(sizes["copies_would_take_bytes"] / 2**20)
    return groups, added, copies


def figure(drawn: Any, caption: str) -> str:
    """A picture with its caption."""
    text = escape(caption)
    return f"<figure>{charts.svg_image(drawn, escape(caption, quote=True))}<figcaption>{text}</figcaption></figure>"


def table_html(table: Table) -> str:
    """A table with its title and note."""
    marks = ['class="n"' if column.startswith(">") else "" for column in table.columns]
    head = "".join(f"<th {mark}>{escape(c.lstrip('> '))}</th>" for mark, c in zip(marks, table.columns, strict=True))
    lines = [
        "<tr>" + "".join(f"<td {m}>{escape(cell)}</td>" for m, cell in zip(marks, row, strict=True)) + "</tr>"
        for row in table.rows
    ]
    body = f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>' if lines else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h3>{escape(table.title)}</h3>{body}{note}"


def _list(lines: Sequence[str], *, code: bool = False) -> str:
    tag = ("<code>", "</code>") if code else ("", "")
    return "<ul>" + "".join(f"<li>{tag[0]}{escape(line)}{tag[1]}</li>" for line in lines) + "</ul>"
