"""Conversations that are saved, and go on in a new process: cells mapped, or computed again where they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc import Engine, ModelError, OptionError, Sampling, Serving, StoreError
from edge_pc.backends.base import Plan
from edge_pc.compose.choices import Tail
from edge_pc.system.home import SESSIONS

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
SHORT = Sampling(max_tokens=12)
FULL = Serving(fidelity="full")
QUESTION = "Where is the cat, and is it in the house?"

Open = Callable[[], Engine]


@pytest.fixture(params=["onnx", pytest.param("llamacpp", marks=needs_llamacpp)])
def arguments(request: Any, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> dict[str, Any]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    return {"model": str(model), "backend": request.param, "cache_dir": str(tmp_path / "states"), "threads": 1}


@pytest.fixture
def engine(arguments: dict[str, Any]) -> Iterator[Engine]:
    with Engine(**arguments) as engine:
        yield engine


def cells_of(engine: Engine) -> list[tuple[str, int, Path]]:
    """(key, tokens, file) of each stretch."""
    entries = [entry for entry in engine.store.entries() if entry.schema == SESSIONS]
    return [(entry.key, entry.tokens, entry.path) for entry in entries]


def in_a_new_process(arguments: dict[str, Any], question: str) -> dict[str, Any]:
    """Go on with the session "s", and say what came of it."""
    code = """
import json, sys
from edge_pc import Engine, Sampling
with Engine(**json.loads(sys.argv[1])) as engine, engine.resume("s") as session:
    turns = session.turns
    result = session.ask(sys.argv[2], Sampling(max_tokens=12))
    print(json.dumps([turns, session.token_ids, result.token_ids, result.stats.computed_tokens]))
