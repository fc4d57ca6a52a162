"""The llama.cpp backend's cache, where cells are not just those that were stored: moved, computed again, damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamacpp_tools import (
    TEXT,
    answered,
    blobs_of,
    encoded,
    equal,
    gone_on,
    opened,
    plan_at,
    plan_of,
    recorded,
    served,
    used,
    whole,
)
from reference import Reference
from store_tools import change_unseen, checking

from edge_pc import Engine, Sampling, Serving
from edge_pc.backends.base import KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.errors import ModelError, StatesError
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
    blobs = blobs_of(backend)
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


def expected(modules: Sequence[Span], run: Sequence[int], tokens: Any = TEXT) -> Any:
    """Logits of the run's last token by the rules alone: a module sees itself, all of it; the run all before it, but
    the cells in whose place it is."""
    positions = np.concatenate([*(span.position_ids for span in modules), np.array(run, dtype=np.int32)])
    token_ids = np.concatenate([*(span.token_ids for span in modules), tokens[run]])
    owner = np.repeat(np.arange(len(modules) + 1), [*(span.tokens for span in modules), len(run)])
    computed = owner == len(modules)
    replaced = np.isin(positions, run) & ~computed
    sees = np.where(computed[:, None], ~replaced[None, :], owner[None, :] == owner[:, None])
    return Reference().logits(token_ids, positions, sees & (positions[None, :] <= positions[:, None]))[-1]


# Single tokens, two ranges, a module's first and last cells, cells at the end right before the question.
SCATTERED = [0, 3, 17, 18, 19, 60, 99, 100, 131, 150, 170, 171, 198, 199]


class TestComputedAgain:
    @pytest.mark.parametrize("run", [SCATTERED, SCATTERED[:4], [99, 100, 101], [199]], ids=len)
    def test_logits_are_those_of_the_rules(self, backend: LlamaCppBackend, run: list[int]) -> None:
        modules = [whole(encoded(backend, 0, 100)), moved_to(encoded_at(backend, 100, 200, 7), 100)]
        run = [*run, *range(200, 212)]
        wanted = expected(modules, run)
        for exact in (False, True):
            np.testing.assert_allclose(served(backend, plan_at(modules, run, exact=exact)), wanted, atol=0.15)
        unchanged = expected(modules, run[-12:])
        if len(run) > 20:
            assert np.abs(unchanged - wanted).max() > 0.3, "computing cells again matters"

    def test_at_once_as_one_after_the_other(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two ways to the same, and the answer goes on alike."""
        modules = [
            whole(encoded(backend, 0, 100)),
            whole(encoded(backend, 100, 200)),
            whole(encoded(backend, 300, 600)),
        ]
        rng = np.random.default_rng(3)
        again = sorted(rng.choice([*range(200), *range(300, 600)], 60, replace=False).tolist())
        run = [*again, *range(600, 630)]
        slowly = answered(backend, plan_at(modules, run, exact=True), 4)
        calls = recorded(monkeypatch, "decode")
        at_once = answered(backend, plan_at(modules, run), 4)
        assert len(calls) == 4, "one run, and three tokens"
        np.testing.assert_allclose(at_once, slowly, atol=TOLERANCE)

    def test_other_tokens_than_the_cells(self, backend: LlamaCppBackend) -> None:
        modules = [whole(encoded(backend, 0, 100)), whole(encoded(backend, 100, 200))]
        run = [*SCATTERED, *range(200, 212)]
        other = (TEXT + 1).astype(np.int32)
        plan = replace(plan_at(modules, run), token_ids=other[run])
        np.testing.assert_allclose(served(backend, plan), expected(modules, run, other), atol=0.15)

    def test_the_module_keeps_its_cells(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        module = whole(encoded(backend, 0, 200))
        plain = plan_of([module], 200, 212)
        wanted = answered(backend, plain)
        run = [*SCATTERED, *range(200, 212)]
        with closing(backend.new_context(220)) as user:
            first = user.prefill(plan_at([module], run)).logits
            assert used(backend) == 212, "cells in whose place others are have left, and no cell is there twice"
            writes = recorded(monkeypatch, "write")
            loaded = len(writes)
            assert equal(answered(backend, plain), wanted)
            assert len(writes) == loaded, "the resident was joined"
            again = gone_on(backend, user, 212, 2)
        assert equal([first, *again], answered(backend, plan_at([module], run)))

    def test_many_tokens_of_a_long_prompt(self, backend: LlamaCppBackend) -> None:
        """More than are computed at a time."""
        modules = [whole(encoded(backend, 0, 450)), whole(encoded(backend, 450, 900))]
        run = [*range(0, 900, 3), *range(900, 930)]
        np.testing.assert_allclose(served(backend, plan_at(modules, run)), expected(modules, run), atol=0.15)

    def test_after_what_is_there(self, backend: LlamaCppBackend) -> None:
        first, second = encoded(backend, 0, 100), encoded(backend, 150, 350)
        run = [*range(150, 350, 20), *range(350, 360)]
        with closing(backend.new_context(400)) as context:
            context.prefill(plan_of([whole(first)], 100, 110))
            logits = context.append(plan_at([whole(second)], run)).logits
            wanted = served(backend, plan_at([whole(first), whole(second)], [*range(100, 110), *run]))
            np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)
            context.truncate(225)
            assert used(backend) == 100 + 10 + 75
            again = context.append(plan_at([Span(second, 75, 200)], [r for r in run if r >= 225])).logits
            np.testing.assert_allclose(again, wanted, atol=TOLERANCE)

    def test_cells_between_gaps_are_encoded_so(self, backend: LlamaCppBackend) -> None:
        positions = [0, 1, 5, 9, 13, 14, 30, 60, 61, 99]
        at_once = states_of(backend, plan_at([], positions))
        slowly = states_of(backend, plan_at([], positions, exact=True))
        for found, wanted in zip(at_once, slowly, strict=True):
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


class TestAttention:
    def test_weights_are_those_of_the_model(self, backend: LlamaCppBackend) -> None:
        modules = [whole(encoded(backend, 0, 60)), moved_to(encoded(backend, 200, 290), 80)]
        cells = np.array([*range(60), *range(80, 170), *range(170, 180)], dtype=np.int32)
        tokens = np.concatenate([*(span.token_ids for span in modules), TEXT[170:180]])
        owner = np.repeat([0, 1, 2], [60, 90, 10])
        visible = (cells[None, :] <= cells[:, None]) & ((owner == 2)[:, None] | (owner[None, :] == owner[:, None]))
        with closing(backend.new_context(200)) as context:
            found = context.attention(plan_of(modules, 170, 180))
            reordered = context.attention(plan_of(modules[::-1], 170, 180))
        reference = Reference()
        reference.logits(tokens, cells, visible)
        weights = reference.attention[1][:, 150:, :150]
        wanted = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=(0, 1))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=2e-3 * wanted.max(), rtol=0.02)
        np.testing.assert_allclose(found.sum(), 1, rtol=1e-5)
        np.testing.assert_allclose(np.concatenate([reordered[90:], reordered[:90]]), found, rtol=1e-3)

    def test_nothing_stays_and_prompts_go_on(self, backend: LlamaCppBackend) -> None:
        modules = [whole(encoded(backend, 0, 100)), whole(encoded(backend, 100, 250))]
        plan = plan_of(modules, 250, 400)  # more tokens than are asked
        wanted = answered(backend, plan)
        with closing(backend.new_context(410)) as context, closing(backend.new_context(120)) as other:
            context.attention(plan)
            assert used(backend) == 250
            first = other.prefill(plan_of(modules[:1], 100, 110)).logits
            context.attention(plan)
            assert equal([context.prefill(plan).logits, *gone_on(backend, context, 400, 2)], wanted)
            assert equal([first, *gone_on(backend, other, 110, 2)], answered(backend, plan_of(modules[:1], 100, 110)))

    def test_without_cells(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(20)) as context:
            assert context.attention(plan_of([], 0, 10)).shape == (0,)

    def test_cells_that_are_computed_again_get_nothing(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(80)) as context:
            weights = context.attention(plan_at([whole(encoded(backend, 0, 60))], [10, 20, *range(60, 70)]))
        assert np.flatnonzero(weights == 0).tolist() == [10, 20]

    def test_a_library_whose_graph_is_another(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edge_pc.backends.llamacpp.hook._POSITIONS", b"positions")
        module = whole(encoded(backend, 0, 60))
        with closing(backend.new_context(80)) as context:
            for work in (context.attention, context.prefill):
                with pytest.raises(ModelError, match="has no positions"):
                    work(plan_at([module], [1, 5, 10, 20, *range(60, 70)]))
            monkeypatch.undo()
            wanted = served(backend, plan_of([module], 60, 70))
            assert np.array_equal(context.prefill(plan_of([module], 60, 70)).logits, wanted)


SCHEMA = """<schema name="pets"><module name="cat">The cat sleeps in the house, all day and all night.</module>
<module name="dog">The dog runs in the wood, and in the house.</module></schema>"""
PROMPT = '<prompt schema="pets"><cat/><dog/>Where is it?</prompt>'


class TestInfiniteNumbers:
    @pytest.mark.parametrize("part", ["keys", "values"])
    def test_nothing_is_answered_from_them_nor_after_them(self, backend: LlamaCppBackend, part: str) -> None:
        plain, run = plan_of([whole(encoded(backend, 0, 100))], 100, 110), [0, 5, 10, 15, 20, *range(200, 210)]
        wanted = answered(backend, plain)
        damaged = encoded(backend, 0, 200)
        parts = (blobs := blobs_of(backend)).parts(blobs.check(damaged.array, damaged.position_ids), 200)
        getattr(parts, part).view("<f2")[..., -9:, :1] = np.inf
        with closing(backend.new_context(220)) as context, closing(backend.new_context(120)) as bystander:
            for work in (context.prefill, context.append, context.attention):
                for plan in (plan_of([whole(damaged)], 200, 210), plan_at([whole(damaged)], run)):
                    bystander.prefill(plain)
                    context.truncate(0)
                    with pytest.raises(StatesError, match="infinite numbers"):
                        work(plan)
                    with pytest.raises(StatesError, match="lost"):
                        gone_on(backend, bystander, 110, 1)
                    assert equal(answered(backend, plain), wanted)
                    context.prefill(plain)
            context.prefill(plain)
            assert used(backend) == 110

    def test_a_file_of_the_store(self, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The prompt is computed, and so well that nothing shows but a warning."""
        short = Sampling(max_tokens=8)
        with Engine(tiny_gguf, backend="llamacpp", cache_dir=tmp_path) as engine:
            engine.load_schema(SCHEMA)
            wanted = engine.generate(PROMPT, short, Serving(fidelity="fast")).token_ids
            computed = engine.generate(PROMPT, short, Serving(use_cache=False)).token_ids
            [key] = [entry.key for entry in engine.store.entries() if entry.module == "cat"]
        data = bytearray((tmp_path / key[:2] / f"{key}.npy").read_bytes())
        values = len(data) // 2 * 2 - 4000  # among those of the last layer
        data[values : values + 2000] = b"\0\x7c" * 1000
        change_unseen(tmp_path, key, bytes(data))
        with Engine(tiny_gguf, backend="llamacpp", cache_dir=tmp_path) as engine:
            engine.load_schema(SCHEMA)
            first = engine.generate(PROMPT, short, Serving(fidelity="fast"))
            assert first.token_ids == computed
            assert "infinite numbers" in caplog.text
            for thread in checking():
                thread.join(60)
            assert engine.generate(PROMPT, short, Serving(fidelity="fast")).token_ids == wanted
