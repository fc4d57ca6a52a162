"""The llama.cpp backend's cache, where cells are not as they were stored: moved, computed again, asked about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamacpp_tools import TEXT, encoded, gone_on, opened, plan_at, plan_of, served, used, whole

from edge_pc.backends.base import KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.errors import StatesError
from edge_pc.models.positions import OpaqueEncoding

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

# Moved keys are rounded to 16 bit once more.
TOLERANCE = 0.02

EXACT_OR_NOT = pytest.mark.parametrize("exact", [False, True])


@pytest.fixture
def backend(tiny_gguf: Path) -> Iterator[LlamaCppBackend]:
    with opened(tiny_gguf) as backend:
        yield backend


def encoded_at(backend: LlamaCppBackend, start: int, stop: int, position: int) -> KVStates:
    """States of the text's tokens `[start, stop)`, alone, from `position` on."""
    positions = np.arange(position, position + stop - start, dtype=np.int32)
    with closing(backend.new_context(stop - start + 2)) as context:
        array = context.encode(
            Plan((), TEXT[start:stop], positions, exact=True), np.arange(stop - start, dtype=np.int32)
        )
    return KVStates(f"{start}-{stop}@{position}", array, TEXT[start:stop], positions)


def moved_to(states: KVStates, position: int, start: int = 0, stop: int | None = None) -> Span:
    """Cells `[start, stop)` of states, the first of which is placed at `position`."""
    stop = len(states.position_ids) if stop is None else stop
    return Span(states, start, stop, shift=position - int(states.position_ids[start]))


def states_of(backend: LlamaCppBackend, plan: Plan) -> Any:
    """Keys and values, float, that a prompt has of its cells, in position order."""
    blobs = BlobFormat(backend.spec.layers, backend.spec.kv_heads * backend.spec.head_dim)
    positions = np.sort(np.concatenate([*(span.position_ids for span in plan.spans), plan.position_ids]))
    with closing(backend.new_context(len(positions))) as context:
        context.prefill(plan)
        blob = backend._cache.run(lambda: context.prompt.read(positions))
    values = blobs.parts(blob, len(positions)).values.view("<f2")[..., 0]
    return blobs.keys(blob, len(positions)).astype(np.float32), values.swapaxes(1, 2).astype(np.float32)


class TestMoved:
    @EXACT_OR_NOT
    @pytest.mark.parametrize("shift", [1, -1, 37, 700])
    def test_cells_are_those_computed_there(self, backend: LlamaCppBackend, shift: int, exact: bool) -> None:
        stored = encoded_at(backend, 0, 100, 50)
        there = encoded_at(backend, 0, 100, 50 + shift)
        run = range(150 + shift, 155 + shift)
        found = states_of(backend, plan_at([moved_to(stored, 50 + shift)], run, exact=exact))
        wanted = states_of(backend, plan_at([whole(there)], run, exact=exact))
        still = states_of(backend, plan_at([whole(stored)], range(150, 155), exact=exact))
        assert np.array_equal(found[1][0, :100], wanted[1][0, :100]), "values of the first layer hold no position"
        scale = np.abs(wanted[0]).max()
        assert np.abs(found[0] - wanted[0]).max() < 2e-3 * scale
        np.testing.assert_allclose(found[1], wanted[1], atol=TOLERANCE)
        assert np.abs(still[0] - wanted[0]).max() > 0.02 * scale

    @EXACT_OR_NOT
    def test_another_order_with_parts_and_gaps(self, backend: LlamaCppBackend, exact: bool) -> None:
        first, second, third = (encoded(backend, start, start + 100) for start in (0, 100, 200))
        spans = [moved_to(third, 0), moved_to(first, 100, 30, 80), moved_to(second, 170), moved_to(first, 300)]
        there = [encoded_at(backend, 200, 300, 0), encoded_at(backend, 0, 100, 70), encoded_at(backend, 100, 200, 170)]
        there.append(encoded_at(backend, 0, 100, 300))
        fixed = [whole(there[0]), Span(there[1], 30, 80), whole(there[2]), whole(there[3])]
        run = [*range(150, 153), *range(400, 410)]
        for _ in range(2):  # the second time they are residents
            wanted = served(backend, plan_at(fixed, run, exact=exact))
            found = served(backend, plan_at(spans, run, exact=exact))
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
        in_place = served(backend, plan_at([whole(third), whole(second), whole(first)], run[3:], exact=exact))
        assert np.abs(in_place - wanted).max() > 5 * TOLERANCE, "where cells are matters"

    def test_cells_before_the_span_would_lie_before_the_beginning(self, backend: LlamaCppBackend) -> None:
        stored = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([Span(encoded_at(backend, 0, 100, 500), 60, 100)], 600, 610))
        np.testing.assert_allclose(
            served(backend, plan_of([moved_to(stored, 560, 60)], 600, 610)), wanted, atol=TOLERANCE
        )
        found = served(backend, Plan((moved_to(stored, 5, 60),), TEXT[600:610], np.arange(45, 55, dtype=np.int32)))
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)  # rotation tells distances only

    def test_residents_at_one_place_are_not_those_at_another(self, backend: LlamaCppBackend) -> None:
        stored = encoded(backend, 0, 100)
        plans = [plan_of([moved_to(stored, place)], place + 100, place + 110) for place in (0, 50, 200)]
        wanted = [served(backend, plan) for plan in plans]
        assert np.abs(wanted[0] - wanted[1]).max() > 5 * TOLERANCE, "other text follows"
        with closing(backend.new_context(120)) as user:
            user.prefill(plans[1])
            for plan, logits in [*zip(plans, wanted, strict=True)] * 2:
                assert np.array_equal(served(backend, plan), logits)
            assert used(backend) == 110

    def test_appended_and_cut(self, backend: LlamaCppBackend) -> None:
        first, second = encoded(backend, 0, 100), encoded(backend, 100, 200)
        spans = [moved_to(second, 0), moved_to(first, 120)]
        run = [*range(100, 110), *range(220, 230)]
        wanted = served(backend, plan_at(spans, run, exact=True))
        with closing(backend.new_context(240)) as context:
            context.prefill(plan_at(spans[:1], run[:10], exact=True))
            for _ in range(2):
                context.append(plan_at(spans[1:], run[10:15], exact=True))
                logits = context.append(plan_at([], run[15:], exact=True)).logits
                assert np.array_equal(logits, wanted)
                gone_on(backend, context, 230, 2)
                context.truncate(120)
                assert used(backend) == 110

    def test_states_that_cannot_be_moved(self, backend: LlamaCppBackend) -> None:
        stored = encoded(backend, 0, 40)
        backend._cache.reader._spec = replace(backend.spec, position=OpaqueEncoding("nobody knows how"))
        with closing(backend.new_context(200)) as context:
            for work in (context.prefill, context.append):
                with pytest.raises(StatesError, match="nobody knows how"):
                    work(plan_of([moved_to(stored, 100)], 140, 150))
            context.prefill(plan_of([whole(stored)], 40, 50))
            assert used(backend) == 50
