"""Whether a file is still the one that was checked before, judged by what the file system records about it."""

from __future__ import annotations

import os
import time

# Kernels stamp files with a clock that ticks every 1 to 10 ms.
_CLOCK_TICK_NS = 10_000_000


def identity_of(status: os.stat_result) -> str:
    """Changes whenever a file's bytes may have changed: written to, replaced, restored, copied."""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


def is_settled(status: os.stat_result) -> bool:
    """Whether a change of the file from now on would show in its identity."""
    return time.time_ns() - status.st_ctime_ns > _CLOCK_TICK_NS


def wait_for_clock_tick(status: os.stat_result) -> None:
    """Sleep (at most one tick) until a change of the file would show in its time stamps."""
    remaining = status.st_ctime_ns + _CLOCK_TICK_NS - time.time_ns()
    if 0 < remaining <= _CLOCK_TICK_NS:
        time.sleep(remaining / 1e9)
