"""How many CPUs this process may use: affinity (`taskset`) and the cgroup's CPU limit count, not the whole machine."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def allowed_cpus() -> int:
    """CPUs that this process may use, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux knows affinity
        count = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, quota) if quota else count)


def _cgroup_quota() -> int | None:
    """Whole CPUs of cgroup v2's quota, or None without one."""
    try:
        limit, period = _CGROUP_CPU_MAX.read_text().split()
        return None if limit == "max" else max(1, round(int(limit) / int(period)))
    except (OSError, ValueError):
        return None
