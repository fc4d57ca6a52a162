"""The engine: what it counts, refuses, streams and survives."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_tools import checking, flip_a_bit, lose_bytes

from edge_pc import (
    CacheMissError,
    ContextLengthError,
    Engine,
    MissingDependencyError,
    OptionError,
    PMLError,
    Sampling,
    Serving,
)
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.stats import Result

SCHEMA = """<schema name="pets"><system>You know pets.</system><user>
<module name="cat">The cat sleeps in the house, all day and all night.</module>
<module name="dog">The dog runs in the wood, and in the house.</module>
<module name="note" cache="false">It is noon.</module></user></schema>"""
CAT = '<prompt schema="pets"><cat/>Where is it?</prompt>'
DOG = '<prompt schema="pets"><dog/>Where is it?</prompt>'
SHORT = Sampling(max_tokens=12)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(tiny_model, cache_dir=tmp_path / "states") as engine:
        engine.load_schema(SCHEMA)
        yield engine


def reopened(engine: Engine, tiny_model: Path, **options: object) -> Engine:
    again = Engine(tiny_model, cache_dir=engine.store.path, **options)  # type: ignore[arg-type]
    again.load_schema(SCHEMA)
    return again


def modules(result: Result) -> dict[str, tuple[bool, str | None]]:
    return {module.path: (module.hit, module.reason) for module in result.stats.modules}


class TestCounting:
    def test_a_miss_is_loud_and_the_next_is_a_hit(self, engine: Engine) -> None:
        first, second = engine.generate(CAT, SHORT), engine.generate(CAT, SHORT)
        assert modules(first)["cat"] == (False, "not in the store")
        assert modules(second) == {"pets": (True, None), "cat": (True, None)}
        assert first.token_ids == second.token_ids
        assert first.stats.cached_tokens == 0
        assert first.stats.encode_ms > 0
        assert second.stats.encode_ms == 0
        assert second.stats.computed_tokens < second.stats.cached_tokens

    def test_cached_and_computed_add_up_to_the_prompt(self, engine: Engine) -> None:
        engine.encode(SCHEMA)
        for imports in ("", "<cat/>", "<cat/><dog/>", "<note/>", "<note/><dog/>"):
            for text in ("", "Where?"):
                stats = engine.generate(f'<prompt schema="pets">{imports}{text}</prompt>', SHORT).stats
                assert stats.cached_tokens + stats.computed_tokens == stats.prompt_tokens

    def test_full_prefill_computes_everything_and_stores_nothing(self, engine: Engine) -> None:
        stats = engine.generate(CAT, SHORT, Serving(use_cache=False)).stats
        assert stats.computed_tokens == stats.prompt_tokens
        assert stats.cached_tokens == 0
        assert engine.store.entries() == []

    def test_text_that_is_never_stored_says_so(self, engine: Engine) -> None:
        found = modules(engine.generate('<prompt schema="pets"><note/>So?</prompt>', SHORT))
        assert found["note"] == (False, 'cache="false" in the schema')

    def test_a_new_process_hits(self, engine: Engine, tiny_model: Path) -> None:
        wanted = engine.generate(CAT, SHORT)
        with reopened(engine, tiny_model) as again:
            result = again.generate(CAT, SHORT, Serving(strict=True))
        assert result.token_ids == wanted.token_ids
        assert all(module.hit for module in result.stats.modules)

    def test_an_edit_encodes_again_only_what_depends_on_it(self, engine: Engine) -> None:
        engine.encode(SCHEMA)
        report = engine.encode(SCHEMA.replace("in the wood,", "in the town,"))
        assert report.encoded == ("dog",)
        report = engine.encode(SCHEMA.replace("You know pets.", "You like pets."))
        assert set(report.encoded) == {"pets", "cat", "dog"}, "all of them see the schema's own text"

    @pytest.mark.parametrize(
        "options", [{"encoding": "isolated"}, {"kv_storage": "float16"}], ids=lambda o: "-".join(o.values())
    )
    def test_what_states_depend_on_is_a_miss(self, engine: Engine, tiny_model: Path, options: dict[str, str]) -> None:
        engine.encode(SCHEMA)
        with reopened(engine, tiny_model, **options) as other, pytest.raises(CacheMissError, match="cat"):
            other.generate(CAT, SHORT, Serving(strict=True, fidelity="fast"))

    def test_progress_tells_what_encode_computes(self, engine: Engine) -> None:
        layout = engine.load_schema(SCHEMA)
        size = engine.encoding_size(layout.schema)
        seen = []
        report = engine.encode(layout.schema, seen.append)
        assert [seen[-1].done, seen[-1].total, report.tokens] == [size.tokens] * 3
        assert report.nbytes < sum(entry.nbytes for entry in engine.store.entries()) <= size.nbytes
        assert engine.encoding_size(layout.schema).tokens == 0


class TestRefusals:
    def test_strict(self, engine: Engine) -> None:
        with pytest.raises(CacheMissError, match=r"cat: not in the store"):
            engine.generate(CAT, SHORT, Serving(strict=True))
        assert engine.store.entries() == [], "nothing is computed either"

    def test_an_unknown_schema(self, engine: Engine) -> None:
        with pytest.raises(PMLError, match="did you mean 'pets'"):
            engine.generate('<prompt schema="pet">x</prompt>')

    def test_a_schema_longer_than_the_model(self, engine: Engine) -> None:
        with pytest.raises(ContextLengthError) as caught:
            engine.load_schema(
                f'<schema name="s">So. <module name="a">{"?" * 700}</module>'
                f'<module name="b">{"?" * 400}</module></schema>'
            )
        assert "701  a" in str(caught.value)
        assert "400  b" in str(caught.value)

    def test_an_argument_that_is_too_long(self, engine: Engine) -> None:
        engine.load_schema('<schema name="s"><module name="m">I am <param name="p" len="2"/>.</module></schema>')
        with pytest.raises(PMLError, match=r":2:1: the argument 'p' of module 'm' has \d+ tokens, at most 2 fit"):
            engine.generate('<prompt schema="s">\n<m p="????????"/>x</prompt>')

    def test_a_prompt_without_any_text(self, engine: Engine) -> None:
        engine.load_schema('<schema name="s"><module name="m">I am.</module></schema>')
        with pytest.raises(PMLError, match="no text"):
            engine.generate('<prompt schema="s"/>')

    def test_roles_that_the_template_refuses(self, engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
        import shutil

        strict = tmp_path / "strict"
        shutil.copytree(tiny_model, strict)
        alternate = (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        )
        (strict / "chat_template.jinja").write_text(alternate)
        with Engine(strict, cache_dir=tmp_path / "other") as other:
            other.load_schema('<schema name="s"><user>Hello <module name="m">you</module></user></schema>')
            # Two turns of one role are merged.
            assert other.generate('<prompt schema="s"><m/><user>Again</user></prompt>', SHORT).token_ids
            other.load_schema('<schema name="plain">Hello</schema>')
            with pytest.raises(OptionError, match="refuses the turns assistant: roles must alternate"):
                other.generate('<prompt schema="plain"><assistant>Hi</assistant><user>Again</user></prompt>')

    def test_an_execution_provider_that_is_not_there(self, tiny_model: Path) -> None:
        with pytest.raises(MissingDependencyError, match="no execution provider 'cuda'"):
            Engine(tiny_model, provider="cuda")

    @pytest.mark.parametrize(
        "options",
        [
            {"backend": "none"},
            {"assembly": "x"},
            {"kv_storage": "int8"},
            {"encoding": "x"},
            {"placeholder": "x"},
            {"threads": 0},
        ],
    )
    def test_options_that_are_not_known(self, tiny_model: Path, options: dict[str, object]) -> None:
        with pytest.raises(OptionError):
            Engine(tiny_model, **options)  # type: ignore[arg-type]


class TestText:
    def test_control_tokens_typed_by_a_person_stay_text(self, engine: Engine) -> None:
        spelled = "&lt;|im_end|&gt;"
        layout = engine.lay_out(f'<prompt schema="pets"><cat/>{spelled}</prompt>')
        plain = engine.lay_out('<prompt schema="pets"><cat/>x</prompt>')
        end = engine.tokenizer.id_of("<|im_end|>")
        assert layout.token_ids.tolist().count(end) == plain.token_ids.tolist().count(end)

    def test_text_outside_chat_tags_is_the_users_turn(self, engine: Engine) -> None:
        bare, tagged = (
            engine.lay_out(f'<prompt schema="pets"><cat/>{text}</prompt>').token_ids.tolist()
            for text in ("Where?", "<user>Where?</user>")
        )
        assert bare == tagged

    def test_an_assistants_turn_at_the_end_is_left_open(self, engine: Engine) -> None:
        layout = engine.lay_out('<prompt schema="pets"><cat/>Where?<assistant>It is</assistant></prompt>')
        assert engine.tokenizer.decode(layout.token_ids[-5:].tolist()).endswith("It is")

    def test_a_chat_is_what_the_template_writes(self, engine: Engine) -> None:
        layout = engine.lay_out('<prompt schema="pets"><cat/>Where?</prompt>')
        cat = " The cat sleeps in the house, all day and all night."
        wanted = (
            f"<|im_start|>system\nYou know pets.<|im_end|>\n<|im_start|>user\n{cat.strip()}<|im_end|>\n"
            "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = layout.in_position_order().tolist()
        assert engine.tokenizer._tokenizer.decode(ids, skip_special_tokens=False) == wanted

    def test_stop_strings_across_tokens(self, engine: Engine) -> None:
        text = engine.generate(CAT, Sampling(max_tokens=30)).text
        stop = text[5:9]
        stopped = engine.generate(CAT, Sampling(max_tokens=30, stop=(stop,)))
        assert stopped.text == text[: text.index(stop)]
        assert stopped.stop == "stop"
        pieces = list(engine.stream(CAT, Sampling(max_tokens=30, stop=(stop,))))
        assert "".join(pieces) == stopped.text, "nothing of the stop string is given out early"

    def test_a_stream_is_the_text_in_whole_characters(self, engine: Engine) -> None:
        for seed in range(6):
            sampling = Sampling(max_tokens=40, temperature=3.0, seed=seed)
            stream = engine.stream(CAT, sampling)
            pieces = list(stream)
            assert "".join(pieces) == stream.result.text == engine.generate(CAT, sampling).text

    def test_length_ends_an_answer(self, engine: Engine) -> None:
        result = engine.generate(CAT, Sampling(max_tokens=3))
        assert result.stop in ("length", "eos")
        assert len(result.token_ids) == result.stats.new_tokens <= 3


class TestSurviving:
    def test_a_dropped_stream_leaves_a_clean_engine(self, engine: Engine) -> None:
        wanted = engine.generate(CAT, SHORT)
        for _ in range(5):
            stream = engine.stream(DOG, SHORT)
            next(stream)
            stream.close()
            dropped = engine.stream(DOG, SHORT)
            next(dropped)
            del dropped
            gc.collect()
        assert engine.generate(CAT, SHORT).token_ids == wanted.token_ids

    def test_a_request_while_another_streams(self, engine: Engine) -> None:
        cat, dog = engine.generate(CAT, SHORT), engine.generate(DOG, SHORT)
        with engine.stream(CAT, SHORT) as stream:
            first = next(stream)
            assert engine.generate(DOG, SHORT).token_ids == dog.token_ids
            assert first + "".join(stream) == cat.text

    def test_several_prompts_at_once(self, engine: Engine) -> None:
        prompts = [CAT, DOG, CAT, '<prompt schema="pets"><cat/><dog/>And?</prompt>']
        together = engine.generate_many(prompts, SHORT)
        assert [result.token_ids for result in together] == [engine.generate(p, SHORT).token_ids for p in prompts]
        assert [result.text for result in together] == [engine.generate(p, SHORT).text for p in prompts]

    def test_eight_threads_twenty_calls(self, engine: Engine) -> None:
        wanted = {prompt: engine.generate(prompt, SHORT).token_ids for prompt in (CAT, DOG)}
        barrier = threading.Barrier(8)

        def work(thread: int) -> list[bool]:
            barrier.wait()
            prompts = [(CAT, DOG)[(thread + call) % 2] for call in range(20)]
            return [engine.generate(prompt, SHORT).token_ids == wanted[prompt] for prompt in prompts]

        with ThreadPoolExecutor(8) as pool:
            right = [result for results in pool.map(work, range(8)) for result in results]
        assert right == [True] * 160

    def test_a_shorter_prompt_after_a_longer_one(self, engine: Engine) -> None:
        long = '<prompt schema="pets"><cat/><dog/>And tell me all of it, at length, please.</prompt>'
        wanted = engine.generate(CAT, SHORT).token_ids
        engine.generate(long, SHORT)
        assert engine.generate(CAT, SHORT).token_ids == wanted

    def test_five_hundred_requests_leave_memory_flat(self, engine: Engine) -> None:
        lengths = np.random.default_rng(0).integers(1, 700, size=600)

        def request(length: int) -> None:
            engine.generate(f'<prompt schema="pets"><cat/>{"? " * (length // 2)}</prompt>', Sampling(max_tokens=2))

        for length in lengths[:100]:
            request(int(length))
        before = _resident_bytes()
        for length in lengths[100:]:
            request(int(length))
        assert _resident_bytes() - before < 4 << 20

    @pytest.mark.parametrize("damage", ["truncate", "overwrite", "empty", "delete"])
    def test_damaged_files_are_noticed_and_encoded_again(self, engine: Engine, damage: str) -> None:
        wanted = engine.generate(CAT, SHORT)
        for entry in engine.store.entries():
            entry.path.chmod(0o600)
            size = entry.path.stat().st_size
            if damage == "delete":
                entry.path.unlink()
            else:
                with entry.path.open("r+b") as file:
                    if damage == "overwrite":
                        file.seek(size // 2)
                        file.write(b"\x7f" * 100)
                    else:
                        file.truncate(size // 2 if damage == "truncate" else 0)
        result = engine.generate(CAT, SHORT)
        assert result.token_ids == wanted.token_ids
        assert not any(module.hit for module in result.stats.modules)
        assert engine.generate(CAT, SHORT, Serving(strict=True)).token_ids == wanted.token_ids

    @pytest.mark.parametrize("way", ["generate", "generate_many"])
    def test_a_bit_that_flipped_on_the_disk_is_found_after_the_answer_began(
        self, engine: Engine, tiny_model: Path, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        wanted = engine.generate(CAT, SHORT)
        keys = {entry.module: entry.key for entry in engine.store.entries()}
        engine.close()
        flip_a_bit(engine.store.path, keys["cat"])
        with reopened(engine, tiny_model) as again, caplog.at_level(logging.WARNING, "edge_pc"):
            if way == "generate":
                first = again.generate(CAT, SHORT)
            else:
                (first,) = again.generate_many([CAT], SHORT)
            assert all(module.hit for module in first.stats.modules), "its time stamps say that nothing happened"
            for thread in checking():
                thread.join(60)
            (record,) = caplog.records
            assert "cat of pets: its stored states have changed on the disk" in record.getMessage()
            second = again.generate(CAT, SHORT)
            assert modules(second)["cat"] == (False, "checksum of the array does not match")
            assert modules(second)["pets"] == (True, None)
            assert second.token_ids == wanted.token_ids
            assert again.generate(CAT, SHORT, Serving(strict=True)).token_ids == wanted.token_ids

    def test_an_answer_that_goes_on_with_damaged_states_does_not_give_them_to_others(
        self, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        pytest.importorskip("llama_cpp")
        with Engine(tiny_gguf, backend="llamacpp", cache_dir=tmp_path / "states") as engine:
            engine.load_schema(SCHEMA)
            engine.encode(SCHEMA)
            difference = engine.compare(CAT).max_abs_logit_diff
            keys = {entry.module: entry.key for entry in engine.store.entries()}
        lose_bytes(engine.store.path, keys["cat"])
        again = reopened(engine, tiny_gguf, backend="llamacpp")
        with again, again.stream(CAT, Sampling(max_tokens=200)) as stream:
            for _ in range(2):  # the check starts after the first piece
                next(stream)
            for thread in checking():
                thread.join(60)
            assert modules(again.generate(CAT, SHORT))["cat"] == (False, "checksum of the array does not match")
            assert again.compare(CAT).max_abs_logit_diff == pytest.approx(difference, abs=1e-3)
            assert next(stream), "it goes on"

    def test_a_file_cut_short_behind_our_back(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between looking it up and placing it: the last moment at which it can be noticed."""
        wanted = engine.generate(CAT, SHORT)
        serve = Encoder.serve

        def then_cut(*args: Any) -> Any:
            served = serve(*args)
            for _, obtained in served:
                assert obtained.states.path is not None
                obtained.states.path.chmod(0o600)
                os.truncate(obtained.states.path, 5000)
            return served

        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "serve", then_cut)
            engine.backend._idle.clear()  # type: ignore[attr-defined] # a context that has them in place needs no file
            result = engine.generate(CAT, SHORT)
        assert result.stats.cached_tokens == 0
        assert result.stats.computed_tokens == result.stats.prompt_tokens
        assert "cut short" in str(modules(result)["cat"][1])
        assert engine.generate(CAT, SHORT).token_ids == wanted.token_ids

    def test_a_store_that_cannot_be_written(
        self, tiny_model: Path, tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
    ) -> None:
        wanted = engine.generate(CAT, SHORT)
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        with Engine(tiny_model, cache_dir=blocked / "states") as other, caplog.at_level(logging.WARNING):
            other.load_schema(SCHEMA)
            assert other.generate(CAT, SHORT).token_ids == wanted.token_ids
        assert "states are not kept" in caplog.text


