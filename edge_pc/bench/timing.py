"""Takes samples of several ways to do the same thing in turn: whatever else the machine does hits them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# What one run took: stage → milliseconds.
Sample = dict[str, float]
Way = Callable[[], Sample]


def interleave(ways: Mapping[str, Way], rounds: Mapping[str, int]) -> dict[str, list[Sample]]:
    """Run every way `rounds` times, all in turn, after one run that is not counted.

    In each round another way comes first, since what ran before leaves its traces in caches. A way with fewer rounds
    than others takes part in some of them, evenly spread, and is not warmed up: it is the slow one, and what it shares
    with the others is warm by then.

    Args:
        ways: name → a run of it.
        rounds: name → number of samples wanted, at least 1.

    Returns:
        Name → its samples, in order.
    """
    most = max(rounds[name] for name in ways)
    for name, way in ways.items():
        if rounds[name] == most:
            way()
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(most):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if (number + 1) * rounds[name] // most > number * rounds[name] // most:
                samples[name].append(ways[name]())
    return samples


def affordable_rounds(wanted: int, estimated_ms: float, budget_s: float, at_least: int) -> int:
    """How many rounds of something that takes `estimated_ms` fit into `budget_s`: at most `wanted`."""
    fitting = int(budget_s * 1e3 / max(estimated_ms, 1e-3))
    return max(min(at_least, wanted), min(wanted, fitting))


def timed(stage: str, work: Callable[[], object]) -> Sample:
    """Run `work`, and say how long it took."""
    started = time.perf_counter()
    work()
    return {stage: (time.perf_counter() - started) * 1e3}
