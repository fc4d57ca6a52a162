"""Tables of a report, as data: the page and the comparison write them as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_pc.bench.names import BACKEND_NAMES
from edge_pc.bench.report import Report, Row, Section
from edge_pc.system.sizes import format_size


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns whose name starts with `>` hold numbers and stand to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """The table as Markdown, its title above it and its note below."""
        rule = [" ---: " if column.startswith(">") else " --- " for column in self.columns]
        lines = [f"**{self.title}**", "", _markdown_row([c.lstrip("> ") for c in self.columns]), f"|{'|'.join(rule)}|"]
        lines += [_markdown_row(row) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else []))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def machine_table(reports: Sequence[Report]) -> Table:
    """The machines side by side, one a column."""
    names = (
        "what",
        *(f"machine {letter(index)}" if len(reports) > 1 else "this machine" for index in range(len(reports))),
    )
    facts = [_machine_facts(report) for report in reports]
    return Table("Facts", names, [(name, *(found[name] for found in facts)) for name in facts[0]])


def letter(index: int) -> str:
    """A, B, C, …"""
    return chr(ord("A") + index)


def _machine_facts(report: Report) -> dict[str, str]:
    machine, model = report.machine, report.settings["model"]
    rates, kernels = machine["rates"], machine["kernels"]
    allowed, memory = machine["allowed_memory_bytes"], machine["memory_bytes"]
    threads = [f"{BACKEND_NAMES[row['backend']]} {row['settings']['threads']}" for row in _baselines(report)]
    return {
        "processor": processor(report),
        "family/model/stepping": machine["family"] or "not known",
        "instruction sets": ", ".join(machine["instruction_sets"]),
        "in use by ONNX Runtime": kernels["onnx"],
        "in use by llama.cpp": kernels["llamacpp"].replace(" = 1 |", "").replace(" |", "") or "not installed",
        "cores": f"{machine['allowed_cores']} allowed of {machine['cores']}",
        "threads": ", ".join(threads) or str(report.settings["threads"]),
        "memory": f"{format_size(memory)}" + (f", {format_size(allowed)} allowed" if allowed < memory else ""),
        "measured bandwidth": f"copy {rates['copy_gbps']} GB/s, read {rates['read_gbps']} GB/s",
        "measured arithmetic": f"int8 blocks {rates['int8_gflops']}, float32 {rates['float32_gflops']} GFLOP/s",
        "governor": machine["governor"] or "not readable",
        "system": f"{machine['system']}, {machine['architecture']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "model": f"{model['name']}: {model['layers']} layers, {model['heads']} heads, {model['kv_heads']} KV heads of "
        f"{model['head_dim']}, {model['max_positions']} positions",
        "measured": report.created,
    }


def processor(report: Report) -> str:
    """The processor's name with its vendor's."""
    vendor, cpu = report.machine["vendor"], report.machine["cpu"]
    return cpu if vendor in cpu else f"{vendor} {cpu}".strip()


def _baselines(report: Report) -> list[Row]:
    section = report.sections.get("ttft")
    return [row for row in section.rows if row["way"] == "baseline"] if section else []


def short(value: float) -> str:
    """Milliseconds in three or more digits, as many as matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def memory_tables(section: Section) -> list[Table]:
    """Memory of prompts that are open at once, and bytes per token."""
    return [_prompts_table(section), _states_table(section), _paper_table(section)]


def _prompts_table(section: Section) -> Table:
    lines = []
    for row in section.rows:
        if row["kind"] not in ("one process", "processes"):
            continue
        sizes = ("rss_bytes", "pss_bytes", "private_dirty_bytes", "private_clean_bytes", "shared_bytes")
        cells = [row["skipped"]] if "skipped" in row else [format_size(row[size]) for size in sizes]
        padded = tuple(cells + [""] * (len(sizes) - len(cells)))
        lines.append((BACKEND_NAMES[row["backend"]], row["kind"], str(row["prompts"]), *padded))
    columns = ("backend", "prompts in", "> prompts", "> RSS", "> PSS", "> private dirty", "> private clean", "> shared")
    note = (
        "Sums over all processes, the model included; 0 prompts: the engine opened and warm. PSS counts each page "
        "once, shared out among those that map it. Only private dirty pages cannot be dropped."
    )
    return Table("Prompts open at once over the same cached tokens", columns, lines, note)


def _states_table(section: Section) -> Table:
    lines = [
        (
            BACKEND_NAMES[row["backend"]],
            row["dtype"],
            str(row["tokens"]),
            f"{row['bytes_per_token']:,.0f}",
            format_size(row["file_bytes"]),
            format_size(row["disk_bytes"]),
        )
        for row in section.rows
        if row["kind"] == "states"
    ]
    columns = ("backend", "dtype", "> tokens", "> bytes per token", "> file", "> on disk")
    return Table("Stored states", columns, lines)


def _paper_table(section: Section) -> Table:
    lines = [
        (row["model"], f"{row['figure_mb']:.2f}", f"{row['calculated_mb']:.2f}", f"{row['stored_bytes_per_token']:,}")
        for row in section.rows
        if row["kind"] == "calculated"
    ]
    columns = ("model", "> paper, MB per token", "> calculated", "> bytes that need to be stored")
    note = (
        "16 bit. The paper counts all attention heads: 2 × layers × heads × head size × 2 bytes, in MiB cut off after "
        "two digits. Models with grouped or multi-query attention need to store their KV heads only (last column)."
    )
    return Table("Bytes per token of the models in the paper's Table 2", columns, lines, note)


def encode_table(section: Section) -> Table:
    """Speed of encoding against full prefill."""
    speeds: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in section.rows:
        speeds.setdefault((row["backend"], row["tokens"], row["modules"]), {})[row["way"]] = row["tokens_per_s"]
    lines = [
        (BACKEND_NAMES[backend], str(tokens), str(modules), f"{way['encode']:,.0f}", f"{way['prefill']:,.0f}",
         f"{way['encode'] / way['prefill']:.2f}", f"{100 * way['encode'] / way['write']:.0f} %")
        for (backend, tokens, modules), way in speeds.items()
    ]  # fmt: skip
    columns = ("backend", "> tokens", "> modules", "> encode (tokens/s)", "> full prefill (tokens/s)", "> ratio")
    note = "Encoding includes writing to disk. Modules do not attend to one another: several are less work than one."
    return Table("Speed", (*columns, "> of it writing"), lines, note)


def cases_table(section: Section) -> Table:
    """The paper's applications: times both ways, and both answers."""
    lines = [
        (
            BACKEND_NAMES[row["backend"]], row["title"], f"{row['cached_tokens']} + {row['computed_tokens']}",
            short(row["full_ttft_ms"]), short(row["cached_ttft_ms"]), f"{row['speed_up']:.1f} ×", f"{row['kl']:.3f}",
            row["full"]["text"], row["cached"]["text"],
        )
        for row in section.rows
    ]  # fmt: skip
    columns = ("backend", "case", "> cached + computed", "> full (ms)", "> reuse (ms)", "> speed-up", "> KL")
    return Table("Times, and both answers", (*columns, "answer, full prefill", "answer, reuse"), lines)