class TestAssembly:
    LONG = (
        f'<schema name="long">So. <module name="a">{"x?" * 300}</module><module name="b">{"y?" * 75}</module></schema>'
    )
    PROMPT = '<prompt schema="long"><a/><b/>Where?</prompt>'

    @pytest.mark.parametrize("options", [{"assembly": "map"}, {"assembly": "copy"}, {"assembly": "auto"}])
    def test_mapped_and_copied_answers_are_the_same(
        self, tiny_model: Path, tmp_path: Path, options: dict[str, str]
    ) -> None:
        with Engine(tiny_model, cache_dir=tmp_path, **options) as engine:  # type: ignore[arg-type]
            engine.load_schema(self.LONG)
            engine.generate(self.PROMPT, SHORT, Serving(fidelity="fast"))
            placed = engine.generate(self.PROMPT, SHORT, Serving(fidelity="fast"))
            assert placed.stats.computed_tokens < 20
        with Engine(tiny_model, cache_dir=tmp_path) as engine:
            engine.load_schema(self.LONG)
            full = engine.generate(self.PROMPT, SHORT, Serving(fidelity="fast"))
            assert placed.token_ids == full.token_ids

    def test_float16_states_take_half_the_disk_and_answer_alike(self, tiny_model: Path, tmp_path: Path) -> None:
        sizes, answers = [], []
        for storage in ("float32", "float16"):
            with Engine(tiny_model, cache_dir=tmp_path / storage, kv_storage=storage) as engine:
                engine.load_schema(self.LONG)
                engine.generate(self.PROMPT, SHORT)
                result = engine.generate(self.PROMPT, SHORT, Serving(strict=True))
                answers.append(result.token_ids)
                sizes.append(sum(entry.nbytes for entry in engine.store.entries()))
        assert answers[0] == answers[1]
        assert sizes[1] < 0.6 * sizes[0]

    def test_a_mapped_file_is_never_written_to(self, tiny_model: Path, tmp_path: Path) -> None:
        with Engine(tiny_model, cache_dir=tmp_path, assembly="map") as engine:
            engine.load_schema(self.LONG)
            for _ in range(3):
                engine.generate(self.PROMPT, Sampling(max_tokens=40))
                engine.generate('<prompt schema="long"><b/>Where?</prompt>', Sampling(max_tokens=40))
            assert engine.store.verify() == []


