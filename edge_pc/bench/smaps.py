"""What memory a process holds, alone and together with others, as Linux counts it (`smaps_rollup`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process.

    Attributes:
        rss: in memory, shared or not.
        pss: in memory, each page divided by the number of times that processes map it.
        private_dirty: written by this process alone: what it adds to the machine's need.
        private_clean, shared: pages of files that can be dropped and read again, or that several map.
        anonymous: of `rss`, belonging to no file.
    """

    rss: int
    pss: int
    private_dirty: int
    private_clean: int
    shared: int
    anonymous: int


def memory_of(pid: int) -> Memory | None:
    """Of a process of the same person; None where the system does not count like this (other than Linux)."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    found = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in lines)}
    return Memory(
        rss=found["Rss"],
        pss=found["Pss"],
        private_dirty=found["Private_Dirty"],
        private_clean=found["Private_Clean"],
        shared=found["Shared_Clean"] + found["Shared_Dirty"],
        anonymous=found["Anonymous"],
    )


def available_bytes() -> int | None:
    """Memory that new processes can take without pushing others out; None where the system does not tell."""
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
