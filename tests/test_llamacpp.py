"""The llama.cpp backend's cache: what prompts share, in which places cells lie, and that nothing stays behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import Reference

from edge_pc.backends.base import DecodeStep, KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.cells import LANES
from edge_pc.backends.llamacpp.context import LlamaCppContext
from edge_pc.backends.llamacpp.native import SEQUENCES
from edge_pc.errors import ContextLengthError, ModelError, StatesError

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

# Keys and values are kept in 16 bit, which the reference does not.
TOLERANCE = 0.15

RNG = np.random.default_rng(0)
TEXT = RNG.integers(10, 250, 900).astype(np.int32)


@pytest.fixture
def backend(tiny_gguf: Path) -> Iterator[LlamaCppBackend]:
    opened = LlamaCppBackend(tiny_gguf, n_ctx=1024)
    yield opened
    check_books(opened)
    opened.close()


def check_books(backend: LlamaCppBackend) -> None:
    """Our books are what libllama has: each sequence's cells, in the order of their places."""
    cells, blobs = backend._pool.cells, backend._pool.blobs
    for sequence in range(SEQUENCES):
        kept = cells.labels(sequence)
        assert cells._session._library.llama_memory_seq_pos_max(cells._session._memory, sequence) == cells.last(
            sequence
        )
        if len(kept):
            assert np.array_equal(blobs.positions(cells.read(sequence)), kept)
    assert np.array_equal(cells._owners, cells._members.sum(axis=0))


def plan_of(spans: Sequence[Span], start: int, stop: int, *, exact: bool = False) -> Plan:
    """Spans, and the text's tokens `[start, stop)` at those positions."""
    return Plan(tuple(spans), TEXT[start:stop], np.arange(start, stop, dtype=np.int32), exact)


def encoded(backend: LlamaCppBackend, start: int, stop: int, spans: Sequence[Span] = (), key: str = "") -> KVStates:
    """States of the text's tokens `[start, stop)`."""
    plan = plan_of(spans, start, stop, exact=True)
    with closing(backend.new_context(stop + 2)) as context:
        array = context.encode(plan, np.arange(stop - start, dtype=np.int32))
    return KVStates(key or f"{start}-{stop}", array, plan.token_ids, plan.position_ids)


def whole(states: KVStates) -> Span:
    return Span(states, 0, len(states.position_ids))


def served(backend: LlamaCppBackend, plan: Plan) -> Any:
    """First-token logits."""
    with closing(backend.new_context(plan.cached_tokens + len(plan.token_ids))) as context:
        return context.prefill(plan).logits


def used(backend: LlamaCppBackend) -> int:
    """Cells in use, modules that nobody uses left out."""
    backend._pool.residents.evict_idle()
    return backend._pool.cells.size - backend._pool.cells.free


class TestSharing:
    def test_sixteen_prompts_hold_one_module_once(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 300)
        contexts = [backend.new_context(305 + number) for number in range(16)]
        for number, context in enumerate(contexts):
            context.prefill(plan_of([whole(module)], 300, 305 + number))
        own = sum(5 + number for number in range(16))
        assert used(backend) <= 300 + own + 16 * (LANES - 1)
        for context in contexts:
            context.close()
        assert used(backend) == 0

    def test_a_resident_module_is_joined_without_new_cells(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 400)
        served(backend, plan_of([whole(module)], 400, 408))
        free = backend._pool.cells.free
        writes = count_writes(backend)
        with closing(backend.new_context(410)) as context:
            context.prefill(plan_of([whole(module)], 400, 408))
            assert backend._pool.cells.free == free - 8
        assert writes == [], "nothing was loaded"

    def test_what_the_next_prompt_does_not_use_leaves(self, backend: LlamaCppBackend) -> None:
        served(backend, plan_of([whole(encoded(backend, 0, 400))], 400, 408))
        with closing(backend.new_context(10)) as context:
            context.prefill(plan_of([], 0, 10))
            assert backend._pool.cells.size - backend._pool.cells.free == 10

    def test_a_module_in_use_stays_for_its_prompt(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([whole(module)], 100, 110))
        with closing(backend.new_context(112)) as context:
            context.prefill(plan_of([whole(module)], 100, 109))
            served(backend, plan_of([], 0, 50))
            [got] = backend.decode([DecodeStep(context, int(TEXT[109]), 109)])
        np.testing.assert_allclose(got, wanted, atol=1e-2)

    def test_more_modules_than_sequences(self, backend: LlamaCppBackend) -> None:
        modules = [encoded(backend, 3 * i, 3 * i + 3) for i in range(SEQUENCES)]
        spans = [whole(module) for module in modules]
        stop = 3 * SEQUENCES
        wanted = served(backend, plan_of(spans, stop, stop + 4, exact=True))
        reversed_order = served(backend, plan_of(spans[::-1], stop, stop + 4))
        np.testing.assert_allclose(reversed_order, wanted, atol=1e-2)
        alone = served(backend, plan_of([], 0, stop + 4))
        assert np.abs(alone - wanted).max() > 0.1, "the modules were encoded alone, which shows"


