"""The thread that computes: who waits for whom, and what ends an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_tools import SECONDS, wait_until

from edge_pc import Engine, EngineError, Grammar, OptionError, Sampling, Serving
from edge_pc.runtime.constraint import Constraint
from edge_pc.server.jobs import Busy, Event, Job
from edge_pc.server.scheduler import Scheduler

LONG = "You answer briefly, and you know the harbour, the tide and the old tram. " * 14


class Asker:
    """A job and what was told of it."""

    def __init__(
        self,
        engine: Engine,
        text: str,
        *,
        system: str = "",
        on_event: Callable[[Asker], None] = lambda _: None,
        order: list[str] | None = None,
        **sampling: Any,
    ) -> None:
        messages = [{"role": "system", "content": system}] if system else []
        prompt = engine.lay_out_messages([*messages, {"role": "user", "content": text}])
        answer = engine.answering.answer(Sampling(**{"max_tokens": 8, **sampling}))
        engine.answering.make_room(prompt, answer)
        self.events: list[Event] = []
        self.ended = threading.Event()
        self._text, self._on_event, self._order = text, on_event, order
        self.job = Job(prompt, answer, Serving(), self._tell)

    def _tell(self, event: Event) -> None:
        if self._order is not None and not self.events:
            self._order.append(self._text)
        self.events.append(event)
        self._on_event(self)
        if event.last:
            self.ended.set()

    def result(self) -> Any:
        assert self.ended.wait(SECONDS)
        (last,) = (event for event in self.events if event.last)
        if last.error is not None:
            raise last.error
        assert last.result is not None
        assert "".join(event.text for event in self.events) == last.result.text
        return last.result


@pytest.fixture(params=["onnx", "llamacpp"])
def engine(request: pytest.FixtureRequest, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> Iterator[Engine]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    with Engine(model, backend=request.param, cache_dir=tmp_path) as engine:
        yield engine


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, parallel=4, waiting=8, kept=2)
    yield scheduler
    scheduler.close()


def test_a_job_that_is_cancelled_ends_within_one_token(engine: Engine, scheduler: Scheduler) -> None:
    def leave(asker: Asker) -> None:
        if len(asker.events) == 3:
            asker.job.watch.cancel()

    leaving = Asker(engine, "Hello", max_tokens=500, logprobs=0, on_event=leave)
    staying = Asker(engine, "Good day", max_tokens=20)
    for asker in (leaving, staying):
        scheduler.submit(asker.job)
    result = leaving.result()
    assert result.stop == "cancelled"
    assert len(result.token_ids) == 3
    assert staying.result().stats.new_tokens == 20
    assert scheduler.load.answering == 0


def test_a_job_that_is_cancelled_while_it_waits_is_never_started(engine: Engine, scheduler: Scheduler) -> None:
    asker = Asker(engine, "Hello")
    asker.job.watch.cancel()
    scheduler.submit(asker.job)
    assert asker.result().token_ids == ()


def test_neither_an_answer_nor_a_short_prompt_waits_for_an_encoding(engine: Engine, scheduler: Scheduler) -> None:
    order: list[str] = []
    gained: list[int] = []
    going = Asker(engine, "going", max_tokens=400)
    scheduler.submit(going.job)
    wait_until(lambda: len(going.events) > 2)
    before = len(going.events)
    long = Asker(engine, "long", system=LONG, order=order, on_event=lambda _: gained.append(len(going.events) - before))
    assert long.job.prompt.tokens > 700
    short = Asker(engine, "short", order=order, max_tokens=1)
    with scheduler._news:  # both wait before either is started
        scheduler.submit(long.job)
        scheduler.submit(short.job)
    assert short.result().stats.new_tokens == 1
    assert long.result().stats.new_tokens == 8
    assert order == ["short", "long"]
    assert gained[0] > 0, "the answer that was under way went on between the chunks"
    going.job.watch.cancel()
    going.result()


def test_a_job_can_be_cancelled_while_its_prompt_is_computed(engine: Engine, scheduler: Scheduler) -> None:
    going = Asker(engine, "going", max_tokens=900)
    long = Asker(engine, "long", system=LONG)
    going._on_event = lambda _: long.job.watch.cancel() if scheduler.load.answering == 2 else None
    scheduler.submit(going.job)
    scheduler.submit(long.job)
    result = long.result()
    assert result.stop == "cancelled"
    assert result.token_ids == ()
    going.job.watch.cancel()
    going.result()
    again = Asker(engine, "long", system=LONG)
    scheduler.submit(again.job)
    assert again.result().stats.new_tokens == 8


def test_answers_are_the_same_alone_and_together(engine: Engine, scheduler: Scheduler) -> None:
    if engine.backend.name == "llamacpp":
        pytest.skip("llama.cpp has another kernel for several rows than for one")
    texts = ["one", "two of them", "three " * 40, "four"]
    alone = []
    for text in texts:
        asker = Asker(engine, text, max_tokens=24)
        scheduler.submit(asker.job)
        alone.append(asker.result().token_ids)
    together = [Asker(engine, text, max_tokens=24) for text in texts]
    for asker in together:
        scheduler.submit(asker.job)
    assert [asker.result().token_ids for asker in together] == alone


def test_contexts_are_kept_and_copied_where_two_conversations_begin_alike(engine: Engine, scheduler: Scheduler) -> None:
    tails = ["harbour " * 30, "tide " * 30]
    cached = []
    for text in (tails[0], tails[1], tails[0], tails[1]):
        asker = Asker(engine, text, system="Know the tram. " * 12)  # too short to be stored
        assert asker.job.prompt.encodings == ()
        scheduler.submit(asker.job)
        stats = asker.result().stats
        cached.append(stats.prompt_tokens - stats.cached_tokens <= 2)
    assert cached == [False, False, True, True]
    assert scheduler.load.kept_contexts == 2


def test_more_than_may_wait_are_refused(engine: Engine) -> None:
    scheduler = Scheduler(engine, parallel=1, waiting=1, kept=0)
    try:
        going = Asker(engine, "going", max_tokens=900)
        scheduler.submit(going.job)
        wait_until(lambda: len(going.events) > 0)
        scheduler.submit(Asker(engine, "waits").job)
        with pytest.raises(Busy):
            scheduler.submit(Asker(engine, "refused").job)
        assert (scheduler.load.waiting, scheduler.load.answering) == (1, 1)
    finally:
        scheduler.close()
    with pytest.raises(EngineError, match="shutting down"):
        going.result()
    with pytest.raises(EngineError, match="shutting down"):
        scheduler.submit(Asker(engine, "late").job)


def test_a_failure_ends_its_answers_and_nothing_else(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "decode", lambda steps: 1 / 0)
        asker = Asker(engine, "fails")
        scheduler.submit(asker.job)
        with pytest.raises(ZeroDivisionError):
            asker.result()
    again = Asker(engine, "works")
    scheduler.submit(again.job)
    assert again.result().stats.new_tokens == 8


def test_a_grammar_that_fails_on_the_way_ends_its_own_answer_only(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Constraint, token: int) -> None:
        raise OptionError("too complex")

    going = Asker(engine, "going", max_tokens=60)
    scheduler.submit(going.job)
    monkeypatch.setattr(Constraint, "take", fail)
    asker = Asker(engine, "fails", grammar=Grammar.json())
    scheduler.submit(asker.job)
    with pytest.raises(OptionError, match="too complex"):
        asker.result()
    assert going.result().stats.new_tokens == 60
