"""The rows of a report that the built-in benches write. Times are in milliseconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row.

    Attributes:
        key: what was measured; a section has one row of each key.
    """

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRow(Row):
    """Times of one way to do something.

    Attributes:
        backend: its name.
        samples_ms: stage → every sample, in order.
    """

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
    """A way to serve a prompt; its stages are `ttft`, of it `parse`, `assembly` and `forward`, and `later_token`.

    Attributes:
        way: `full`, `cached`, `again`, `in_place`, `encode`.
        pages: of the states' files: `warm`, or `cold` (not in the page cache).
        axes: what this point is varied along: `length`, `new`, `share`, `modules`.
        cached_tokens, new_tokens, modules: as set.
        reused_tokens, computed_tokens: planned: at least one token of a prompt is computed.
        resident_share: of cold rows: the share of the pages that stayed in memory anyway.
    """

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
    """Full prefill at settings that the search for the best ones tried; its stage is `forward`.

    Attributes:
        settings: `threads`, and what else this backend lets one choose.
        tokens: computed.
    """

    settings: dict[str, int]
    tokens: int

    @property
    def ms(self) -> float:
        return self.median("forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRow(TimedRow):
    """A schema's tokens; the stage is `total`.

    Attributes:
        way: `encode` (writing included), `write` (the same states written once more), `prefill` (computing alone).
        tokens: of the schema.
        modules: that share them.
    """

    way: str
    tokens: int
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow(Row):
    """Prompts held open over the same cached tokens. Sizes of memory are sums over the processes, model included.

    Attributes:
        backend: its name.
        kind: `one process` that holds all prompts, or `processes` with one each.
        prompts: held; 0: the engine is open and warm.
        tokens, dtype: of the states that all of them use.
        states_bytes, file_bytes, disk_bytes: of these states: as an array, as files, and what the disk allots.
        rss, pss, private_dirty, private_clean, shared: bytes as Linux counts them.
        skipped: why nothing was measured.
    """

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
