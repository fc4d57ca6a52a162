"""How sure a difference is: bootstrap intervals and a paired test. All random numbers come from a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

SEED = 20231107
RESAMPLES = 10_000
LEVEL = 0.95

# With this many differences that are not zero, all assignments of signs are tried rather than some at random.
_EXACT_FLIPS = 14


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its bootstrap interval at `LEVEL` (percentiles of the resampled means)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Two ways on the same items.

    Attributes:
        difference: mean of second − first, with its interval from resampling items (paired bootstrap).
        p_value: of a two-sided sign-flip permutation test: how often chance alone gives so large a mean difference.
        better, worse, equal: on how many items the second is so.
    """

    difference: Interval
    p_value: float
    better: int
    worse: int
    equal: int


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of `values` (at least one) and its interval."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(SEED)
    means = data[rng.integers(0, len(data), size=(RESAMPLES, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(data.mean()), float(low), float(high))


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare two ways on the same items, in the same order.

    Raises:
        ValueError: there are not as many of the one as of the other.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values against {len(second)}")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    return PairedTest(
        mean_interval(differences.tolist()),
        _sign_flip_p(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        equal=int((differences == 0).sum()),
    )


def _sign_flip_p(differences: NDArray[np.float64]) -> float:
    """Two-sided p-value of the mean, under the hypothesis that each difference might as well have the other sign."""
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0
    observed = abs(changed.sum())
    if len(changed) <= _EXACT_FLIPS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(changed))))
        extra = 0
    else:
        rng = np.random.default_rng(SEED)
        signs = rng.choice([-1.0, 1.0], size=(RESAMPLES, len(changed)))
        extra = 1  # the observed assignment is one of those that count
    as_large = int((np.abs(signs @ changed) >= observed * (1 - 1e-12)).sum())
    return (as_large + extra) / (len(signs) + extra)