class TestPlaces:
    """Results are equal to the last bit wherever a prompt's cells come to lie."""

    def test_beside_another_prompt_of_any_length(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([], 0, 120))
        for length in (1, 7, 16, 33, 255):
            with closing(backend.new_context(length)) as other:
                other.prefill(plan_of([], 500, 500 + length))
                assert np.array_equal(served(backend, plan_of([], 0, 120)), wanted)
                for exact in (False, True):
                    assert np.array_equal(served(backend, plan_of([whole(module)], 100, 120, exact=exact)), wanted)

    def test_two_prompts_over_one_module(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([], 0, 120))
        with closing(backend.new_context(107)) as first:
            first.prefill(plan_of([whole(module)], 100, 107))
            assert np.array_equal(served(backend, plan_of([whole(module)], 100, 120)), wanted)

    def test_exact_mode_puts_scattered_modules_in_order(self, backend: LlamaCppBackend) -> None:
        first = encoded(backend, 0, 37)
        second = encoded(backend, 37, 80, [whole(first)])
        third = encoded(backend, 80, 99, [whole(first), whole(second)])
        wanted = served(backend, plan_of([], 0, 120))
        served(backend, plan_of([whole(third)], 99, 110))
        served(backend, plan_of([whole(third), whole(first)], 99, 110))
        spans = [whole(third), whole(second), whole(first)]
        assert np.array_equal(served(backend, plan_of(spans, 99, 120, exact=True)), wanted)
        with closing(backend.new_context(130)) as user:
            user.prefill(plan_of([whole(third), whole(second)], 99, 110))
            assert np.array_equal(served(backend, plan_of(spans, 99, 120, exact=True)), wanted), "while they are in use"

    def test_runs_of_any_length(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 50)
        for length in (2, 3, 15, 16, 17, 64, 511, 512, 513, 514):
            wanted = served(backend, plan_of([], 0, 50 + length))
            assert np.array_equal(served(backend, plan_of([whole(module)], 50, 50 + length)), wanted)

    def test_a_smaller_state_after_a_larger_one(self, backend: LlamaCppBackend) -> None:
        large, small = encoded(backend, 0, 600), encoded(backend, 0, 20)
        wanted = served(backend, plan_of([], 0, 30))
        served(backend, plan_of([whole(large)], 600, 610))
        assert np.array_equal(served(backend, plan_of([whole(small)], 20, 30)), wanted)

    def test_another_size_of_the_cache(self, backend: LlamaCppBackend, tiny_gguf: Path) -> None:
        module = encoded(backend, 0, 100)
        wanted = served(backend, plan_of([], 0, 120))
        with closing(LlamaCppBackend(tiny_gguf, n_ctx=4096)) as other:
            assert other.kv_layout == backend.kv_layout
            assert np.array_equal(served(other, plan_of([whole(module)], 100, 120)), wanted)

    def test_a_new_process(self, backend: LlamaCppBackend, tiny_gguf: Path, tmp_path: Path) -> None:
        program = """
import sys
from pathlib import Path
import numpy as np
from edge_pc.backends.base import Plan
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
text, positions = np.load(sys.argv[2]), np.arange(100, dtype=np.int32)
context = LlamaCppBackend(Path(sys.argv[1])).new_context(100)
np.save(sys.argv[3], context.encode(Plan((), text[:100], positions, exact=True), positions))
"""
        np.save(tmp_path / "text.npy", TEXT)
        files = [str(tiny_gguf), str(tmp_path / "text.npy"), str(tmp_path / "states.npy")]
        subprocess.run([sys.executable, "-c", program, *files], check=True, cwd=tmp_path)
        array = np.load(tmp_path / "states.npy", mmap_mode="r")
        module = KVStates("m", array, TEXT[:100], np.arange(100, dtype=np.int32), path=tmp_path / "states.npy")
        assert np.array_equal(served(backend, plan_of([whole(module)], 100, 120)), served(backend, plan_of([], 0, 120)))


