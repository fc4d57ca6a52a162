"""Chooses the cached cells that are computed again with a prompt, so that its answer comes close to full prefill's.

Modules that were encoded without each other lack what they would have seen of each other. Most of that matters little:
an answer depends on the few tokens that the question attends to. Those are computed again, seeing all that stands
before them, together with the prompt's own text (ProphetKV, arXiv 2602.02579, chooses by the question too).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import Context, Plan

# Of the cells that are not as full prefill would have them, the share that is computed again (docs/results).
SHARE = 0.15

# Where so few tokens are not as full prefill would have them, computing them all costs about what choosing costs: 45 ms
# with SmolLM2-135M on 2 cores, and 1.25 ms a token.
COMPUTED_ANYWAY = 64


def with_recomputed(context: Context, plan: Plan, approximate: Collection[str]) -> Plan:
    """The plan, with the cells computed again that its run attends to most.

    Args:
        context: measures attention.
        approximate: keys of the states whose cells may be chosen.
    """
    eligible = np.concatenate([np.full(span.tokens, span.states.key in approximate) for span in plan.spans])
    count = int(SHARE * np.count_nonzero(eligible))
    if not count:
        return plan
    weights = np.where(eligible, context.attention(plan), -1.0)
    return computed_again(plan, np.argpartition(-weights, count - 1)[:count])


def computed_again(plan: Plan, cells: NDArray[np.integer[Any]]) -> Plan:
    """The plan, with some of its cached cells computed with its run.

    Args:
        cells: their numbers, in the order of the plan's spans.
    """
    position_ids = np.concatenate([*(span.position_ids for span in plan.spans), plan.position_ids])
    token_ids = np.concatenate([*(span.token_ids for span in plan.spans), plan.token_ids])
    computed = np.concatenate([cells, np.arange(plan.cached_tokens, len(token_ids))])
    computed = computed[np.argsort(position_ids[computed])]
    return replace(plan, token_ids=token_ids[computed], position_ids=position_ids[computed])
