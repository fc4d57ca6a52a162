"""The fair baseline: full prefill at the settings at which a backend is fastest, found by a short search.

The number of threads comes first, then everything else at the best number. The time of every candidate is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.backends import BACKENDS, entry
from edge_pc.backends.base import IntArray, Logits
from edge_pc.bench.report import Section
from edge_pc.bench.rows import BaselineRow, samples_of
from edge_pc.bench.tables import TITLES, Table
from edge_pc.bench.timing import interleave, timed

# Other settings than the engine's own must be faster by more than chance to be taken.
_MARGIN = 0.98


@dataclass(frozen=True, slots=True)
class Best:
    """What the search found.

    Attributes:
        settings: of full prefill, its `threads` among them.
        own: whether they are the engine's own at this number of threads.
        ms_per_token: it took at these settings.
    """

    settings: Mapping[str, int]
    own: bool
    ms_per_token: float


def thread_counts(asked: int | None, allowed: int) -> list[int]:
    """Numbers of threads to try: the number given; else all allowed CPUs and half of them (two may share a core)."""
    return [asked] if asked else sorted({allowed, max(1, allowed // 2)}, reverse=True)


def search(
    section: Section[BaselineRow], backend: str, model: Path, threads: Sequence[int], tokens: int, rounds: int
) -> Best:
    """Time a full prefill of `tokens` tokens with each candidate; rows that are there are not measured again."""
    own, *others = entry(backend).load_baseline().CHOICES
    measured = _measured(section, backend, model, [{"threads": count, **own} for count in threads], tokens, rounds)
    count = best_of(measured).settings["threads"]
    more = [{"threads": count, **choice} for choice in others]
    return best_of(measured + _measured(section, backend, model, more, tokens, rounds))


def best_of(rows: Sequence[BaselineRow]) -> Best:
    """The best of one backend's rows: the best number of threads, then everything else at this number.

    What comes first is kept unless others are clearly faster.
    """
    own = _fastest([row for row in rows if row.settings | {"threads": 0} == rows[0].settings | {"threads": 0}])
    others = [row for row in rows if row.settings["threads"] == own.settings["threads"] and row is not own]
    chosen = _fastest([own, *others])
    return Best(chosen.settings, chosen is own, chosen.ms / chosen.tokens)


def _fastest(rows: Sequence[BaselineRow]) -> BaselineRow:
    fastest = min(rows, key=lambda row: row.ms)
    return fastest if fastest.ms < rows[0].ms * _MARGIN else rows[0]


def _measured(
    section: Section[BaselineRow],
    backend: str,
    model: Path,
    candidates: Sequence[dict[str, int]],
    tokens: int,
    rounds: int,
) -> list[BaselineRow]:
    """A row for each candidate, in this order."""
    keyed = {f"{backend}/" + "/".join(f"{n}={v}" for n, v in settings.items()): settings for settings in candidates}
    missing = {key: settings for key, settings in keyed.items() if section.row(key) is None}
    token_ids = np.arange(tokens, dtype=np.int32) % 100 + 10
    kind, full = entry(backend).load_baseline().FullPrefill, {}
    with ExitStack() as opened:
        for count in {settings["threads"] for settings in missing.values()}:
            full[count] = opened.enter_context(closing(kind(model, count, tokens)))
        ways = {
            key: partial(timed, "forward", partial(full[settings["threads"]].prefill, token_ids, settings))
            for key, settings in missing.items()
        }
        samples = interleave(ways, dict.fromkeys(ways, rounds)) if ways else {}
    for key, taken in samples.items():
        times = samples_of(taken)
        section.add(BaselineRow(key=key, backend=backend, settings=keyed[key], tokens=tokens, samples_ms=times))
    return [row for key in keyed if (row := section.row(key)) is not None]


@contextmanager
def full_prefill(backend: str, model: Path, best: Best, capacity: int) -> Iterator[Callable[[IntArray], Logits] | None]:
    """Token ids → logits at the settings found; None when these are the engine's own."""
    if best.own:
        yield None
        return
    kind: Any = entry(backend).load_baseline().FullPrefill
    with closing(kind(model, best.settings["threads"], capacity)) as full:
        yield lambda token_ids: full.prefill(token_ids, best.settings)


def tables(rows: Sequence[BaselineRow]) -> list[Table]:
    """What was tried, and what was chosen."""
    chosen = {name: best_of(found).settings for name in BACKENDS if (found := [r for r in rows if r.backend == name])}
    columns = {
        "backend": lambda row: TITLES[row.backend],
        "settings": lambda row: ", ".join(f"{name} {value}" for name, value in row.settings.items()),
        "> tokens/s": lambda row: f"{row.tokens / row.ms * 1e3:,.0f}",
        "": lambda row: "chosen" if row.settings == chosen[row.backend] else "",
    }
    note = "The engine's own settings come first and are kept unless others are faster by more than 2 %."
    return [Table.of("Settings of full prefill", rows, columns, note)]