class TestPositions:
    def test_a_gap_does_not_show_to_others_of_the_module(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 60)
        wanted = served(backend, plan_of([], 0, 70))
        with closing(backend.new_context(80)) as gapped:
            far = gapped.prefill(plan_of([whole(module)], 200, 210)).logits
            assert np.array_equal(served(backend, plan_of([whole(module)], 60, 70)), wanted)
            again = served(backend, plan_of([whole(module)], 200, 210))
        np.testing.assert_allclose(again, far, atol=1e-3)

    def test_runs_with_gaps_and_a_run_inside_a_module(self, backend: LlamaCppBackend) -> None:
        """A module at 0-29 and 40-59; tokens computed at 30-32, 37, 70-74 and 80; the answer goes on at 100."""
        positions = np.concatenate([np.arange(0, 30), np.arange(40, 60)]).astype(np.int32)
        run = np.array([30, 31, 32, 37, 70, 71, 72, 73, 74, 80], dtype=np.int32)
        module_plan = Plan((), TEXT[positions], positions, exact=True)
        with closing(backend.new_context(60)) as context:
            array = context.encode(module_plan, np.arange(50, dtype=np.int32))
        module = KVStates("m", array, TEXT[positions], positions)

        order = np.argsort(np.concatenate([positions, run]), kind="stable")
        cells = np.concatenate([positions, run, [100]])[[*order, 60]].astype(np.int32)
        computed = np.isin(cells, [*run, 100])
        visible = (cells[None, :] <= cells[:, None]) & (computed[:, None] | ~computed[None, :])
        wanted = Reference().logits(TEXT[cells], cells, visible)

        for exact in (False, True):
            with closing(backend.new_context(70)) as context:
                got = context.prefill(Plan((whole(module),), TEXT[run], run, exact)).logits
                [later] = backend.decode([DecodeStep(context, int(TEXT[100]), 100)])
            np.testing.assert_allclose(got, wanted[-2], atol=TOLERANCE)
            np.testing.assert_allclose(later, wanted[-1], atol=TOLERANCE)
        blind = Reference().logits(TEXT[cells], cells, cells[None, :] <= cells[:, None])
        assert np.abs(blind - wanted).max() > 3 * TOLERANCE, "what the module sees matters"

    def test_parts_of_a_module(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 60)
        spans = [Span(module, 0, 20), Span(module, 25, 55)]
        run = np.array([*range(20, 25), *range(55, 60)], dtype=np.int32)
        cells = np.arange(60, dtype=np.int32)
        computed = np.isin(cells, run)
        wanted = Reference().logits(TEXT[cells], cells, np.tril(np.ones((60, 60), dtype=bool)))
        assert computed.sum() == 10
        for exact in (False, True):
            got = served(backend, Plan(tuple(spans), TEXT[run], run, exact))
            np.testing.assert_allclose(got, wanted[-1], atol=TOLERANCE)

    def test_encoding_around_gaps_keeps_what_is_asked_for(self, backend: LlamaCppBackend) -> None:
        positions = np.array([0, 1, 2, 10, 11, 30], dtype=np.int32)
        plan = Plan((), TEXT[positions], positions, exact=True)
        with closing(backend.new_context(10)) as context:
            everything = context.encode(plan, np.arange(6, dtype=np.int32))
            some = context.encode(plan, np.array([2, 3, 5], dtype=np.int32))
        blobs = backend._pool.blobs
        taken = blobs.take(
            blobs.check(everything, positions), np.array([2, 3, 5], dtype=np.int32), positions[[2, 3, 5]]
        )
        assert np.array_equal(blobs.check(some, positions[[2, 3, 5]]), taken)

    def test_a_single_token_is_encoded_as_in_a_longer_run(self, backend: LlamaCppBackend) -> None:
        before = encoded(backend, 0, 40)
        alone = encoded(backend, 40, 41, [whole(before)])
        longer = encoded(backend, 40, 60, [whole(before)])
        blobs = backend._pool.blobs
        first = blobs.take(
            blobs.check(longer.array, longer.position_ids), np.array([0], dtype=np.int32), alone.position_ids
        )
        assert np.array_equal(blobs.check(alone.array, alone.position_ids), first)


