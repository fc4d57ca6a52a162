"""The rows of a report that the built-in benches write; docs/bench.md describes every field.

Times are in milliseconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row. Its key says what was measured; a section has one row of each key."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRow(Row):
    """Times of one way to do something: stage → every sample, in order."""

    backend: str
    samples_ms: dict[str, tuple[float, ...]]

    def median(self, stage: str) -> float:
        return median(self.samples_ms[stage])

    def quartiles(self, stage: str) -> tuple[float, float]:
        """The lower and the upper quartile."""
        times = self.samples_ms[stage]
        if len(times) == 1:
            return times[0], times[0]
        lower, _, upper = quantiles(times, n=4, method="inclusive")
        return lower, upper


def samples_of(samples: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Samples (stage → milliseconds) as a row keeps them."""
    return {stage: tuple(round(sample[stage], 4) for sample in samples) for stage in samples[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRow(TimedRow):
    """A way to serve a prompt."""

    way: str
    pages: str = "warm"
    axes: tuple[str, ...]
    cached_tokens: int
    new_tokens: int
    modules: int
    reused_tokens: int
    computed_tokens: int
    resident_share: float | None = None

    @property
    def ttft(self) -> float:
        """The median time to the first token."""
        return self.median("ttft")

    @property
    def point(self) -> tuple[int, int, int]:
        return self.cached_tokens, self.new_tokens, self.modules


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow(TimedRow):
    """Full prefill at settings that the search for the best ones tried."""

    settings: dict[str, int]
    tokens: int

    @property
    def ms(self) -> float:
        return self.median("forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRow(TimedRow):
    """A way to bring a schema's tokens into the store, or to compute as many."""

    way: str
    tokens: int
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow(Row):
    """Prompts held open over the same cached tokens."""

    backend: str
    kind: str
    prompts: int
    tokens: int
    dtype: str
    states_bytes: int
    file_bytes: int
    disk_bytes: int
    rss: int = 0
    pss: int = 0
    private_dirty: int = 0
    private_clean: int = 0
    shared: int = 0
    skipped: str = ""
