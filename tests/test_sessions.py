"""Conversations: each turn computes its own tokens, and is what a full prefill of all of it would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_chat import STYLES

from edge_pc import ContextLengthError, Engine, EngineError, OptionError, Sampling, Serving, Session
from edge_pc.backends.base import DecodeStep, Plan
from edge_pc.errors import StatesError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.pml.model import Role

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

SCHEMA = """<schema name="pets"><system>You know pets.
<module name="cat">The cat sleeps in the house, all day and all night.</module>
<module name="dog">The dog runs in the wood, and in the house.</module></system></schema>"""
BOTH = '<prompt schema="pets"><cat/><dog/></prompt>'
SHORT = Sampling(max_tokens=12)
FULL = Serving(fidelity="full")
SYSTEM = "Answer in one word."

Opened = Callable[..., Session]


@pytest.fixture(params=["onnx", pytest.param("llamacpp", marks=needs_llamacpp)])
def engine(request: Any, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> Iterator[Engine]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    with Engine(model, backend=request.param, cache_dir=tmp_path / "states", threads=1) as engine:
        engine.load_schema(SCHEMA)
        yield engine


@pytest.fixture
def say(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model's next answers a text, in the tokens that the tokenizer makes of it."""

    def script(text: str) -> None:
        wanted = [*engine.tokenizer.encode(text), engine.spec.eos_ids[0]]

        class Scripted:
            def __init__(self, *_: Any) -> None:
                self._left = iter(wanted)

            def choose(self, logits: Any) -> int:
                return next(self._left)

        monkeypatch.setattr("edge_pc.runtime.answer.Sampler", Scripted)

    return script


def rendered(engine: Engine, turns: Sequence[tuple[Role, str]]) -> list[int]:
    """All of a conversation by the template, tokenized in one piece."""
    return engine.tokenizer.encode_template(engine.backend.chat_template.render(turns))


def is_beginning(token_ids: Sequence[int], whole: Sequence[int]) -> bool:
    return tuple(whole[: len(token_ids)]) == tuple(token_ids)