class TestDecoding:
    def test_several_prompts_in_one_pass(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 80)
        stops = (83, 90, 84, 100)
        contexts = [backend.new_context(stop + 4) for stop in stops]
        for context, stop in zip(contexts, stops, strict=True):
            context.prefill(plan_of([whole(module)], 80, stop))
        calls = count_calls(backend)
        for shift in range(3):
            steps = [
                DecodeStep(context, int(TEXT[stop + shift]), stop + shift)
                for context, stop in zip(contexts, stops, strict=True)
            ]
            together = backend.decode(steps)
        assert len(calls) == 3, "one pass over the weights for each step"
        for context in contexts:
            context.close()
        for logits, stop in zip(together, stops, strict=True):
            np.testing.assert_allclose(logits, served(backend, plan_of([], 0, stop + 3)), atol=1e-2)

    def test_the_last_cell_of_the_capacity(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(12)) as context:
            context.prefill(plan_of([], 0, 10))
            for position in (10, 11):
                backend.decode([DecodeStep(context, int(TEXT[position]), position)])


class TestNothingStays:
    def test_after_a_cancelled_request(self, backend: LlamaCppBackend) -> None:
        module = encoded(backend, 0, 50)

        def cancel(tokens: int) -> None:
            raise KeyboardInterrupt

        for run in (plan_of([whole(module)], 50, 60), plan_of([whole(module)], 50, 800), plan_of([], 0, 700)):
            with closing(backend.new_context(800)) as context:
                with pytest.raises(KeyboardInterrupt):
                    context.prefill(run, cancel)
                assert used(backend) == 0
                with pytest.raises(KeyboardInterrupt):
                    context.encode(run, np.array([0], dtype=np.int32), cancel)
            assert used(backend) == 0
        wanted = served(backend, plan_of([], 0, 60))
        assert np.array_equal(served(backend, plan_of([whole(module)], 50, 60)), wanted)

    def test_after_states_that_are_refused(self, backend: LlamaCppBackend) -> None:
        good = encoded(backend, 0, 50)
        array = encoded(backend, 50, 80).array
        array.reshape(-1)[0] ^= 1
        bad = KVStates("bad", array, TEXT[50:80], np.arange(50, 80, dtype=np.int32))
        with closing(backend.new_context(100)) as context:
            with pytest.raises(StatesError, match="header"):
                context.prefill(plan_of([whole(good), whole(bad)], 80, 90))
            assert used(backend) == 0
            context.prefill(plan_of([whole(good)], 50, 60))

    def test_after_a_prompt_that_was_replaced(self, backend: LlamaCppBackend) -> None:
        with closing(backend.new_context(300)) as context:
            context.prefill(plan_of([], 0, 300))
            again = context.prefill(plan_of([], 0, 20)).logits
            assert used(backend) == 20
        assert np.array_equal(again, served(backend, plan_of([], 0, 20)))
        assert used(backend) == 0


