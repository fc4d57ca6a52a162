"""Turns a plan into steps in position order: cells to place, tokens to compute.

Done one after the other, each token is computed when exactly the cells before it are there: causality by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edge_pc.backends.base import Plan

# Each piece costs about what a decoded token costs; taking a prompt's cells to the workbench costs as much as a few.
_PIECES = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Cells `[start, stop)` of the states of the plan's span number `span`; no other cell's position is between."""

    span: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Tokens `[start, stop)` of the plan's run, at consecutive positions."""

    start: int
    stop: int


def steps(plan: Plan) -> Iterator[Place | Compute]:
    """The plan's steps in position order, without the cells whose place the run takes."""
    counts = [span.tokens for span in plan.spans] + [len(plan.token_ids)]
    positions = np.concatenate([*(span.position_ids for span in plan.spans), plan.position_ids])
    stays = np.append(~np.isin(positions[: plan.cached_tokens], plan.position_ids), np.ones(counts[-1], dtype=bool))
    source = np.repeat(np.arange(len(counts)), counts)
    first = [*(span.start for span in plan.spans), 0]
    index = np.concatenate([np.arange(start, start + n) for start, n in zip(first, counts, strict=True)])
    order = np.argsort(positions, kind="stable")
    order = order[stays[order]]
    source, index, positions = source[order], index[order], positions[order]
    run = len(plan.spans)
    breaks = (np.diff(source) != 0) | ((np.diff(positions) != 1) & (source[1:] == run))
    for piece in np.split(np.arange(len(order)), np.flatnonzero(breaks) + 1):
        start, stop = int(index[piece[0]]), int(index[piece[-1]]) + 1
        yield Compute(start, stop) if source[piece[0]] == run else Place(int(source[piece[0]]), start, stop)


def is_scattered(plan: Plan) -> bool:
    """Whether so many pieces of the run lie between cells that the workbench computes them faster than they can be one
    after the other.

    Never with an exact plan, whose sums must be added up as in full prefill.
    """
    return not plan.exact and sum(isinstance(step, Compute) for step in steps(plan)) > _PIECES


def batches(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts `[start, stop)` into pieces of at most `size`, none of a single token unless there is only one.

    One row goes through another matrix kernel than many, and comes out a little different.
    """
    while start < stop:
        end = min(start + size, stop)
        if stop - end == 1:
            end -= 1
        yield start, end
        start = end
