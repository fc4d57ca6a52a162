"""What follows from measured times: how they grow, from which length on reuse pays, after how many uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Growth:
    """A fit of time ∝ length ** exponent.

    Attributes:
        exponent: 1 is linear, 2 quadratic.
        r2: share of the variance (of the logarithms) that the fit explains.
        points: it was made from.
    """

    exponent: float
    r2: float
    points: int


def growth(lengths: Sequence[float], times: Sequence[float]) -> Growth | None:
    """The exponent by a straight line through the logarithms; None with fewer than 2 lengths."""
    if len(set(lengths)) < 2:
        return None
    x, y = np.log(np.asarray(lengths, dtype=float)), np.log(np.asarray(times, dtype=float))
    slope, intercept = np.polyfit(x, y, 1)
    residual = float(np.sum((y - (slope * x + intercept)) ** 2))
    total = float(np.sum((y - y.mean()) ** 2))
    return Growth(round(float(slope), 4), round(1 - residual / total, 5) if total else 1.0, len(x))


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which length on reuse is faster.

    Attributes:
        tokens: the length; None when there is none within what was measured.
        verdict: `from`: reuse pays from `tokens` on; `always`, `never`: at all measured lengths.
        shortest, longest: lengths that were measured.
    """

    tokens: float | None
    verdict: str
    shortest: float
    longest: float


def break_even(lengths: Sequence[float], cached: Sequence[float], full: Sequence[float]) -> BreakEven | None:
    """Where cached and full times meet, on a straight line between the logarithms of neighbouring lengths.

    The last crossing counts: from there on reuse stays the faster one. None without any length.
    """
    points = sorted(zip(lengths, cached, full, strict=True))
    if not points:
        return None
    shortest, longest = points[0][0], points[-1][0]
    gains = [math.log(f / c) for _, c, f in points]
    if gains[-1] <= 0:
        return BreakEven(None, "never", shortest, longest)
    losing = [index for index, gain in enumerate(gains) if gain <= 0]
    if not losing:
        return BreakEven(None, "always", shortest, longest)
    low, high = losing[-1], losing[-1] + 1
    share = -gains[low] / (gains[high] - gains[low])
    logs = math.log(points[low][0]), math.log(points[high][0])
    return BreakEven(round(math.exp(logs[0] + share * (logs[1] - logs[0])), 1), "from", shortest, longest)


def uses_to_pay(encode_ms: float, cached_ms: float, full_ms: float) -> int | None:
    """After how many uses encoding and reusing has taken less than computing each time; None: never."""
    gain = full_ms - cached_ms
    return None if gain <= 0 else max(1, math.floor(encode_ms / gain) + 1)
