"""How others choose the cached tokens that are computed again, for a comparison at the same number of tokens.

Both start from modules that were encoded alone, as their papers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.lab import Lab, Ready
from edge_pc.backends.base import Span
from edge_pc.backends.onnx.layout import PagedLayout
from edge_pc.compose.laid_out import LaidOut
from edge_pc.runtime.recompute import SHARE, computed_again
from edge_pc.runtime.serving import Fidelity

Way = Fidelity | Literal["EPIC", "CacheBlend"]

# CacheBlend finds the tokens to compute again by what a full computation of the first layers shows.
_LAYER = 1


def ready(lab: Lab, prompt: LaidOut, way: Way) -> Ready:
    """A prompt that reuses states in a certain way."""
    if way == "EPIC":
        return _again(lab.cached(prompt), _by_beginnings)
    if way == "CacheBlend":
        full = lab.full(prompt).plan.spans[0]
        return _again(lab.cached(prompt), lambda spans: _by_deviation(lab, spans, full))
    return lab.cached(prompt, way)


def _again(cached: Ready, rank: Callable[[Sequence[Span]], NDArray[np.float64]]) -> Ready:
    """The prompt with the share of its modules' cells computed again that ranks highest; its first span is right."""
    plan = cached.plan
    first = plan.spans[0].tokens
    ranks = rank(plan.spans)
    ranks[:first] = -1
    count = int(SHARE * (plan.cached_tokens - first))
    return Ready(computed_again(plan, np.argsort(-ranks, kind="stable")[:count]), cached.end)


def _by_beginnings(spans: Sequence[Span]) -> NDArray[np.float64]:
    """EPIC (arXiv 2410.15332): the first tokens of each module."""
    return np.concatenate([1 - np.arange(span.tokens) / span.tokens for span in spans])


def _by_deviation(lab: Lab, spans: Sequence[Span], full: Span) -> NDArray[np.float64]:
    """CacheBlend (arXiv 2405.16444): the tokens whose early keys and values are furthest from full prefill's.

    Cells that `full` lacks, which stand at the prompt's end, do not differ.
    """
    right = _early(lab, full)
    return np.concatenate([_differences(lab, span, right) for span in spans])


def _differences(lab: Lab, span: Span, right: NDArray[np.float32]) -> NDArray[np.float64]:
    positions = span.position_ids
    known = positions < right.shape[2]
    found = np.zeros(span.tokens)
    mine = _early(lab, span)[:, :, known]
    found[known] = np.square(mine - right[:, :, positions[known]]).sum(axis=(0, 1, 3))
    return found


def _early(lab: Lab, span: Span) -> NDArray[np.float32]:
    """Keys and values of an early layer, float32 `[2, kv_heads, tokens, head_dim]`; ONNX Runtime's states only."""
    layout = lab.backend.kv_layout
    assert isinstance(layout, PagedLayout)
    row = layout.lead(span.states.position_ids) + span.start
    early: NDArray[np.float32] = span.states.array[_LAYER, :, :, row : row + span.tokens]
    return early
