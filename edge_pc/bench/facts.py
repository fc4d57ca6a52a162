"""The machine in a report: what `edge_pc.system.machine` knows, versions, and the kernels in use.

No names of hosts or people, no folders.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from edge_pc._version import __version__
from edge_pc.backends import BACKENDS
from edge_pc.bench.baseline import best_of
from edge_pc.bench.report import Report
from edge_pc.bench.rows import BaselineRow
from edge_pc.bench.tables import TITLES, Table
from edge_pc.system.machine import describe_machine
from edge_pc.system.sizes import format_size

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine_facts() -> dict[str, Any]:
    """What a report says of the machine; docs/bench.md describes every field."""
    versions = {"edge-pc": __version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in ("numpy", *(entry.package for entry in BACKENDS.values())):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine, governor = asdict(describe_machine()), ""
    with suppress(OSError):
        governor = _GOVERNOR.read_text(encoding="ascii", errors="replace").strip()
    sets = machine["instruction_sets"]
    kernels = {name: entry.load_baseline().kernels(sets) for name, entry in BACKENDS.items()}
    return {**machine, "versions": versions, "kernels": kernels, "governor": governor}


def machine_table(reports: Sequence[Report]) -> Table:
    """The machines side by side, one a column."""
    titles = [f"machine {letter(index)}" for index in range(len(reports))] if len(reports) > 1 else ["this machine"]
    facts = [_described(report) for report in reports]
    rows = tuple((name, *(found[name] for found in facts)) for name in facts[0])
    return Table("Facts", ("what", *titles), rows)


def letter(index: int) -> str:
    """A, B, C, …"""
    return chr(ord("A") + index)


def processor(report: Report) -> str:
    """The processor's name with its vendor's."""
    vendor, cpu = report.machine["vendor"], report.machine["cpu"]
    return cpu if vendor in cpu else f"{vendor} {cpu}".strip()


def _described(report: Report) -> dict[str, str]:
    machine, model = report.machine, report.settings["model"]
    allowed, memory = machine["allowed_memory_bytes"], machine["memory_bytes"]
    tried = report.rows("baseline", BaselineRow)
    best = {title: [row for row in tried if row.backend == name] for name, title in TITLES.items()}
    threads = [f"{title} {best_of(rows).settings['threads']}" for title, rows in best.items() if rows]
    kernels = {
        f"in use by {title}": machine["kernels"][name].replace(" = 1 |", "").replace(" |", "") or "not installed"
        for name, title in TITLES.items()
    }
    return {
        "processor": processor(report),
        "family/model/stepping": machine["family"] or "not known",
        "instruction sets": ", ".join(machine["instruction_sets"]),
        **kernels,
        "cores": f"{machine['allowed_cores']} allowed of {machine['cores']}",
        "threads": ", ".join(threads) or str(report.settings["threads"]),
        "memory": f"{format_size(memory)}" + (f", {format_size(allowed)} allowed" if allowed < memory else ""),
        "governor": machine["governor"] or "not readable",
        "system": f"{machine['system']}, {machine['architecture']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "model": f"{model['name']}: {model['layers']} layers, {model['heads']} heads, {model['kv_heads']} KV heads of "
        f"{model['head_dim']}, {model['max_positions']} positions",
        "measured": report.data["created"],
    }
