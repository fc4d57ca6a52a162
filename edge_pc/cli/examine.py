"""What `edge-pc doctor` finds out: whether this machine and this environment can run edge_pc, and if not, why not.

Each check looks at one thing and never raises. A backend's library is loaded in a child process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from edge_pc._version import __version__
from edge_pc.backends import BACKENDS, DEFAULT_BACKEND, entry
from edge_pc.backends.probe import probe_in_child
from edge_pc.errors import OptionError
from edge_pc.system.machine import Machine, describe_machine
from edge_pc.system.sizes import format_size

_LOW_DISK_BYTES = 2 << 30
_PROBE_SECONDS = 120

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at (`cpu`, `backend onnx`, …).
        status: `problem`: something that is needed does not work; `note`: worth knowing.
        detail: what was found.
        hint: what to do, empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


def examine() -> list[Check]:
    """All checks, from the ground up."""
    machine = describe_machine()
    return [
        Check("edge-pc", "ok", __version__),
        Check("python", "ok", f"{platform.python_implementation()} {platform.python_version()}"),
        Check("system", "ok", f"{machine.system}, {machine.architecture}"),
        _cpu(machine),
        _cores(machine),
        _memory(machine),
        _libraries(),
        *_home(),
        *map(backend_check, BACKENDS),
    ]


def works(checks: list[Check]) -> bool:
    """Whether the default backend can be used: nothing that is needed is a problem."""
    return all(check.status != "problem" for check in checks)


def _cpu(machine: Machine) -> Check:
    cpu = machine.cpu if machine.vendor in machine.cpu else f"{machine.vendor} {machine.cpu}"
    sets = ", ".join(machine.instruction_sets) or "instruction sets unknown"
    return Check("cpu", "ok", f"{cpu.strip() or 'unknown'} ({sets})")


def _cores(machine: Machine) -> Check:
    if machine.allowed_cores == machine.cores:
        return Check("cores", "ok", f"{machine.cores}, all of them allowed")
    return Check("cores", "note", f"{machine.allowed_cores} of {machine.cores} allowed (affinity or cgroup)")


def _memory(machine: Machine) -> Check:
    detail = format_size(machine.memory_bytes) if machine.memory_bytes else "unknown"
    if machine.allowed_memory_bytes < machine.memory_bytes:
        return Check("memory", "note", f"{format_size(machine.allowed_memory_bytes)} of {detail} allowed (cgroup)")
    return Check("memory", "ok", detail)


def _libraries() -> Check:
    versions = {name: _version(name) for name in _required()}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("libraries", "problem", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check("libraries", "ok", found or "unknown: edge-prompt-cache is not installed here")


def _required() -> list[str]:
    """The libraries that this package names as its own, extras aside; none where it runs without being installed."""
    try:
        requirements = importlib.metadata.requires("edge-prompt-cache") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _home() -> list[Check]:
    """The checks of the folder where models and states are kept."""
    from edge_pc.system.home import home

    try:
        folder = home()
    except OptionError as exc:
        return [Check("home", "problem", exc.message, "give an absolute path, or unset it")]
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return [_writable(folder, existing), _disk(existing), _models(folder / "models")]


def _writable(folder: Path, existing: Path) -> Check:
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("home", "ok", f"{folder}{'' if existing == folder else ' (created when needed)'}")
    hint = "set EDGE_PC_HOME to a folder that you can write to; until then nothing is reused"
    return Check("home", "note", f"you cannot write to {folder}", hint)


def _disk(existing: Path) -> Check:
    free = shutil.disk_usage(existing).free
    if free < _LOW_DISK_BYTES:
        return Check("disk", "note", f"{format_size(free)} free", "the states of 4096 tokens take 180 MiB or more")
    return Check("disk", "ok", f"{format_size(free)} free")


def _models(folder: Path) -> Check:
    folders = sorted(path for path in folder.glob("*") if path.is_dir())
    if not folders:
        return Check("models", "note", "none yet", "edge-pc pull smollm2 && edge-pc export smollm2")
    return Check("models", "ok", ", ".join(f"{unquote(folder.name)} ({_holdings(folder)})" for folder in folders))


def _holdings(folder: Path) -> str:
    exports = sorted(spec.parent.name for spec in folder.glob("*/edge_pc.json"))
    holdings = [*(["GGUF"] if any(folder.glob("*.gguf")) else []), *exports]
    return ", ".join(holdings) or "empty"


def backend_check(name: str) -> Check:
    """Load a backend's library in a child process and compute with it."""
    title, backend = f"backend {name}", entry(name)
    if backend.extra is not None and importlib.util.find_spec(backend.import_name) is None:
        install = f'pip install "edge-prompt-cache[{backend.extra}]"'
        return Check(title, "note", f"not installed ({backend.package})", install)
    failed: Status = "problem" if name == DEFAULT_BACKEND else "note"
    try:
        child = probe_in_child(name, _PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(title, failed, f"did not load within {_PROBE_SECONDS} s", "reinstall its library")
    if child.returncode < 0:
        return _killed(title, failed, -child.returncode)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        return Check(title, failed, f"does not load: {lines[-1]}", "reinstall its library")
    facts = json.loads(child.stdout.splitlines()[-1])
    return Check(title, "ok", f"{facts.pop('version')}; " + "; ".join(f"{key}: {facts[key]}" for key in facts))


def _killed(title: str, status: Status, number: int) -> Check:
    name = signal.Signals(number).name
    if number == signal.SIGILL:
        return Check(
            title, status, f"killed by {name}: built for another CPU", "build its library from source on this machine"
        )
    return Check(title, status, f"killed by {name}", "reinstall its library")
