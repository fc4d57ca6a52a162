"""How long this process has been running: what a person waits for starts before the first line of Python."""

from __future__ import annotations

import os
import time
from pathlib import Path


def _age_by_kernel() -> float | None:
    """Seconds since the kernel started this process (resolution 10 ms), or None where it cannot be asked."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # The second field is the command's name in brackets and may hold spaces; the start time is the 22nd.
        ticks = int(stat.rpartition(")")[2].split()[19])
        started = ticks / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return age if age >= 0 else None


def _age() -> float:
    """The kernel's word, else the processor time used so far: a start-up hardly waits."""
    age = _age_by_kernel()
    return time.process_time() if age is None else age


_AGE_AT_IMPORT = _age()
_IMPORTED = time.perf_counter()


def process_age_ms() -> float:
    """Milliseconds since this process started."""
    return (_AGE_AT_IMPORT + time.perf_counter() - _IMPORTED) * 1e3