def test_a_prompt_that_fills_the_model_may_have_tokens_computed_again(engine: Engine) -> None:
    # Those lie in the context twice.
    modules = "".join(f'<module name="{name}">{"1 " * 245}</module>' for name in "ab")
    engine.load_schema(f'<schema name="s">{modules}</schema>')
    prompt = '<prompt schema="s"><a/><b/>Why?</prompt>'
    room = engine.spec.max_positions - engine.lay_out(prompt).end
    assert 0 < room < 50
    stats = engine.generate(prompt, Sampling(max_tokens=room), Serving(fidelity="balanced")).stats
    assert stats.new_tokens


class TestAsk:
    def test_the_second_question_reuses_the_files(self, engine: Engine, tmp_path: Path) -> None:
        files = [tmp_path / "one.txt", tmp_path / "two.txt"]
        files[0].write_text("The cat is old.")
        files[1].write_text("The dog is young.")
        first = engine.ask("Who is old?", files, SHORT, Serving(fidelity="fast"))
        second = engine.ask("Who is young?", files, SHORT, Serving(fidelity="fast"))
        assert not any(module.hit for module in first.stats.modules)
        assert all(module.hit for module in second.stats.modules)
        assert [module.path for module in second.stats.modules] == ["documents", "one.txt", "two.txt"]

    def test_a_model_without_a_chat_template(self, tiny_model: Path, tmp_path: Path) -> None:
        import shutil

        base = tmp_path / "base"
        shutil.copytree(tiny_model, base)
        (base / "chat_template.jinja").unlink()
        file = tmp_path / "one.txt"
        file.write_text("The cat is old.")
        with Engine(base, cache_dir=tmp_path / "states") as engine:
            assert engine.ask("Who?", [file], SHORT).stats.new_tokens > 0

    @pytest.mark.parametrize("content", [None, b"", b"  \n", b"\xff\xfe\x00"])
    def test_files_that_cannot_be_read(self, engine: Engine, tmp_path: Path, content: bytes | None) -> None:
        file = tmp_path / "file.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(OptionError, match=r"file\.txt"):
            engine.ask("Who?", [file])


def test_compare_tells_what_it_measured(engine: Engine) -> None:
    compared = engine.compare(CAT)
    assert compared.ttft_ratio == pytest.approx(compared.full_ttft_ms / compared.cached_ttft_ms)
    assert compared.kl >= 0
    assert np.isfinite([compared.full_ttft_ms, compared.in_place_ttft_ms, compared.max_abs_logit_diff]).all()


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not tell resident memory")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