"""
    command = [sys.executable, "-c", code, json.dumps(arguments), question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return dict(zip(("turns", "token_ids", "answer", "computed"), json.loads(done.stdout), strict=True))


def asked(engine: Engine, count: int = 3) -> Any:
    """A session with some turns."""
    session = engine.session(system="The cat is in the house. " * 8, serving=FULL)
    for number in range(count):
        session.ask(f"Number {number}. {QUESTION}", SHORT)
    return session


def test_it_goes_on_in_a_new_process(arguments: dict[str, Any]) -> None:
    with Engine(**arguments) as engine, asked(engine) as session:
        session.save("s")
        turns, before = session.turns, session.tokens
        wanted = session.ask("And now?", SHORT)
        token_ids = session.token_ids
    found = in_a_new_process(arguments, "And now?")
    assert tuple(map(tuple, found["turns"])) == turns
    assert tuple(found["token_ids"]) == token_ids
    assert tuple(found["answer"]) == wanted.token_ids
    assert found["computed"] <= wanted.stats.prompt_tokens - before + 2


def test_a_later_save_adds_only_what_is_new(arguments: dict[str, Any], engine: Engine) -> None:
    with asked(engine) as session:
        session.save("s")
        first = cells_of(engine)
        session.save("s")
        assert cells_of(engine) == first
        session.ask("And now?", SHORT)
        session.save("s")
        second = [entry for entry in cells_of(engine) if entry not in first]
        assert sum(tokens for _, tokens, _ in cells_of(engine)) in (session.tokens, session.tokens - 1)
        assert len(second) == 1
    with engine.resume("s") as session:
        session.ask("Why?", SHORT)
        session.ask("Who?", SHORT)
        session.save("s")
        third = [entry for entry in cells_of(engine) if entry not in (*first, *second)]
        assert len(third) == 1
        wanted = session.ask("And?", SHORT).token_ids
    assert tuple(in_a_new_process(arguments, "And?")["answer"]) == wanted


@pytest.mark.parametrize("stretch_tokens", [16, 100])
def test_in_stretches(engine: Engine, monkeypatch: pytest.MonkeyPatch, stretch_tokens: int) -> None:
    monkeypatch.setattr("edge_pc.runtime.saved_cells.STRETCH_TOKENS", stretch_tokens)
    with asked(engine) as session:
        session.save("s")
        assert max(tokens for _, tokens, _ in cells_of(engine)) == stretch_tokens
        session.undo()
        session.ask("Another one?", SHORT)
        session.save("s")
        stored = cells_of(engine)
        assert sum(tokens for _, tokens, _ in stored) <= session.tokens, "what the first save alone needed is gone"
        wanted = session.ask("And?", SHORT).token_ids
    with engine.resume("s") as session:
        assert session.ask("And?", SHORT).token_ids == wanted


class TestDamage:
    @pytest.mark.parametrize("what", ["missing", "cut short", "overwritten"])
    def test_of_a_stretch(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
    ) -> None:
        monkeypatch.setattr("edge_pc.runtime.saved_cells.STRETCH_TOKENS", 100)
        with asked(engine) as session:
            session.save("s")
            wanted = session.ask("And?", SHORT)
        hurt = cells_of(engine)[1][2]
        hurt.chmod(0o600)
        if what == "missing":
            hurt.unlink()
        else:
            data = bytearray(hurt.read_bytes())
            data[5000:5100] = b"\xff" * 100
            hurt.write_bytes(data[: len(data) // 2] if what == "cut short" else data)
        with engine.resume("s") as session:
            found = session.ask("And?", SHORT)
            assert found.token_ids == wanted.token_ids
            assert 100 <= found.stats.computed_tokens - wanted.stats.computed_tokens <= 104
            assert caplog.text.count("a saved part of the conversation is computed again: ") == 1
            session.save("s")
        with engine.resume("s") as session:
            assert session.ask("And?", SHORT).token_ids == session.token_ids[-12:]
        assert caplog.text.count("is computed again") == 1

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: text.replace("Number 1", "Number 2"),
            lambda text: text[:-10],
            lambda text: text.replace('"chat": true', '"chat": 3'),
            lambda text: "[]",
            lambda text: "",
        ],
    )
    def test_of_its_file(self, engine: Engine, change: Callable[[str], str]) -> None:
        with asked(engine) as session:
            session.save("s")
        path = engine.store.sessions.path("s")
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        with pytest.raises(StoreError, match="the saved session 's' is damaged") as failed:
            engine.resume("s")
        assert "cache rm sessions/s" in str(failed.value.hint)

    def test_cells_that_are_lost_before_they_are_saved(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with asked(engine) as session:
            with monkeypatch.context() as patch:
                patch.setattr(type(session._cells.context(0)), "read", _lose)
                session.save("s")
            assert "the cells are gone; the conversation is saved without them" in caplog.text
            wanted = session.ask("And?", SHORT).token_ids
        with engine.resume("s") as session:
            assert session.ask("And?", SHORT).token_ids == wanted


def _lose(*_: Any) -> Any:
    from edge_pc.errors import StatesError

    raise StatesError("the cells are gone")


class TestGoingOn:
    def test_undo_goes_back_to_the_opening(self, engine: Engine) -> None:
        with asked(engine, 1) as session:
            session.save("s")
        with engine.resume("s") as session:
            session.undo()
            assert session.turns == ()
            assert session.tokens > 0
            session.ask(f"Number 0. {QUESTION}", SHORT)
            token_ids = session.token_ids
        with asked(engine, 1) as session:
            assert session.token_ids == token_ids

    def test_a_fork_saved_under_another_name_shares_its_cells(self, engine: Engine) -> None:
        with asked(engine) as session, session.fork() as other:
            session.save("s")
            stored = cells_of(engine)
            other.save("t")
            assert cells_of(engine) == stored
        assert engine.store.remove_sessions(["s"]).entries == ()
        with engine.resume("t") as session:
            assert session.ask("And?", SHORT).stats.computed_tokens < 40
        assert len(engine.store.remove_sessions(["t"]).entries) == len(stored)
        assert engine.store.sessions.names() == []

    def test_one_that_was_resumed_is_saved_under_another_name(self, engine: Engine) -> None:
        with asked(engine) as session:
            session.save("s")
        stored = cells_of(engine)
        with engine.resume("s") as session:
            session.save("t")
        assert cells_of(engine) == stored
        with engine.resume("t") as session:
            assert session.ask("And?", SHORT).stats.computed_tokens < 40

    @pytest.mark.parametrize("tail", ["imported", "packed"])
    def test_cells_of_any_positions_and_chosen_ones(self, arguments: dict[str, Any], tail: Tail) -> None:
        """Cells that were computed again for the first question are not those of a full prefill, and are kept so."""
        text = "The cat sleeps in the house, and the dog runs. " * 4
        schema = "".join(f'<module name="{name}">{text}</module>' for name in "abc")
        with Engine(**arguments, tail=tail) as engine:
            engine.load_schema(f'<schema name="pets">{schema}</schema>')
            with engine.session('<prompt schema="pets"><a/><c/></prompt>') as session:
                session.ask("Where?", SHORT)
                session.save("s")
                stored = session.tokens - 1
                first = session._cells.read(0, stored)
                wanted = session.ask("And?", SHORT).token_ids
            with engine.resume("s") as session:
                assert session.ask("And?", SHORT).token_ids == wanted
                again = session._cells.read(0, stored)
        np.testing.assert_array_equal(again, first)

    def test_turns_are_dropped_from_what_was_saved(self, engine: Engine) -> None:
        with asked(engine) as session:
            session.save("s")
        with engine.resume("s") as session:
            result = session.ask("And? " * 20, Sampling(max_tokens=700))
            assert result.stats.dropped_turns
            ids = np.array(session.token_ids[: result.stats.prompt_tokens], dtype=np.int32)
            with closing(engine.backend.new_context(len(ids))) as context:
                logits = context.prefill(Plan((), ids, np.arange(len(ids), dtype=np.int32))).logits
            assert int(np.argmax(logits)) == result.token_ids[0]


class TestNames:
    @pytest.mark.parametrize("name", ["", ".", "a/b", "../a", "-x", "ä", "a" * 65, "a\n"])
    def test_that_cannot_be(self, engine: Engine, name: str) -> None:
        with asked(engine, 1) as session, pytest.raises(OptionError, match="cannot be the name of a saved session"):
            session.save(name)
        with pytest.raises(OptionError, match="cannot be the name"):
            engine.resume(name)

    def test_that_is_not_there(self, engine: Engine) -> None:
        with pytest.raises(OptionError, match="no session is saved as 'x'"):
            engine.resume("x")
        with asked(engine, 1) as session:
            session.save("s")
        with pytest.raises(OptionError) as failed:
            engine.resume("x")
        assert failed.value.hint == "there are: s"

    def test_of_a_conversation_without_a_question(self, engine: Engine) -> None:
        with engine.session() as session, pytest.raises(OptionError, match="nothing to save"):
            session.save("s")

    def test_of_another_model(self, engine: Engine) -> None:
        with asked(engine, 1) as session:
            session.save("s")
        saved = engine.store.sessions.read("s")
        engine.store.sessions.write(replace(saved, fingerprint="another"))
        with pytest.raises(ModelError, match="was saved with another model"):
            engine.resume("s")


def test_gc_removes_cells_of_no_session(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with asked(engine) as session:
        session.save("s")
        session.save("t")
    stored = len(cells_of(engine))
    engine.store.sessions.remove("s")
    assert engine.store.gc().entries == ()
    engine.store.sessions.remove("t")
    assert engine.store.gc().entries == (), "they may be those of a session that is being saved"
    later = time.time() + 4000
    monkeypatch.setattr("edge_pc.store.store.time.time", lambda: later)
    assert len(engine.store.gc().entries) == stored
    assert engine.store.entries() != [], "what is stored of the system text stays"
