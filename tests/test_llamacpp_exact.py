"""What the llama.cpp backend promises bit for bit: the same as full prefill with nothing else in the cache."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamacpp_tools import TEXT, answered, encoded, equal, gone_on, opened, plan_at, plan_of, served, used, whole

from edge_pc.backends.base import KVStates, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

EXACT_OR_NOT = pytest.mark.parametrize("exact", [False, True])


@pytest.fixture
def backend(tiny_gguf: Path) -> Iterator[LlamaCppBackend]:
    with opened(tiny_gguf) as backend:
        yield backend


def chain(backend: LlamaCppBackend, *ends: int) -> list[Span]:
    """Modules up to each of `ends`, each encoded over those before it."""
    spans: list[Span] = []
    for start, stop in zip((0, *ends), ends, strict=False):
        spans.append(whole(encoded(backend, start, stop, spans)))
    return spans


class TestOneModule:
    """Holds for plans that are not exact, too: nothing lies between the module and what is computed."""

    @EXACT_OR_NOT
    def test_stored_text_only(self, backend: LlamaCppBackend, exact: bool) -> None:
        """The last cell of a module is computed again, while the module keeps its own in the place after the others."""
        for length in np.random.default_rng(1).integers(20, 300, 40).tolist():
            [span] = chain(backend, length)
            wanted = answered(backend, plan_of([], 0, length))
            assert equal(
                answered(backend, plan_of([Span(span.states, 0, length - 1)], length - 1, length, exact=exact)), wanted
            )

    @EXACT_OR_NOT
    def test_runs_of_any_length(self, backend: LlamaCppBackend, exact: bool) -> None:
        [span] = chain(backend, 50)
        for length in (1, 2, 3, 14, 15, 64, 511, 512, 513, 514):
            wanted = answered(backend, plan_of([], 0, 50 + length))
            assert equal(answered(backend, plan_of([span], 50, 50 + length, exact=exact)), wanted)

    @EXACT_OR_NOT
    def test_beside_another_prompt_of_any_length(self, backend: LlamaCppBackend, exact: bool) -> None:
        [span] = chain(backend, 100)
        wanted = answered(backend, plan_of([], 0, 120))
        for length in (1, 7, 16, 33, 64, 255):
            with closing(backend.new_context(length)) as other:
                other.prefill(plan_of([], 500, 500 + length))
                assert equal(answered(backend, plan_of([], 0, 120)), wanted)
                assert equal(answered(backend, plan_of([span], 100, 120, exact=exact)), wanted)

    @EXACT_OR_NOT
    def test_prompts_that_take_turns(self, backend: LlamaCppBackend, exact: bool) -> None:
        """Each goes on where its own cells end, though the others' come between."""
        [span] = chain(backend, 100)
        stops = (107, 101, 128, 163)
        wanted = [answered(backend, plan_of([], 0, stop), 40) for stop in stops]
        with ExitStack() as opened:
            contexts = [opened.enter_context(closing(backend.new_context(stop + 40))) for stop in stops]
            found: list[list[Any]] = [
                [context.prefill(plan_of([span], 100, stop, exact=exact)).logits]
                for context, stop in zip(contexts, stops, strict=True)
            ]
            for done in range(39):
                for context, stop, logits in zip(contexts, stops, found, strict=True):
                    logits += gone_on(backend, context, stop + done, 1)
        assert all(equal(logits, expected) for logits, expected in zip(found, wanted, strict=True))

    def test_a_smaller_state_after_a_larger_one(self, backend: LlamaCppBackend) -> None:
        [large], [small] = chain(backend, 600), chain(backend, 20)
        wanted = answered(backend, plan_of([], 0, 30))
        served(backend, plan_of([large], 600, 610))
        assert equal(answered(backend, plan_of([small], 20, 30)), wanted)

    def test_another_size_of_the_cache(self, backend: LlamaCppBackend, tiny_gguf: Path) -> None:
        [span] = chain(backend, 100)
        wanted = answered(backend, plan_of([], 0, 120))
        with opened(tiny_gguf, 4096) as other:
            assert other.kv_layout == backend.kv_layout
            assert equal(answered(other, plan_of([span], 100, 120)), wanted)

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
        wanted = answered(backend, plan_of([], 0, 120))
        assert equal(answered(backend, plan_of([whole(module)], 100, 120)), wanted)


