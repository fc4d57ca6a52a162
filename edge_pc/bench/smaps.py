"""What memory this process holds, alone and together with others, as Linux counts it (`smaps_rollup`)."""

from __future__ import annotations

from pathlib import Path

_ROLLUP = Path("/proc/self/smaps_rollup")
_MEMINFO = Path("/proc/meminfo")


def memory_of_this_process() -> dict[str, int] | None:
    """Bytes; None where the system does not count like this (other than Linux).

    Returns:
        `rss`: in memory, shared or not; `pss`: each page divided by the number of times that processes map it;
        `private_dirty`: written by this process alone, what it adds to the machine's need; `private_clean`, `shared`:
        pages of files that can be dropped and read again, or that several map.
    """
    found = _kibibytes(_ROLLUP)
    if not found:
        return None
    return {
        "rss": found["Rss"],
        "pss": found["Pss"],
        "private_dirty": found["Private_Dirty"],
        "private_clean": found["Private_Clean"],
        "shared": found["Shared_Clean"] + found["Shared_Dirty"],
    }


def available_bytes() -> int | None:
    """Memory that new processes can take without pushing others out; None where the system does not tell."""
    return _kibibytes(_MEMINFO).get("MemAvailable")


def _kibibytes(path: Path) -> dict[str, int]:
    """The `Name: 12 kB` lines of a file, in bytes; none when it is not there."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