class TestRoom:
    def test_a_prompt_larger_than_the_cache(self, tiny_gguf: Path) -> None:
        with closing(LlamaCppBackend(tiny_gguf, n_ctx=256)) as backend:
            module = encoded(backend, 0, 600)
            assert np.array_equal(
                served(backend, plan_of([whole(module)], 600, 620)), served(backend, plan_of([], 0, 620))
            )
            check_books(backend)

    def test_open_prompts_move_into_a_larger_cache(self, backend: LlamaCppBackend) -> None:
        """Every cell keeps its place, its label and its prompts: answers go on as if nothing had been."""
        module, size = encoded(backend, 0, 60), backend._pool.cells.size
        plans = [plan_of([whole(module)], 60, 73), plan_of([whole(module)], 200, 210), plan_of([], 300, 311)]
        wanted = [answer(backend, plan) for plan in plans]
        with ExitStack() as opened:
            contexts = [opened.enter_context(closing(backend.new_context(90))) for _ in range(5)]
            for context, plan in zip(contexts, [plans[0], plans[0], *plans[1:], plans[2]], strict=True):
                context.prefill(plan)
            contexts.pop(0).prefill(plans[2])  # leaves free places in the middle
            before = [backend._pool.cells.places(context.sequence) for context in contexts]
            alone = served(backend, plan_of([], 0, 30))
            opened.enter_context(closing(big := backend.new_context(900)))
            big.prefill(plan_of([], 0, 880))
            assert backend._pool.cells.size > size
            check_books(backend)
            for context, places in zip(contexts, before, strict=True):
                assert np.array_equal(backend._pool.cells.places(context.sequence), places)
            for context, plan, logits in zip(contexts, plans, wanted, strict=False):
                np.testing.assert_allclose(go_on(backend, context, plan), logits, atol=1e-2)
            assert np.array_equal(served(backend, plan_of([], 0, 30)), alone)
        assert used(backend) == 0

    def test_an_answer_longer_than_its_capacity(self, tiny_gguf: Path) -> None:
        with closing(LlamaCppBackend(tiny_gguf, n_ctx=256)) as backend, closing(backend.new_context(10)) as context:
            context.prefill(plan_of([], 0, 10))
            for position in range(10, 300):
                [logits] = backend.decode([DecodeStep(context, int(TEXT[position]), position)])
            np.testing.assert_allclose(logits, served(backend, plan_of([], 0, 300)), atol=1e-2)

    def test_too_many_open_prompts(self, backend: LlamaCppBackend) -> None:
        with ExitStack() as opened:
            for _ in range(len(backend._pool._sequences)):
                opened.enter_context(closing(backend.new_context(2)))
            with pytest.raises(ContextLengthError, match="open at once"):
                backend.new_context(2)
        served(backend, plan_of([], 0, 10))


def test_what_is_still_open_when_the_model_is_closed(tiny_gguf: Path) -> None:
    backend = LlamaCppBackend(tiny_gguf)
    context = backend.new_context(40)
    context.prefill(plan_of([whole(encoded(backend, 0, 20))], 20, 30))
    backend.close()
    backend.close()
    with pytest.raises(ModelError, match="closed"):
        backend.decode([DecodeStep(context, 10, 30)])
    with pytest.raises(ModelError, match="closed"):
        context.prefill(plan_of([], 0, 10))
    context.close()


def test_eight_threads(backend: LlamaCppBackend) -> None:
    first, second = encoded(backend, 0, 60), encoded(backend, 60, 100)
    plans = [plan_of([], 0, 70), plan_of([whole(first)], 60, 75), plan_of([whole(second), whole(first)], 100, 110)]
    plans += [plan_of([whole(second)], 100, 103), plan_of([whole(first)], 120, 130)]
    wanted = [answer(backend, plan) for plan in plans]
    start = threading.Barrier(8)

    def work(number: int) -> list[tuple[int, Any]]:
        start.wait()
        return [(i % len(plans), answer(backend, plans[i % len(plans)])) for i in range(number, number + 10)]

    with ThreadPoolExecutor(8) as threads:
        for results in threads.map(work, range(8)):
            for index, logits in results:
                np.testing.assert_allclose(logits, wanted[index], atol=1e-2)
    assert used(backend) == 0


def answer(backend: LlamaCppBackend, plan: Plan) -> Any:
    """Logits of the third token of an answer."""
    with closing(backend.new_context(plan.cached_tokens + len(plan.token_ids) + 2)) as context:
        context.prefill(plan)
        return go_on(backend, context, plan)


def go_on(backend: LlamaCppBackend, context: LlamaCppContext, plan: Plan) -> Any:
    """Logits of the third token of an answer, the prompt being prefilled."""
    end = int(plan.position_ids[-1]) + 1
    for position in (end, end + 1):
        [logits] = backend.decode([DecodeStep(context, int(TEXT[position]), position)])
    return logits


def count_calls(backend: LlamaCppBackend) -> list[int]:
    """Filled with the number of tokens of each later call of libllama's decode."""
    return _record(backend, "decode", lambda token_ids, *_: len(token_ids))


def count_writes(backend: LlamaCppBackend) -> list[int]:
    """Filled with the size of each state that is loaded later."""
    return _record(backend, "write", lambda _, blob: len(blob))


def _record(backend: LlamaCppBackend, name: str, what: Any) -> list[int]:
    session, calls = backend._pool.cells._session, []
    original = getattr(session, name)

    def recording(*arguments: Any) -> Any:
        calls.append(what(*arguments))
        return original(*arguments)

    setattr(session, name, recording)
    return calls