class TestModulesInOneAnother:
    @EXACT_OR_NOT
    def test_loaded_for_one_prompt(self, backend: LlamaCppBackend, exact: bool) -> None:
        wanted = answered(backend, plan_of([], 0, 330))
        spans = chain(backend, 37, 80, 99, 300)
        assert equal(answered(backend, plan_of(spans, 300, 330, exact=exact)), wanted)

    @EXACT_OR_NOT
    def test_prompts_over_the_first_of_them(self, backend: LlamaCppBackend, exact: bool) -> None:
        spans = chain(backend, 37, 80, 99, 300)
        wanted = answered(backend, plan_of([], 0, 120))
        with closing(backend.new_context(310)) as user:
            user.prefill(plan_of(spans, 300, 310))
            assert equal(answered(backend, plan_of(spans[:3], 99, 120, exact=exact)), wanted)

    def test_modules_that_lie_in_another_order(self, backend: LlamaCppBackend) -> None:
        first, second, third, fourth = chain(backend, 37, 80, 99, 400)
        spans = [fourth, third, second, first]
        wanted = answered(backend, plan_of([], 0, 420))
        for before in ([third], [fourth], [third, first], [fourth, second]):
            served(backend, plan_of(before, 400, 410))
            assert equal(answered(backend, plan_of(spans, 400, 420, exact=True)), wanted)
            served(backend, plan_of(before, 400, 410))
            with closing(backend.new_context(420)) as user:
                user.prefill(plan_of(before[:1], 400, 410))
                assert equal(answered(backend, plan_of(spans, 400, 420, exact=True)), wanted), "while one is in use"

    def test_a_run_inside_a_module(self, backend: LlamaCppBackend) -> None:
        """What follows the run lies elsewhere than in the module, and is copied."""
        with closing(backend.new_context(300)) as context:
            positions = np.array([*range(50), *range(60, 250)], dtype=np.int32)
            array = context.encode(plan_at([], positions.tolist(), exact=True), np.arange(240, dtype=np.int32))
        module = KVStates("m", array, TEXT[positions], positions)
        plan = plan_at([whole(module)], [50, 51, 52, 250, 251], exact=True)
        wanted = answered(backend, plan)
        with ExitStack() as opened:
            for length in (5, 40, 100):
                other = opened.enter_context(closing(backend.new_context(length + 250)))
                other.prefill(plan_of([whole(module)], 250, 250 + length))
                assert equal(answered(backend, plan), wanted)

    @EXACT_OR_NOT
    def test_gaps(self, backend: LlamaCppBackend, exact: bool) -> None:
        """States and logits of runs with gaps do not depend on what is reused."""
        [span] = chain(backend, 100)
        positions = [*range(150, 180), *range(300, 310)]
        wanted = answered(backend, plan_at([], [*range(100), *positions]))
        with closing(backend.new_context(300)) as user:
            user.prefill(plan_of([span], 100, 300))
            assert equal(answered(backend, plan_at([span], positions, exact=exact)), wanted)


class TestAppend:
    """prefill(A + B) is prefill(A), append(B)."""

    @EXACT_OR_NOT
    @pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 100, 518])
    def test_runs(self, backend: LlamaCppBackend, cut: int, exact: bool) -> None:
        wanted = answered(backend, plan_of([], 0, 520))
        with closing(backend.new_context(530)) as context:
            context.prefill(plan_of([], 0, cut, exact=exact))
            appended = context.append(plan_of([], cut, 520, exact=exact))
            assert appended.computed_tokens == 520 - cut
            assert equal([appended.logits, *gone_on(backend, context, 520, 2)], wanted)

    @EXACT_OR_NOT
    def test_spans(self, backend: LlamaCppBackend, exact: bool) -> None:
        first, second, third = chain(backend, 100, 230, 300)
        wanted = answered(backend, plan_of([], 0, 320))
        with closing(backend.new_context(330)) as context:
            context.prefill(plan_of([first], 100, 101, exact=exact))
            context.truncate(100)
            context.append(plan_of([second, third], 300, 310, exact=exact))
            logits = context.append(plan_of([], 310, 320, exact=exact)).logits
            assert equal([logits, *gone_on(backend, context, 320, 2)], wanted)

    def test_after_an_answer_and_a_gap(self, backend: LlamaCppBackend) -> None:
        first, second = chain(backend, 100, 230)
        later = whole(encoded(backend, 400, 470))
        wanted = answered(backend, plan_at([first, second, later], [*range(230, 240), *range(470, 480)], exact=True))
        with closing(backend.new_context(480)) as context:
            context.prefill(plan_of([first, second], 230, 235, exact=True))
            gone_on(backend, context, 235, 5)
            context.truncate(235)  # a decoded token went through the kernel of a single row
            context.append(plan_of([], 235, 240, exact=True))
            logits = context.append(plan_of([later], 470, 480, exact=True)).logits
            assert equal([logits, *gone_on(backend, context, 480, 2)], wanted)


