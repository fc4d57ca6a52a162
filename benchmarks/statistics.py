"""How sure a difference is: bootstrap intervals and a paired test by scipy. Random numbers come from a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SEED = 20231107
RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its bootstrap interval at `LEVEL` (percentiles of the resampled means)."""

    mean: float
    low: float
    high: float

    def text(self, digits: int, *, factor: float = 1.0, sign: str = "") -> str:
        """`mean [low, high]`, each times `factor`; with the sign `+`, signed."""
        mean, low, high = (f"{factor * value:{sign}.{digits}f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Two ways on the same items.

    Attributes:
        difference: mean of second − first, with its interval from resampling items.
        p_value: of a two-sided sign-flip permutation test: how often chance alone gives so large a mean difference.
        better, worse: on how many items the second is so.
    """

    difference: Interval
    p_value: float
    better: int
    worse: int


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of `values` (at least one) and its interval."""
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if np.ptp(data) == 0:  # scipy has no interval for values that are all the same
        return Interval(mean, mean, mean)
    found = stats.bootstrap(
        (data,), np.mean, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=SEED
    )
    return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare two ways on the same items, in the same order.

    Raises:
        ValueError: there are not as many of the one as of the other.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values against {len(second)}")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    changed = differences[differences != 0]  # a pair that is equal is so with either sign
    p_value = 1.0  # of a single pair: the other sign gives as large a difference
    if len(changed) > 1:
        p_value = stats.permutation_test(
            (changed,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=SEED
        ).pvalue
    return PairedTest(
        mean_interval(differences.tolist()),
        float(p_value),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )
