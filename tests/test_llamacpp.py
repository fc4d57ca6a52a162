"""The llama.cpp backend's cache: what prompts share, positions, several prompts at once, and that nothing stays."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
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

from edge_pc.backends.base import DecodeStep, KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.books import BLOCK
from edge_pc.backends.llamacpp.native import SEQUENCES
from edge_pc.errors import ContextLengthError, EngineError, ModelError, StatesError

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

# Keys and values are kept in 16 bit, which the reference does not.
TOLERANCE = 0.15


@pytest.fixture
def backend(tiny_gguf: Path) -> Iterator[LlamaCppBackend]:
    with opened(tiny_gguf) as backend:
        yield backend


class TestSharing:
    def test_sixteen_prompts_hold_one_module_once(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 300)
        contexts = [backend.new_context(305 + number) for number in range(16)]
        for number, context in enumerate(contexts):
            context.prefill(plan_of([whole(module)], 300, 305 + number))
        own = sum(5 + number for number in range(16))
        assert used(backend) <= 300 + own + 16 * (BLOCK - 1)
        for context in contexts:
            context.close()
        assert used(backend) == 0

    def test_a_resident_module_is_joined_without_new_cells(
        self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = encoded(backend, 0, 400)
        served(backend, plan_of([whole(module)], 400, 408))
        writes = recorded(monkeypatch, "write")
        with closing(backend.new_context(410)) as context:
            context.prefill(plan_of([whole(module)], 400, 408))
            assert writes == [], "nothing was loaded"
            assert used(backend) == 408

    def test_what_the_next_prompt_does_not_use_leaves(self, backend: LlamaCppBackend) -> None:
        served(backend, plan_of([whole(encoded(backend, 0, 400))], 400, 408))
        assert backend.cache_use().idle == 400
        with closing(backend.new_context(10)) as context:
            context.prefill(plan_of([], 0, 10))
            assert (backend.cache_use().held, backend.cache_use().idle) == (10, 0)

    def test_a_module_in_use_stays_for_its_prompt(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 100)
        wanted = answered(backend, plan_of([whole(module)], 100, 109), 2)
        with closing(backend.new_context(112)) as context:
            first = context.prefill(plan_of([whole(module)], 100, 109)).logits
            served(backend, plan_of([], 0, 50))
            assert equal([first, *gone_on(backend, context, 109, 1)], wanted)

    def test_states_that_were_made_again_are_loaded_again(self, backend: LlamaCppBackend) -> None:
        """The first were damaged; the key is that of the tokens, and so the same."""
        good = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([whole(good)], 100, 108))
        damaged = replace(encoded(backend, 100, 200), key=good.key, position_ids=good.position_ids)
        blob = blobs_of(backend).check(damaged.array, np.arange(100, 200, dtype=np.int32))
        blobs_of(backend).frame(blob, good.position_ids)
        assert not np.array_equal(served(backend, plan_of([whole(damaged)], 100, 108)), wanted)
        assert np.array_equal(served(backend, plan_of([whole(good)], 100, 108)), wanted)

    def test_more_modules_than_sequences(self, backend: LlamaCppBackend) -> None:
        modules = [encoded(backend, 3 * i, 3 * i + 3) for i in range(SEQUENCES)]
        spans = [whole(module) for module in modules]
        stop = 3 * SEQUENCES
        wanted = served(backend, plan_of(spans, stop, stop + 4, exact=True))
        reversed_order = served(backend, plan_of(spans[::-1], stop, stop + 4))
        np.testing.assert_allclose(reversed_order, wanted, atol=1e-2)
        alone = served(backend, plan_of([], 0, stop + 4))
        assert np.abs(alone - wanted).max() > 0.1, "the modules were encoded alone, which shows"


class TestPositions:
    def test_a_gap_does_not_show_to_others_of_the_module(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 60)
        wanted = served(backend, plan_of([], 0, 70))
        with closing(backend.new_context(80)) as gapped:
            far = gapped.prefill(plan_of([whole(module)], 200, 210)).logits
            assert np.array_equal(served(backend, plan_of([whole(module)], 60, 70)), wanted)
            again = served(backend, plan_of([whole(module)], 200, 210))
        assert np.array_equal(again, far)

    def test_runs_with_gaps_and_a_run_inside_a_module(self, backend: LlamaCppBackend) -> None:
        """A module at 0-29 and 40-59; tokens computed at 30-32, 37, 70-74 and 80; the answer goes on at 100."""
        positions = np.concatenate([np.arange(0, 30), np.arange(40, 60)]).astype(np.int32)
        run = np.array([30, 31, 32, 37, 70, 71, 72, 73, 74, 80], dtype=np.int32)
        with closing(backend.new_context(60)) as context:
            array = context.encode(plan_at([], positions.tolist(), exact=True), np.arange(50, dtype=np.int32))
        module = KVStates("m", array, TEXT[positions], positions)

        order = np.argsort(np.concatenate([positions, run]), kind="stable")
        cells = np.concatenate([positions, run, [100]])[[*order, 60]].astype(np.int32)
        computed = np.isin(cells, [*run, 100])
        visible = (cells[None, :] <= cells[:, None]) & (computed[:, None] | ~computed[None, :])
        wanted = Reference().logits(TEXT[cells], cells, visible)

        for exact in (False, True):
            with closing(backend.new_context(70)) as context:
                got = context.prefill(plan_at([whole(module)], run.tolist(), exact=exact)).logits
                [later] = gone_on(backend, context, 100, 1)
            np.testing.assert_allclose(got, wanted[-2], atol=TOLERANCE)
            np.testing.assert_allclose(later, wanted[-1], atol=TOLERANCE)
        blind = Reference().logits(TEXT[cells], cells, cells[None, :] <= cells[:, None])
        assert np.abs(blind - wanted).max() > 3 * TOLERANCE, "what the module sees matters"

    def test_parts_of_a_module(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 60)
        spans = [Span(module, 0, 20), Span(module, 25, 55)]
        cells = np.arange(60, dtype=np.int32)
        wanted = Reference().logits(TEXT[cells], cells, np.tril(np.ones((60, 60), dtype=bool)))
        for exact in (False, True):
            got = served(backend, plan_at(spans, [*range(20, 25), *range(55, 60)], exact=exact))
            np.testing.assert_allclose(got, wanted[-1], atol=TOLERANCE)

    def test_encoding_around_gaps_keeps_what_is_asked_for(self, backend: LlamaCppBackend) -> None:
        positions, some_of = np.array([0, 1, 2, 10, 11, 30], dtype=np.int32), np.array([2, 3, 5], dtype=np.int32)
        plan = plan_at([], positions.tolist(), exact=True)
        with closing(backend.new_context(10)) as context:
            everything = context.encode(plan, np.arange(6, dtype=np.int32))
            some = context.encode(plan, some_of)
        blobs, kept = blobs_of(backend), positions[some_of]
        taken = blobs.take(blobs.check(everything, positions), some_of, kept)
        assert np.array_equal(blobs.check(some, kept), taken)

    def test_a_single_token_is_encoded_as_in_a_longer_run(self, backend: LlamaCppBackend) -> None:
        before = encoded(backend, 0, 40)
        alone = encoded(backend, 40, 41, [whole(before)])
        longer = encoded(backend, 40, 60, [whole(before)])
        blobs, first = blobs_of(backend), np.array([0], dtype=np.int32)
        taken = blobs.take(blobs.check(longer.array, longer.position_ids), first, alone.position_ids)
        assert np.array_equal(blobs.check(alone.array, alone.position_ids), taken)

    @pytest.mark.parametrize("exact", [False, True])
    def test_moved_states(self, backend: LlamaCppBackend, exact: bool) -> None:
        """States serve at other positions as those that were computed there."""
        module = encoded(backend, 0, 40)
        positions = np.arange(100, 140, dtype=np.int32)
        with closing(backend.new_context(200)) as context:
            array = context.encode(Plan((), TEXT[:40], positions), np.arange(40, dtype=np.int32))
        there = KVStates("there", array, TEXT[:40], positions)
        for _ in range(2):
            moved = answered(backend, plan_of([replace(whole(module), shift=100)], 140, 150, exact=exact))
            wanted = answered(backend, plan_of([whole(there)], 140, 150, exact=exact))
            np.testing.assert_allclose(moved, wanted, atol=0.05)
        at_home = answered(backend, plan_of([whole(module)], 140, 150, exact=exact))
        assert np.abs(at_home[0] - wanted[0]).max() > 0.1

    def test_one_module_at_two_places(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 40)
        spans = [replace(whole(module), shift=50), whole(module), replace(whole(module), shift=100)]
        twice = served(backend, plan_of(spans, 140, 150))
        np.testing.assert_array_equal(served(backend, plan_of(spans[::-1], 140, 150)), twice)
        with closing(backend.new_context(200)) as context:
            context.prefill(plan_of(spans[1:2], 40, 45))
            context.append(plan_of([spans[0]], 90, 95))
            assert used(backend) == 90

    def test_computed_cells_take_the_place_of_stored_ones(self, backend: LlamaCppBackend) -> None:
        first, apart = encoded(backend, 0, 60), encoded(backend, 60, 160)
        whole_prompt = served(backend, plan_of([], 0, 180))
        again = plan_of([whole(first), whole(apart)], 60, 180)
        np.testing.assert_allclose(served(backend, again), whole_prompt, atol=TOLERANCE)
        some = plan_at([whole(first), whole(apart)], [60, 61, 90, 120, 159, *range(160, 180)])
        parts = [Span(apart, start, stop) for start, stop in ((2, 30), (31, 60), (61, 99))]
        cut = plan_at([whole(first), *parts], some.position_ids.tolist())
        for _ in range(2):
            np.testing.assert_allclose(served(backend, some), served(backend, cut), atol=1e-3)
            untouched = plan_of([whole(first), whole(apart)], 160, 180)
            assert np.abs(served(backend, some) - served(backend, untouched)).max() > 0.01


class TestDecoding:
    def test_several_prompts_in_one_pass(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        module = encoded(backend, 0, 80)
        stops = (83, 90, 84, 100)
        contexts = [backend.new_context(stop + 4) for stop in stops]
        for context, stop in zip(contexts, stops, strict=True):
            context.prefill(plan_of([whole(module)], 80, stop))
        calls = recorded(monkeypatch, "decode")
        for shift in range(3):
            steps = [
                DecodeStep(context, int(TEXT[stop + shift]), stop + shift)
                for context, stop in zip(contexts, stops, strict=True)
            ]
            together = backend.decode(steps[:: -1 if shift else 1])[:: -1 if shift else 1]
        assert len(calls) == 3, "one pass over the weights for each step"
        for context in contexts:
            context.close()
        for logits, stop in zip(together, stops, strict=True):
            np.testing.assert_allclose(logits, served(backend, plan_of([], 0, stop + 3)), atol=1e-2)

    def test_the_last_cell_of_the_capacity(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(12)) as context:
            context.prefill(plan_of([], 0, 10))
            assert len(gone_on(backend, context, 10, 2)) == 2

    def test_a_step_may_be_repeated(self, backend: LlamaCppBackend) -> None:
        """Who was interrupted while waiting does not know that the token was computed."""
        with closing(backend.new_context(40)) as context:
            context.prefill(plan_of([], 0, 10))
            once = [*gone_on(backend, context, 10, 1), *gone_on(backend, context, 20, 3)]
            again = [*gone_on(backend, context, 10, 1), *gone_on(backend, context, 20, 3)]
        assert equal(again, once)


class TestNothingStays:
    def test_after_a_cancelled_request(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 50)

        def cancel(tokens: int) -> None:
            raise KeyboardInterrupt

        for run in (plan_of([whole(module)], 50, 60), plan_of([whole(module)], 50, 800), plan_of([], 0, 700)):
            with closing(backend.new_context(800)) as context:
                with pytest.raises(KeyboardInterrupt):
                    context.prefill(run, cancel)
                with pytest.raises(KeyboardInterrupt):
                    context.encode(run, np.array([0], dtype=np.int32), cancel)
                wanted = served(backend, plan_of([], 0, 60))
                assert np.array_equal(context.prefill(plan_of([whole(module)], 50, 60)).logits, wanted)
            assert used(backend) == 0

    def test_after_states_that_are_refused(self, backend: LlamaCppBackend) -> None:
        good = encoded(backend, 0, 50)
        array = encoded(backend, 50, 80).array
        array.reshape(-1)[0] ^= 1
        bad = KVStates("bad", array, TEXT[50:80], np.arange(50, 80, dtype=np.int32))
        with closing(backend.new_context(100)) as context:
            for exact in (False, True):
                with pytest.raises(StatesError, match="header"):
                    context.prefill(plan_of([whole(good), whole(bad)], 80, 90, exact=exact))
            context.prefill(plan_of([whole(good)], 50, 60))
            assert used(backend) == 60

    def test_after_a_prompt_that_was_replaced(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(300)) as context:
            context.prefill(plan_of([], 0, 300))
            again = context.prefill(plan_of([], 0, 20)).logits
            assert used(backend) == 20
        assert np.array_equal(again, served(backend, plan_of([], 0, 20)))
        assert used(backend) == 0

    def test_after_a_context_that_nobody_closed(self, backend: LlamaCppBackend) -> None:
        for _ in range(2 * SEQUENCES):
            backend.new_context(20).prefill(plan_of([], 0, 20))
        assert used(backend) == 0


class TestRoom:
    def test_a_prompt_larger_than_the_cache(self, tiny_gguf: Path) -> None:
        with opened(tiny_gguf, 256) as backend:
            module = encoded(backend, 0, 600)
            wanted = answered(backend, plan_of([], 0, 620))
            assert equal(answered(backend, plan_of([whole(module)], 600, 620)), wanted)

    def test_open_prompts_move_into_a_larger_cache(self, backend: LlamaCppBackend) -> None:
        """Answers go on as if nothing had been."""
        module, size = encoded(backend, 0, 60), backend.cache_use().cells
        plans = [plan_of([whole(module)], 60, 73), plan_of([whole(module)], 200, 210), plan_of([], 300, 311)]
        wanted = [answered(backend, plan) for plan in plans]
        with ExitStack() as opened:
            contexts = [opened.enter_context(closing(backend.new_context(90))) for _ in range(5)]
            first = [
                context.prefill(plan).logits
                for context, plan in zip(contexts, [plans[0], *plans, plans[2]], strict=True)
            ][1:]
            contexts.pop(0).prefill(plans[2])  # leaves free places in the middle
            big = opened.enter_context(closing(backend.new_context(900)))
            big.prefill(plan_of([], 0, 880))
            assert backend.cache_use().cells > size
            backend.check()
            for context, plan, before, logits in zip(contexts, plans, first, wanted, strict=False):
                after = gone_on(backend, context, int(plan.position_ids[-1]) + 1, 2)
                assert equal([before, *after], logits)
        assert used(backend) == 0

    def test_modules_move_down_rather_than_make_the_cache_larger(self, backend: LlamaCppBackend) -> None:
        size = backend.cache_use().cells
        modules = [encoded(backend, start, start + 250) for start in (0, 250, 500)]
        served(backend, plan_of([whole(module) for module in modules], 750, 760))
        for _ in range(2):
            served(backend, plan_of([whole(modules[2])], 750, 1000))
            assert backend.cache_use().cells == size

    def test_an_answer_longer_than_its_capacity(self, tiny_gguf: Path) -> None:
        with opened(tiny_gguf, 256) as backend, closing(backend.new_context(10)) as context:
            context.prefill(plan_of([], 0, 10))
            logits = gone_on(backend, context, 10, 290)[-1]
            np.testing.assert_allclose(logits, served(backend, plan_of([], 0, 300)), atol=1e-2)

    def test_too_many_open_prompts(self, backend: LlamaCppBackend) -> None:
        with ExitStack() as contexts:

            def open_many() -> None:
                for _ in range(SEQUENCES):
                    contexts.enter_context(closing(backend.new_context(2)))

            with pytest.raises(ContextLengthError, match="open at once"):
                open_many()
        served(backend, plan_of([], 0, 10))

    def test_without_memory_for_a_larger_cache(self, backend: LlamaCppBackend) -> None:
        """What is open stays as it is."""
        wanted = answered(backend, plan_of([], 0, 30))
        with closing(backend.new_context(40)) as context:
            first = context.prefill(plan_of([], 0, 30)).logits
            other = backend.new_context(1 << 20)
            with little_memory(), pytest.raises(ContextLengthError, match="need a cache of"):
                other.prefill(plan_of([], 0, 30))
            assert equal([first, *gone_on(backend, context, 30, 2)], wanted)


@contextmanager
def little_memory() -> Iterator[None]:
    """The process gets 64 MiB more and no further."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class TestClosed:
    def test_what_is_still_open_when_the_model_is_closed(self, tiny_gguf: Path) -> None:
        backend = LlamaCppBackend(tiny_gguf)
        context = backend.new_context(40)
        context.prefill(plan_of([whole(encoded(backend, 0, 20))], 20, 30))
        backend.close()
        backend.close()
        for work in (
            lambda: gone_on(backend, context, 30, 1),
            lambda: context.prefill(plan_of([], 0, 10)),
            lambda: context.truncate(3),
            lambda: backend.new_context(10),
            backend.check,
        ):
            with pytest.raises(ModelError, match="closed"):
                work()
        context.close()

    def test_a_context(self, backend: LlamaCppBackend) -> None:
        context = backend.new_context(40)
        context.prefill(plan_of([], 0, 10))
        context.close()
        context.close()
        with pytest.raises(EngineError, match="closed"):
            gone_on(backend, context, 10, 1)
        assert used(backend) == 0


def test_eight_threads(backend: LlamaCppBackend) -> None:
    """Plans that share modules where these lie: rounding errors at most."""
    first, second = encoded(backend, 0, 60), encoded(backend, 60, 100)
    plans = [plan_of([], 0, 70), plan_of([whole(first)], 60, 75), plan_of([whole(second), whole(first)], 100, 110)]
    plans += [plan_of([whole(second)], 100, 103), plan_of([whole(first)], 120, 130)]
    wanted = [answered(backend, plan) for plan in plans]
    start = threading.Barrier(8)

    def work(number: int) -> list[tuple[int, list[Any]]]:
        start.wait()
        return [(i % len(plans), answered(backend, plans[i % len(plans)])) for i in range(number, number + 10)]

    with ThreadPoolExecutor(8) as threads:
        for results in threads.map(work, range(8)):
            for index, logits in results:
                np.testing.assert_allclose(logits, wanted[index], atol=1e-2)
    assert used(backend) == 0


def test_a_failure_between_two_changes(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused memory, for one: what prompts held is lost, which they say; the model goes on."""
    module = encoded(backend, 0, 100)
    wanted = answered(backend, plan_of([whole(module)], 100, 110))

    def fail(*_: Any) -> None:
        raise MemoryError

    with closing(backend.new_context(120)) as bystander, closing(backend.new_context(120)) as context:
        bystander.prefill(plan_of([whole(module)], 100, 110))
        with monkeypatch.context() as patch:
            patch.setattr("edge_pc.backends.llamacpp.books.Books.join", fail)
            with pytest.raises(MemoryError):
                context.prefill(plan_of([whole(module)], 100, 110))
        assert used(backend) == 0
        for work in (
            lambda: gone_on(backend, bystander, 110, 1),
            lambda: bystander.append(plan_of([], 110, 112)),
            lambda: bystander.truncate(50),
        ):
            with pytest.raises(StatesError, match="lost"):
                work()
        for lost in (context, bystander):
            lost.prefill(plan_of([whole(module)], 100, 110))
    assert equal(answered(backend, plan_of([whole(module)], 100, 110)), wanted)
    assert used(backend) == 0


def test_a_plan_needs_no_spans_and_no_more_than_one_token(backend: LlamaCppBackend) -> None:
    one = served(backend, Plan((), TEXT[:1], np.array([0], dtype=np.int32)))
    np.testing.assert_allclose(
        one, Reference().logits(TEXT[:1], np.array([0]), np.ones((1, 1), bool))[0], atol=TOLERANCE
    )