def full_answer(engine: Engine, token_ids: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens after a full prefill."""
    ids = np.array(token_ids, dtype=np.int32)
    with closing(engine.backend.new_context(len(ids) + count)) as context:
        logits = context.prefill(Plan((), ids, np.arange(len(ids), dtype=np.int32), exact=True)).logits
        answer = [int(np.argmax(logits))]
        while len(answer) < count:
            (logits,) = engine.backend.decode([DecodeStep(context, answer[-1], len(ids) + len(answer) - 1)])
            answer.append(int(np.argmax(logits)))
    return answer


class TestTurns:
    def test_tokens_are_those_of_the_whole_conversation(self, engine: Engine, say: Callable[[str], None]) -> None:
        with engine.session(system=SYSTEM) as session:
            for number in range(4):
                say(f"It is number {number}, and the house.")
                session.ask(f"  Which number?\nIs it {number}? ", SHORT if number == 2 else Sampling())
                turns: list[tuple[Role, str]] = [("system", SYSTEM), *session.turns]
                assert is_beginning(session.token_ids, rendered(engine, turns))
            assert [role for role, _ in session.turns] == ["user", "assistant"] * 4
            assert session.turns[2] == ("user", "Which number?\nIs it 1?")
            assert session.turns[3] == ("assistant", "It is number 1, and the house.")

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("system", [None, SYSTEM])
    def test_every_template_writes_its_turns(
        self, engine: Engine, say: Callable[[str], None], style: str, system: str | None
    ) -> None:
        template = ChatTemplate(STYLES[style], {"bos_token": "<s>", "eos_token": "</s>"})
        engine.backend.chat_template = template
        with engine.session(system=system) as session:
            for number in range(3):
                say(f"Number {number}.")
                session.ask(f"What {number}?")
            if system and style in ("gemma", "mistral"):  # no system turn: its text opens the user's
                (_, question), *rest = session.turns
                turns = [("user", f"{system}\n\n{question}"), *rest]
            else:
                turns = [("system", system), *session.turns] if system else list(session.turns)
            decoded = engine.tokenizer.decode
            whole = engine.tokenizer.encode_template(template.render(turns))
            assert decoded(whole).replace(" ", "").startswith(decoded(session.token_ids).replace(" ", ""))
            assert decoded(session.token_ids).endswith("Number 2.")

    @pytest.mark.parametrize("serving", [FULL, Serving(use_cache=False)], ids=["full", "no cache"])
    def test_answers_are_those_of_a_full_prefill(self, engine: Engine, serving: Serving) -> None:
        with engine.session(BOTH, serving=serving) as session:
            for question in ("Where are they?", "And who runs?", "Why?", "Is it the house?"):
                before = session.token_ids
                result = session.ask(question, SHORT)
                asked = session.token_ids[: len(session.token_ids) - len(result.token_ids)]
                assert is_beginning(before, asked)
                if result.stop == "length":
                    assert list(result.token_ids) == full_answer(engine, asked, len(result.token_ids))

    def test_only_new_tokens_are_computed(self, engine: Engine, tmp_path: Path) -> None:
        file = tmp_path / "notes.md"
        file.write_text("The cat is in the house. " * 20)
        with engine.session(files=file) as session:
            first = session.ask("Where?", SHORT)
            assert [module.path for module in first.stats.modules] == ["documents", "notes.md"]
            for _ in range(5):
                before = session.tokens
                stats = session.ask("And now where is it?", SHORT).stats
                assert stats.prompt_tokens - before <= stats.computed_tokens <= stats.prompt_tokens - before + 2
                assert stats.cached_tokens == stats.prompt_tokens - stats.computed_tokens
                assert (stats.modules, stats.dropped_turns) == ((), 0)

    def test_the_first_turn_is_that_of_the_prompt_alone(self, engine: Engine) -> None:
        asked = BOTH.replace("</prompt>", "<user>Who?</user></prompt>")
        with engine.session(BOTH) as session:
            assert session.ask("Who?", SHORT).token_ids == engine.generate(asked, SHORT).token_ids

    def test_turns_of_the_prompt_come_first(self, engine: Engine, say: Callable[[str], None]) -> None:
        own = '<prompt schema="pets"><user>One?</user><assistant>Two.</assistant></prompt>'
        say("Four.")
        with engine.session(own) as session:
            session.ask("Three?")
            session.ask("Five?")
            texts = engine.tokenizer.decode(session.token_ids)
        places = [texts.index(text) for text in ("You know pets", "One?", "Two.", "Three?", "Four.", "Five?")]
        assert places == sorted(places)
        assert session.turns[:1] == (("user", "Three?"),)

    def test_an_answer_that_ended_by_its_length_goes_on_in_the_next_turn(self, engine: Engine) -> None:
        with engine.session(serving=FULL) as session:
            result = session.ask("Who?", Sampling(max_tokens=3))
            before = session.token_ids
            assert (result.stop, before[-3:]) == ("length", result.token_ids)
            session.ask("And?", SHORT)
            assert is_beginning(before, session.token_ids)
            assert list(session.token_ids[-12:]) == full_answer(engine, session.token_ids[:-12], 12)

    def test_text_that_a_stop_string_cut_off_is_not_in_the_conversation(
        self, engine: Engine, say: Callable[[str], None]
    ) -> None:
        with engine.session(serving=FULL) as session:
            say("The house.!!\nUser: the")
            assert session.ask("Who?", Sampling(stop="!\nUser")).text == "The house.!"
            assert session.turns[-1] == ("assistant", "The house.!")
            say("Yes.")
            session.ask("And?")
            assert is_beginning(session.token_ids, rendered(engine, session.turns))

    def test_a_model_without_chat_template_is_asked_in_plain_text(self, engine: Engine) -> None:
        engine.backend.chat_template = ChatTemplate(None, {})
        with engine.session(system="The cat is in the house.") as session:
            session.ask("Where?", SHORT)
            session.ask("Who?", SHORT)
            text = engine.tokenizer.decode(session.token_ids)
        assert text.startswith("The cat is in the house.\n\nQuestion: Where?\nAnswer:")
        assert "\n\nQuestion: Who?\nAnswer:" in text

    def test_room_and_tokens(self, engine: Engine) -> None:
        with engine.session() as session:
            assert (session.tokens, session.room) == (0, 1024)
            session.ask("Who?", SHORT)
            assert session.tokens == len(session.token_ids) > 12
            assert session.room == 1024 - session.tokens

    @pytest.mark.parametrize("question", ["", " \n"])
    def test_an_empty_question_is_refused(self, engine: Engine, question: str) -> None:
        with engine.session() as session:
            with pytest.raises(OptionError, match="the question is empty"):
                session.ask(question)
            session.ask("Who?", SHORT)
            with pytest.raises(OptionError, match="the question is empty"):
                session.ask(question)
            assert len(session.turns) == 2

    def test_one_thing_to_begin_with(self, engine: Engine) -> None:
        with pytest.raises(OptionError, match="not with several"):
            engine.session(BOTH, system=SYSTEM)

    def test_files_are_computed_before_the_first_question(self, engine: Engine, tmp_path: Path) -> None:
        file = tmp_path / "notes.md"
        file.write_text("The cat is in the house.")
        with engine.session(files=[file], serving=Serving(strict=True)) as session:
            session.prepare()
            assert session.ask("Where?", SHORT).stats.modules[-1].hit


class TestUndo:
    def test_the_next_turn_is_as_if_nothing_had_been(self, engine: Engine) -> None:
        with engine.session(BOTH, serving=FULL) as session:
            session.ask("Where are they?", SHORT)
            before, turns = session.token_ids, session.turns
            wanted = session.ask("Who?", SHORT).token_ids
            session.ask("And the dog?", SHORT)
            assert session.undo() == "And the dog?"
            assert session.undo() == "Who?"
            assert (session.token_ids, session.turns) == (before, turns)
            assert session.ask("Who?", SHORT).token_ids == wanted

    def test_of_the_first_turn(self, engine: Engine) -> None:
        with engine.session(BOTH) as session:
            wanted = session.ask("Where are they?", SHORT)
            session.undo()
            assert (session.tokens, session.turns) == (0, ())
            again = session.ask("Where are they?", SHORT)
            assert again.token_ids == wanted.token_ids
            assert again.stats.modules[0].hit

    def test_nothing_to_undo(self, engine: Engine) -> None:
        with engine.session() as session, pytest.raises(OptionError, match="no question to undo"):
            session.undo()


class TestForks:
    def test_both_go_on(self, engine: Engine) -> None:
        with engine.session(BOTH, serving=FULL) as session:
            session.ask("Where are they?", SHORT)
            with session.fork() as other:
                assert other.turns == session.turns
                first, second = session.ask("Who?", SHORT), other.ask("Who?", SHORT)
                assert first.token_ids == second.token_ids
                assert second.stats.computed_tokens == first.stats.computed_tokens
                other.undo()
                other.ask("Is it the dog?", SHORT)
                asked = other.token_ids
                session.ask("Why?", SHORT)
            other_alone = asked[: len(asked) - 12]
            assert list(asked[-12:]) == full_answer(engine, other_alone, 12)
            assert list(session.token_ids[-12:]) == full_answer(engine, session.token_ids[:-12], 12)

    def test_before_the_first_question(self, engine: Engine) -> None:
        with engine.session(BOTH) as session, session.fork() as other:
            assert session.ask("Who?", SHORT).token_ids == other.ask("Who?", SHORT).token_ids


class TestEnding:
    def test_a_cancelled_answer_stays_as_far_as_it_came(self, engine: Engine) -> None:
        with engine.session(serving=FULL) as session:
            session.ask("Where?", SHORT)
            stream = session.stream("Who?", Sampling(max_tokens=100))
            first = next(stream)
            stream.cancel()
            assert list(stream) == []
            assert session.turns[-2:] == (("user", "Who?"), ("assistant", stream.result.text))
            assert stream.result.text.startswith(first)
            result = session.ask("Why?", SHORT)
            assert list(result.token_ids) == full_answer(engine, session.token_ids[:-12], 12)

    def test_an_answer_that_nobody_reads_on(self, engine: Engine) -> None:
        with engine.session() as session:
            for _ in session.stream("Who?", Sampling(max_tokens=100)):
                break
            assert len(session.turns) == 2
            assert session.ask("Why?", SHORT).stats.new_tokens == 12

    def test_cancelled_before_its_first_token_it_was_never_asked(self, engine: Engine) -> None:
        with engine.session(BOTH, serving=FULL) as session:
            stream = session.stream("Who?", progress=lambda _: stream.cancel())
            assert list(stream) == []
            assert (session.turns, session.tokens) == ((), 0)
            session.ask("Where?", SHORT)
            before = session.token_ids
            stream = session.stream("Who? " * 60, SHORT, progress=lambda _: stream.cancel())
            assert list(stream) == []
            assert session.token_ids == before
            session.ask("Why?", SHORT)
            assert list(session.token_ids[-12:]) == full_answer(engine, session.token_ids[:-12], 12)

    def test_a_turn_that_fails_leaves_the_session_as_it_was(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine.session(serving=FULL) as session:
            session.ask("Where?", SHORT)
            before = session.token_ids, session.turns
            with monkeypatch.context() as patch:
                patch.setattr(engine.backend, "decode", _fail)
                with pytest.raises(ZeroDivisionError):
                    session.ask("Who?", SHORT)
            assert (session.token_ids, session.turns) == before
            session.ask("Why?", SHORT)
            assert list(session.token_ids[-12:]) == full_answer(engine, session.token_ids[:-12], 12)

    def test_cells_that_are_lost_are_computed_again(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with engine.session(serving=FULL) as session:
            session.ask("Where?", SHORT)
            with monkeypatch.context() as patch:
                patch.setattr(type(session._cells.context(0)), "append", _lose)
                result = session.ask("Who?", SHORT)
            assert "the cells are gone; the conversation is computed again" in caplog.text
            assert list(result.token_ids) == full_answer(engine, session.token_ids[:-12], 12)
            assert result.stats.computed_tokens == result.stats.prompt_tokens

    def test_one_turn_at_a_time(self, engine: Engine) -> None:
        with engine.session() as session:
            stream = session.stream("Who?", Sampling(max_tokens=100))
            next(stream)
            for use in (lambda: session.ask("Why?"), session.undo, session.fork):
                with pytest.raises(EngineError, match="making an answer already"):
                    use()
            stream.close()
            session.ask("Why?", SHORT)

    def test_closing_ends_the_answer(self, engine: Engine) -> None:
        session = engine.session()
        stream = session.stream("Who?", Sampling(max_tokens=100))
        next(stream)
        session.close()
        session.close()
        assert list(stream) == []
        with pytest.raises(EngineError, match="this session is closed"):
            session.ask("Why?")

    def test_not_from_within_its_own_work(self, engine: Engine) -> None:
        with engine.session() as session:
            session.ask("Where?", SHORT)
            with pytest.raises(EngineError, match="progress callback"):
                session.ask("Who?", SHORT, progress=lambda _: session.close())
            session.ask("Why?", SHORT)

    def test_the_engine_closes_its_sessions(self, engine: Engine) -> None:
        session = engine.session()
        session.ask("Who?", SHORT)
        stream = session.stream("Why?", Sampling(max_tokens=100))
        next(stream)
        thread = threading.Thread(target=lambda: list(stream))
        thread.start()
        engine.close()
        thread.join(timeout=60)
        assert not thread.is_alive()
        with pytest.raises(EngineError, match="the engine is closed"):
            session.ask("Why?")


def first_keys(engine: Engine, array: Any, cells: int) -> Any:
    """Keys of the first layer, in one row for each cell; the first cell is at position 0."""
    if engine.backend.name == "onnx":
        return array[0, 0, :, :cells].swapaxes(0, 1).reshape(cells, -1)
    from edge_pc.backends.llamacpp.blob import BlobFormat

    blobs = BlobFormat(engine.spec.layers, engine.spec.kv_heads * engine.spec.head_dim)
    return blobs.keys(array.reshape(-1)[: blobs.nbytes(cells)], cells)[0].astype(np.float32)


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError


def _lose(*_: Any) -> Any:
    raise StatesError("the cells are gone")


class TestLongConversations:
    @pytest.mark.parametrize("serving", [FULL, Serving()], ids=["full", "balanced"])
    def test_the_oldest_turns_are_dropped(
        self, engine: Engine, say: Callable[[str], None], serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine.session(system=SYSTEM, serving=serving) as session:
            dropped = 0
            for number in range(14):
                say(f"It is number {number}, and it is in the house of the cat.")
                before = len(session.turns) // 2
                stats = session.ask(f"{number}: " + "Where is the cat? " * 5).stats
                assert len(session.turns) // 2 == before + 1 - stats.dropped_turns
                dropped += stats.dropped_turns
                turns: list[tuple[Role, str]] = [("system", SYSTEM), *session.turns]
                assert is_beginning(session.token_ids, rendered(engine, turns))
                if stats.dropped_turns:
                    new = len(rendered(engine, turns[-2:]))
                    assert (stats.computed_tokens > new + 40) == (serving is FULL)
            assert dropped > 3
            assert session.turns[0][1].startswith(f"{dropped}: ")
            monkeypatch.undo()
            result = session.ask("Who?", SHORT)
            full = full_answer(engine, session.token_ids[:-12], 12)
            assert serving is not FULL or list(result.token_ids) == full

    def test_cells_that_are_moved_are_those_of_their_new_places(
        self, engine: Engine, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Keys of the first layer hold nothing but their token and its place."""
        with engine.session(system=SYSTEM) as session:
            for number in range(3):
                say("Yes, it is.")
                session.ask(f"Is it number {number}, the cat in the house? " * 8)
            monkeypatch.undo()
            stats = session.ask("Is it? " * 20, Sampling(max_tokens=300)).stats
            assert stats.dropped_turns
            assert stats.cached_tokens > 200
            there = session._cells.there
            moved = first_keys(engine, session._cells.read(0, len(there)), len(there))
            with closing(engine.backend.new_context(len(there))) as context:
                context.prefill(Plan((), there.token_ids, there.position_ids))
                computed = first_keys(engine, context.read(there.position_ids), len(there))
            np.testing.assert_allclose(moved, computed, atol=0.02)

    def test_what_does_not_fit_without_them_is_refused(self, engine: Engine, say: Callable[[str], None]) -> None:
        with engine.session(system=SYSTEM) as session:
            say("Yes.")
            session.ask("Who?")
            before = session.token_ids
            with pytest.raises(
                ContextLengthError, match=r"beginning of the conversation takes \d+ tokens, the question"
            ):
                session.ask("Is it the cat? " * 200)
            with pytest.raises(ContextLengthError, match="the answer 1000"):
                session.ask("Who?", Sampling(max_tokens=1000))
            assert session.token_ids == before
            assert session.ask("Who?").stats.dropped_turns == 0

    def test_a_model_whose_cells_stay_where_they_are_computes_them_again(
        self, engine: Engine, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with engine.session(system=SYSTEM) as session:
            for _ in range(3):
                say("Yes, it is.")
                session.ask("Is it the cat in the house? " * 11)
            monkeypatch.undo()
            monkeypatch.setattr(type(engine.spec.position), "fixed", "it is so")
            result = session.ask("Is it? " * 20, Sampling(max_tokens=300))
            asked = session.token_ids[: len(session.token_ids) - len(result.token_ids)]
            assert result.stats.dropped_turns
            assert list(result.token_ids[:12]) == full_answer(engine, asked, 12)

    def test_a_session_that_grows_gets_a_larger_context(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edge_pc.runtime.live_cells.SPARE_CELLS", 0)
        monkeypatch.setattr("edge_pc.backends.onnx.backend.ARENA_CELLS", 64)
        with engine.session(serving=FULL) as session:
            for _ in range(5):
                session.ask("Where is the cat?", SHORT)
            assert list(session.token_ids[-12:]) == full_answer(engine, session.token_ids[:-12], 12)
