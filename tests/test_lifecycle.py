"""An engine's life: cancelling from any thread, closing, forking, and how often a token is computed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edge_pc import Engine, EngineError, Sampling, Serving, Stream

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

SCHEMA = """<schema name="pets">You know pets.
<module name="cat">The cat sleeps in the house, all day and all night.</module>
<module name="dog">The dog runs in the wood, and in the house.</module></schema>"""
BOTH = '<prompt schema="pets"><cat/><dog/>Where are they?</prompt>'
LONG = Sampling(max_tokens=400)


@pytest.fixture(params=["onnx", pytest.param("llamacpp", marks=needs_llamacpp)])
def engine(request: Any, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> Iterator[Engine]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    with Engine(model, backend=request.param, cache_dir=tmp_path / "states") as engine:
        engine.load_schema(SCHEMA)
        yield engine


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


class TestCancelling:
    def test_between_tokens(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG)
        first = next(stream)
        stream.cancel()
        assert list(stream) == []
        assert stream.result.stop == "cancelled"
        assert stream.result.text == first
        assert engine.generate(BOTH, Sampling(max_tokens=40)).text.startswith(first)

    def test_from_another_thread_while_tokens_come(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG)
        first = next(stream)
        thread = in_thread(lambda: list(stream))
        stream.close()
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert stream.result.stop == "cancelled"
        assert stream.result.text.startswith(first)

    @pytest.mark.parametrize("how", [Stream.cancel, Stream.close], ids=["cancel", "close"])
    def test_while_modules_are_encoded(self, engine: Engine, how: Callable[[Stream], None]) -> None:
        stream = engine.stream(BOTH, LONG, progress=lambda _: how(stream))
        assert list(stream) == []
        assert stream.result.stop == "cancelled"
        assert stream.result.token_ids == ()
        assert engine.generate(BOTH, Sampling(max_tokens=5)).stats.new_tokens == 5

    def test_before_anything_was_asked_for(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG)
        stream.cancel()
        assert list(stream) == []
        assert stream.result.stop == "cancelled"

    def test_an_answer_that_ended_keeps_its_reason(self, engine: Engine) -> None:
        with engine.stream(BOTH, Sampling(max_tokens=3)) as stream:
            list(stream)
        stream.cancel()
        assert stream.result.stop == "length"

    def test_during_full_prefill(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG, Serving(use_cache=False), progress=lambda _: stream.cancel())
        assert list(stream) == []
        assert stream.result.stop == "cancelled"


class TestClosing:
    def test_a_second_time_nothing_happens(self, engine: Engine) -> None:
        engine.generate(BOTH, Sampling(max_tokens=2))
        engine.close()
        engine.close()

    def test_what_is_closed_says_so(self, engine: Engine) -> None:
        engine.close()
        for use in (
            lambda: engine.generate(BOTH),
            lambda: next(engine.stream(BOTH)),
            lambda: engine.generate_many([BOTH]),
            lambda: engine.encode(SCHEMA),
            lambda: engine.encoding_size(SCHEMA),
            lambda: engine.load_schema(SCHEMA),
            lambda: engine.compare(BOTH),
            lambda: engine.ask("Who?", __file__),
        ):
            with pytest.raises(EngineError, match="the engine is closed"):
                use()

    def test_answers_that_were_not_read_to_their_end_are_ended(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG)
        next(stream)
        engine.close()
        assert list(stream) == []
        assert stream.result.stop == "cancelled"

    def test_not_from_within_its_own_work(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match="progress callback"):
            engine.generate(BOTH, progress=lambda _: engine.close())
        assert engine.generate(BOTH, Sampling(max_tokens=2)).stats.new_tokens == 2

    def test_work_in_another_thread_is_ended_and_waited_for(self, engine: Engine) -> None:
        stream = engine.stream(BOTH, LONG)
        next(stream)
        thread = in_thread(lambda: list(stream))
        engine.close()
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert stream.result.stop in ("cancelled", "eos", "length")

    def test_prompts_answered_together_are_ended_too(self, engine: Engine) -> None:
        errors: list[BaseException] = []
        started = threading.Event()

        def work() -> None:
            try:
                started.set()
                while True:
                    engine.generate_many([BOTH, BOTH], LONG)
            except EngineError as exc:
                errors.append(exc)

        thread = in_thread(work)
        started.wait()
        engine.close()
        thread.join(timeout=60)
        assert [str(error).splitlines()[0] for error in errors] == ["the engine is closed"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_to_open_its_own(engine: Engine) -> None:
    engine.generate(BOTH, Sampling(max_tokens=2))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.generate(BOTH, Sampling(max_tokens=2))
        except EngineError as exc:
            engine.close()
            status = 0 if "forked" in exc.message else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.generate(BOTH, Sampling(max_tokens=2)).stats.new_tokens == 2


def nested_schema(depth: int, cache: str = "true") -> str:
    opened = "".join(
        f'<module name="part{level}" cache="{cache if level == 1 else "true"}">Part {level} of the tale is short.'
        for level in range(1, depth + 1)
    )
    return f'<schema name="deep">Once.{opened}{"</module>" * depth}</schema>'


def nested_prompt(depth: int) -> str:
    inner = ""
    for level in range(depth, 0, -1):
        inner = f"<part{level}>{inner}</part{level}>"
    return f'<prompt schema="deep">{inner}And then?</prompt>'


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("why", ["limit", "read-only", "cache=false"])
def test_each_token_is_computed_once_where_states_cannot_be_kept(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, depth: int, why: str
) -> None:
    folder = tmp_path / "states"
    if why == "read-only":
        folder.write_text("a file in the way")
    limit = 1 if why == "limit" else None
    with Engine(tiny_model, cache_dir=folder, max_store_bytes=limit) as engine, caplog.at_level(logging.WARNING):
        engine.load_schema(nested_schema(depth, "false" if why == "cache=false" else "true"))
        prompt = nested_prompt(depth)
        result = engine.generate(prompt, Sampling(max_tokens=2), Serving(fidelity="fast"))
        # The uncached module is computed for the prompt, and once more as what its inner modules attend to.
        uncached = engine.lay_out(prompt).schema.modules["part1"]
        twice = len(uncached.token_ids) if why == "cache=false" and depth > 1 else 0
        assert result.stats.computed_tokens == result.stats.prompt_tokens + twice
        full = engine.generate(prompt, Sampling(max_tokens=2), Serving(use_cache=False))
        assert result.token_ids == full.token_ids
    warnings = [record for record in caplog.records if "not kept" in record.getMessage()]
    assert len(warnings) == (0 if why == "cache=false" else 1)


def test_a_module_larger_than_the_limit_keeps_no_other_from_being_stored(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = "It goes on and on. " * 30
    schema = (
        f'<schema name="mixed"><module name="a">{long}</module><module name="b">{long}</module>'
        '<module name="c">Short.</module></schema>'
    )
    with (
        Engine(tiny_model, cache_dir=tmp_path / "states", max_store_bytes=100_000) as engine,
        caplog.at_level(logging.WARNING),
    ):
        report = engine.encode(schema)
        assert (report.encoded, report.unstored) == (("c",), ("a", "b"))
        assert [entry.module for entry in engine.store.entries()] == ["c"]
    (warning,) = caplog.records
    assert "a: states are not kept: " in warning.getMessage()


def test_encode_loads_the_schema(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "more.xml"
    file.write_text(SCHEMA.replace('name="pets"', 'name="more"'))
    engine.encode(file)
    assert engine.generate(BOTH.replace("pets", "more"), Sampling(max_tokens=2), Serving(strict=True)).text


def test_one_file_needs_no_list(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("The cat is in the house.")
    for files in (str(file), file, [file]):
        assert engine.ask("Where?", files, Sampling(max_tokens=2)).stats.modules[-1].path == "notes.md"


def test_comparing_without_the_cache_stores_nothing(engine: Engine) -> None:
    compared = engine.compare(BOTH, Serving(use_cache=False))
    assert compared.full_ttft_ms > 0
    assert engine.store.entries() == []
    engine.compare(BOTH)
    assert engine.store.entries()


def test_a_schema_is_composed_once_for_its_content(engine: Engine) -> None:
    assert engine.load_schema(SCHEMA) is engine.load_schema(SCHEMA)
    assert engine.load_schema(SCHEMA.replace("cat", "cow")) is not engine.load_schema(SCHEMA)
