"""The machine in a report: what `edge_pc.system.machine` knows, versions, the kernels in use, and measured rates.

No names of hosts or people, no folders.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_pc._version import __version__
from edge_pc.backends.llamacpp.library import AMX_FLAG
from edge_pc.bench.rates import measure_rates
from edge_pc.system.machine import describe_machine

_LIBRARIES = ("numpy", "onnxruntime", "llama-cpp-python")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_PROBE_SECONDS = 60


def machine_facts() -> dict[str, Any]:
    """All that a report says of the machine; takes a few seconds, since it measures.

    Fields: those of `edge_pc.system.machine.Machine`; `versions` (name → version); `kernels` (backend → instruction
    sets in use); `governor` (of CPU frequencies; empty where it cannot be read); `rates` (`edge_pc.bench.rates.Rates`).
    """
    machine = describe_machine()
    return {
        **asdict(machine),
        "versions": versions(),
        "kernels": {"onnx": onnx_kernels(machine.instruction_sets), "llamacpp": _llama_kernels()},
        "governor": _governor(),
        "rates": asdict(measure_rates(machine.allowed_memory_bytes)),
    }


def onnx_kernels(sets: Collection[str]) -> str:
    """What ONNX Runtime's kernels for 8-bit blocks and for float32 are expected to use.

    ONNX Runtime does not tell. MLAS chooses when it is loaded, by these flags, in this order (platform.cpp).
    """
    blocks = next(
        (
            name
            for name, needed in {
                "AVX512-VNNI": {"AVX512F", "AVX512BW", "AVX512-VNNI"},
                "AVX512": {"AVX512F", "AVX512BW"},
                "AVX2-VNNI": {"AVX2", "AVX-VNNI"},
                "AVX2": {"AVX2", "FMA"},
                "NEON DOTPROD": {"DOTPROD"},
            }.items()
            if needed <= set(sets)
        ),
        "no vector kernel known",
    )
    single = next((name for name in ("AVX512F", "AVX2", "AVX", "NEON") if name in sets), "SSE2 or unknown")
    return f"8-bit blocks: {blocks}; float32: {single} (by CPU flags)"


def _llama_kernels() -> str:
    """What libllama says it was built with, without AMX, which is not used; empty when it does not load.

    In a child process: a library built for another CPU dies by an illegal instruction.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return ""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "edge_pc.system.probe", "llamacpp"],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
        if child.returncode:
            return ""
        return str(json.loads(child.stdout.splitlines()[-1])["built with"]).replace(f"{AMX_FLAG} | ", "")
    except (subprocess.TimeoutExpired, ValueError, IndexError, KeyError):
        return ""


def versions() -> dict[str, str]:
    """Name → version of what a measurement depends on."""
    found = {"edge-pc": __version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _governor() -> str:
    try:
        return _GOVERNOR.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
