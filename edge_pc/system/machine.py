"""What this machine is, as far as it matters to inference: CPU, instruction sets, allowed cores, memory. No names of
hosts or people."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from edge_pc.system.cpu import allowed_cpus

# Instruction sets that the kernels of ONNX Runtime and llama.cpp choose between, as Linux and macOS spell them.
_FLAGS_THAT_MATTER = {
    "sse4_2": "SSE4.2",
    "avx": "AVX",
    "avx1.0": "AVX",
    "f16c": "F16C",
    "fma": "FMA",
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX512F",
    "avx512bw": "AVX512BW",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_tile": "AMX-TILE",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "neon": "NEON",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "sve": "SVE",
    "sve2": "SVE2",
}
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "0x41": "Arm", "0x61": "Apple"}


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine.

    Attributes:
        vendor, cpu, family: of the processor; family is x86's `family/model/stepping`, empty where there is none.
        instruction_sets: those the kernels choose between.
        cores, allowed_cores: all, and those this process may use (affinity and cgroup limit, rounded up).
        memory_bytes, allowed_memory_bytes: all, and what this process may use (cgroup limit); 0 when unknown.
        system, architecture: of the operating system.
    """

    vendor: str
    cpu: str
    family: str
    instruction_sets: tuple[str, ...]
    cores: int
    allowed_cores: int
    memory_bytes: int
    allowed_memory_bytes: int
    system: str
    architecture: str


def describe_machine() -> Machine:
    """The machine this process runs on. What cannot be found out is empty or 0."""
    cpuinfo = _cpuinfo()
    memory = _memory_bytes()
    vendor = cpuinfo.get("vendor_id") or cpuinfo.get("cpu implementer") or ""
    flags = (cpuinfo.get("flags") or cpuinfo.get("features") or _sysctl("machdep.cpu.features").lower()).split()
    numbers = [cpuinfo.get(field, "") for field in ("cpu family", "model", "stepping")]
    return Machine(
        vendor=_VENDORS.get(vendor, vendor) or ("Apple" if platform.system() == "Darwin" else ""),
        cpu=cpuinfo.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor(),
        family="/".join(numbers) if all(numbers) else "",
        instruction_sets=tuple(dict.fromkeys(name for flag, name in _FLAGS_THAT_MATTER.items() if flag in flags)),
        cores=os.cpu_count() or 1,
        allowed_cores=allowed_cpus(),
        memory_bytes=memory,
        allowed_memory_bytes=min(filter(None, (memory, _cgroup_memory_limit())), default=0),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
    )


def _cgroup_memory_limit() -> int | None:
    """The strictest cgroup v2 limit of this process's group and every group above, in bytes; None without one."""
    lines = _read(Path("/proc/self/cgroup")).splitlines()
    root = Path("/sys/fs/cgroup")
    group = root / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    groups = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    limits = [_read(folder / "memory.max").strip() for folder in groups]
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        text = _sysctl("hw.memsize")
        return int(text) if text.isdigit() else 0


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; names in lower case."""
    first = _read(Path("/proc/cpuinfo")).split("\n\n", 1)[0]
    pairs = (re.split(r"\s*:\s*", line, maxsplit=1) for line in first.splitlines() if ":" in line)
    return {name.lower(): value.strip() for name, value in pairs}


def _sysctl(name: str) -> str:
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
