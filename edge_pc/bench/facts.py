"""The machine in a report: what `edge_pc.system.machine` knows, versions, and the kernels in use.

No names of hosts or people, no folders.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_pc._version import __version__
from edge_pc.backends.llamacpp.library import AMX_FLAG
from edge_pc.bench.baseline import TITLES, best_of
from edge_pc.bench.report import Report
from edge_pc.bench.rows import BaselineRow
from edge_pc.bench.tables import Table
from edge_pc.system.machine import describe_machine
from edge_pc.system.sizes import format_size

_LIBRARIES = ("numpy", "onnxruntime", "llama-cpp-python")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_PROBE_SECONDS = 60

# What MLAS chooses for 8-bit blocks when it is loaded, by these flags, in this order (platform.cpp).
_BLOCK_KERNELS = {
    "AVX512-VNNI": {"AVX512F", "AVX512BW", "AVX512-VNNI"},
    "AVX512": {"AVX512F", "AVX512BW"},
    "AVX2-VNNI": {"AVX2", "AVX-VNNI"},
    "AVX2": {"AVX2", "FMA"},
    "NEON DOTPROD": {"DOTPROD"},
}


def machine_facts() -> dict[str, Any]:
    """What a report says of the machine.

    Beside the fields of `edge_pc.system.machine.Machine`: `versions` (name → version), `kernels` (backend → instruction
    sets in use), `governor` (of CPU frequencies; empty where it cannot be read).
    """
    versions = {"edge-pc": __version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine, governor = asdict(describe_machine()), ""
    with suppress(OSError):
        governor = _GOVERNOR.read_text(encoding="ascii", errors="replace").strip()
    kernels = {"onnx": onnx_kernels(machine["instruction_sets"]), "llamacpp": _llama_kernels()}
    return {**machine, "versions": versions, "kernels": kernels, "governor": governor}


def onnx_kernels(sets: Collection[str]) -> str:
    """What ONNX Runtime's kernels are expected to use; it does not tell."""
    blocks = next((name for name, needed in _BLOCK_KERNELS.items() if needed <= set(sets)), "no vector kernel known")
    single = next((name for name in ("AVX512F", "AVX2", "AVX", "NEON") if name in sets), "SSE2 or unknown")
    return f"8-bit blocks: {blocks}; float32: {single} (by CPU flags)"


def _llama_kernels() -> str:
    """What libllama says it was built with, without AMX, which is not used; empty when it does not load.

    In a child process: a library built for another CPU ends the process with an illegal instruction.
    """
    if find_spec("llama_cpp") is None:
        return ""
    command = [sys.executable, "-m", "edge_pc.backends.probe", "llamacpp"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        return str(json.loads(child.stdout.splitlines()[-1])["built with"]).replace(f"{AMX_FLAG} | ", "")
    except (subprocess.SubprocessError, ValueError, IndexError, KeyError):
        return ""


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
    kernels = machine["kernels"]
    allowed, memory = machine["allowed_memory_bytes"], machine["memory_bytes"]
    tried = report.rows("baseline", BaselineRow)
    best = {title: [row for row in tried if row.backend == name] for name, title in TITLES.items()}
    threads = [f"{title} {best_of(rows).settings['threads']}" for title, rows in best.items() if rows]
    return {
        "processor": processor(report),
        "family/model/stepping": machine["family"] or "not known",
        "instruction sets": ", ".join(machine["instruction_sets"]),
        "in use by ONNX Runtime": kernels["onnx"],
        "in use by llama.cpp": kernels["llamacpp"].replace(" = 1 |", "").replace(" |", "") or "not installed",
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
