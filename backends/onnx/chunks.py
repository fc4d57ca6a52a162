"""How many rows a run is computed in: a row alone goes through another matrix kernel than rows in company.

`MatMulNBits` has a kernel for single rows, and works on tiles of `ROW_TILE` rows, where a row alone in a tile goes
through it too (measured: rows 1, 129, 257, 385 and 513 of a call). Logits then differ from those of full prefill by 0.4
to 0.8 of 30 (DESIGN.md). So no prompt is ever computed in a single row: its last cached cell is computed again with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge_pc.backends.base import Plan, Span

# Tokens forwarded at a time. Results do not depend on it (tested), peak memory does; larger chunks were slower by 5 to
# 15 % on 2 cores of a Xeon with AVX512-VNNI, smaller ones no faster.
CHUNK_TOKENS = 256

ROW_TILE = 128


def chunks(tokens: int) -> Iterator[slice]:
    """Cuts a run into chunks that leave no row alone in a tile, unless the run is a single token."""
    start = 0
    while start < tokens:
        size = min(CHUNK_TOKENS, tokens - start)
        if tokens - start - size == 1:
            size -= 1
        elif size > 1 and size % ROW_TILE == 1:
            size -= 2
        yield slice(start, start + size)
        start += size


def with_last_cell(plan: Plan) -> Plan:
    """The plan, a run of one token lengthened by the last cell of its spans."""
    if len(plan.token_ids) != 1 or not plan.spans:
        return plan
    spans = list(plan.spans)
    last = max(range(len(spans)), key=lambda index: int(spans[index].position_ids[-1]))
    cut = spans[last]
    spans[last] = Span(cut.states, cut.start, cut.stop - 1, cut.shift)
    token_ids = np.append(cut.token_ids[-1:], plan.token_ids)
    position_ids = np.append(cut.position_ids[-1:], plan.position_ids)
    return Plan(tuple(span for span in spans if span.tokens), token_ids, position_ids, plan.exact)


def with_companion(plan: Plan) -> Plan:
    """The plan, a run of one token doubled: the first row never sees the second, whose result is dropped."""
    if len(plan.token_ids) != 1:
        return plan
    position_ids = plan.position_ids + np.array([0, 1], dtype=np.int32)
    return Plan(plan.spans, np.repeat(plan.token_ids, 2), position_ids, plan.exact)