class TestTruncate:
    """What is left is as if nothing had come after it."""

    @EXACT_OR_NOT
    @pytest.mark.parametrize("position", [0, 1, 30, 64, 99, 100, 101, 150, 159, 200])
    def test_and_append_again(self, backend: LlamaCppBackend, position: int, exact: bool) -> None:
        [span] = chain(backend, 100)
        wanted = answered(backend, plan_of([], 0, 220))
        with closing(backend.new_context(230)) as context:
            context.prefill(plan_of([span], 100, 160, exact=exact))
            gone_on(backend, context, 160, 3)
            position = min(position, 160)
            context.truncate(position)
            assert used(backend) == position
            logits = context.append(plan_of([], position, 220, exact=exact)).logits
            assert equal([logits, *gone_on(backend, context, 220, 2)], wanted)

    def test_inside_a_gap(self, backend: LlamaCppBackend) -> None:
        """The cell before the gap had been given another label, and has its own again."""
        [span] = chain(backend, 100)
        wanted = {start: answered(backend, plan_at([span], range(start, start + 20))) for start in (100, 150, 250)}
        with closing(backend.new_context(300)) as context:
            context.prefill(plan_at([span], [*range(200, 210), *range(300, 310)]))
            for cut, start in ((200, 150), (120, 150), (150, 100), (100, 250), (180, 100)):
                context.truncate(cut)
                logits = context.append(plan_at([], range(start, start + 20))).logits
                assert equal([logits, *gone_on(backend, context, start + 20, 2)], wanted[start])
                context.truncate(100)
            assert used(backend) == 100

    def test_modules_beyond_it_are_released(self, backend: LlamaCppBackend) -> None:
        first, second = chain(backend, 100, 230)
        with closing(backend.new_context(300)) as context:
            context.prefill(plan_of([first, second], 230, 240))
            for position, held in ((240, 240), (229, 229), (100, 100), (40, 40), (0, 0)):
                context.truncate(position)
                assert used(backend) == held
            served(backend, plan_of([], 0, 5))  # what nobody uses leaves when another prompt comes
            assert backend.cache_use().idle == 0

    def test_saved_loaded_and_gone_on_with(self, backend: LlamaCppBackend) -> None:
        wanted = answered(backend, plan_of([], 0, 120), 6)
        with closing(backend.new_context(130)) as context:
            array = context.encode(plan_of([], 0, 90, exact=True), np.arange(90, dtype=np.int32))
        saved = whole(KVStates("saved", array, TEXT[:90], np.arange(90, dtype=np.int32)))
        with closing(backend.new_context(130)) as context:
            context.prefill(plan_of([saved], 90, 125))
            context.truncate(110)
            logits = context.append(plan_of([], 110, 120)).logits
            assert equal([logits, *gone_on(backend, context, 120, 5)], wanted)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_work(backend: LlamaCppBackend, tiny_gguf: Path, seed: int) -> None:
    """Four contexts grow, shrink and start again at random; each appended run is as in a prompt alone in a cache."""
    rng = np.random.default_rng(seed)
    modules = [whole(encoded(backend, start, stop)) for start, stop in ((0, 70), (70, 200), (300, 390), (390, 410))]
    contexts = [backend.new_context(800) for _ in range(4)]
    held: list[tuple[list[Span], list[int]]] = [([], []) for _ in contexts]  # spans, positions computed
    with opened(tiny_gguf) as other, closing(other.new_context(900)) as alone:
        for _ in range(120):
            index = int(rng.integers(len(contexts)))
            spans, positions = held[index]
            end = max([0, *(span.position_ids[-1] + 1 for span in spans), *(position + 1 for position in positions)])
            if end > 600 or (end and rng.random() < 0.4):
                cut = int(rng.integers(end + 1))
                contexts[index].truncate(cut)
                kept = [(span, int(np.count_nonzero(span.position_ids < cut))) for span in spans]
                held[index] = [Span(s.states, 0, stop) for s, stop in kept if stop], [p for p in positions if p < cut]
            else:
                added = [m for m in modules if m.position_ids[0] >= end and rng.random() < 0.3]
                start = max([end, *(module.position_ids[-1] + 1 for module in added)]) + int(
                    rng.choice([0, 0, 0, 1, 40])
                )
                run = range(start, start + int(rng.choice([1, 2, 30, 64, 90])))
                logits = contexts[index].append(plan_at(added, run, exact=True)).logits
                held[index] = [*spans, *added], [*positions, *run]
                assert np.array_equal(logits, alone.prefill(plan_at(*held[index], exact=True)).logits)
                gone_on(backend, contexts[index], run[-1] + 1, 1)
                contexts[index].truncate(run[-1] + 1)
            backend.check()
    for context in contexts:
        context.close()
    assert used(backend) == 0


def test_eight_threads(backend: LlamaCppBackend) -> None:
    """Exact plans are answered alike whatever other threads do at the same time."""
    first, second, third = chain(backend, 60, 100, 300)
    alone = whole(encoded(backend, 60, 100))
    plans = [plan_of([], 0, 70), plan_of([first], 60, 75, exact=True), plan_of([second, first], 100, 110, exact=True)]
    plans += [plan_of([alone], 100, 103, exact=True), plan_of([first], 120, 130, exact=True)]
    plans += [plan_of([first, second, third], 300, 301, exact=True), plan_of([third], 300, 310, exact=True)]
    wanted = [answered(backend, plan, 12) for plan in plans]
    start = threading.Barrier(8)

    def work(number: int) -> list[int]:
        start.wait()
        order = [i % len(plans) for i in range(number, number + 10)]
        return [index for index in order if not equal(answered(backend, plans[index], 12), wanted[index])]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [[]] * 8
    assert used(backend) == 0
