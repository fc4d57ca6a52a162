"""Versions of states: neutral ones that serve every selection, exact ones for a selection that comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc import Engine, Sampling, Serving
from edge_pc.compose.choices import ENCODING_RULES
from edge_pc.compose.neutral import neutral_text
from edge_pc.errors import OptionError
from edge_pc.runtime.recompute import SHARE
from edge_pc.runtime.serving import COMPUTED, FIDELITIES

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

SCHEMA = """<schema name="pets">You know pets.
<module name="cat">The cat sleeps in the house, all day and all night.</module>
<module name="dog">The dog runs in the wood, and in the house.</module>
<module name="cow">The cow stands in the field, and looks at the {what}.</module></schema>"""
SHORT = Sampling(max_tokens=4)
FAST = Serving(fidelity="fast")


@pytest.fixture(params=["onnx", pytest.param("llamacpp", marks=needs_llamacpp)])
def engine(request: Any, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> Iterator[Engine]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    with Engine(model, backend=request.param, cache_dir=tmp_path / "states") as engine:
        engine.load_schema(SCHEMA.format(what="moon"))
        yield engine


def prompt(*names: str) -> str:
    return f'<prompt schema="pets">{"".join(f"<{name}/>" for name in names)}Where is it?</prompt>'


def exact(engine: Engine, *names: str) -> dict[str, bool]:
    modules = engine.generate(prompt(*names), SHORT, FAST).stats.modules
    assert all(module.hit for module in modules)
    return {module.path: module.exact for module in modules if module.path != "pets"}


class TestExactVersions:
    def test_a_selection_that_comes_back_equals_full_prefill(self, engine: Engine) -> None:
        names = ("cat", "dog", "cow")
        assert engine.compare(prompt(*names), FAST).max_abs_logit_diff > 0
        for _ in range(2):
            engine.generate(prompt(*names), SHORT, FAST)
        assert exact(engine, *names) == {"cat": True, "dog": False, "cow": False}
        (report,) = engine.refine()
        assert report.encoded == ("dog", "cow")
        assert exact(engine, *names) == {"cat": True, "dog": True, "cow": True}
        assert engine.compare(prompt(*names), FAST).max_abs_logit_diff == 0

    def test_the_first_modules_of_a_longer_selection_are_exact(self, engine: Engine) -> None:
        engine.generate(prompt("cat", "dog"), SHORT)
        engine.refine(uses=1)
        engine.generate(prompt("cat", "dog", "cow"), SHORT, FAST)
        assert exact(engine, "cat", "dog", "cow") == {"cat": True, "dog": True, "cow": False}
        engine.generate(prompt("dog"), SHORT, FAST)
        assert exact(engine, "dog") == {"dog": False}, "another selection has another version"

    def test_prompts_that_are_named(self, engine: Engine) -> None:
        (report,) = engine.refine([prompt("cat", "dog", "cow")])
        assert set(report.encoded) == {"pets", "cat", "dog", "cow"}
        assert exact(engine, "cat", "dog", "cow") == {"cat": True, "dog": True, "cow": True}

    def test_once_is_not_enough(self, engine: Engine) -> None:
        engine.generate(prompt("cat", "dog"), SHORT)
        assert engine.refine() == []

    def test_what_is_there_is_not_made_again(self, engine: Engine) -> None:
        engine.generate(prompt("cat", "dog"), SHORT)
        engine.refine(uses=1)
        (again,) = engine.refine(uses=1)
        assert again.encoded == ()
        assert again.tokens == 0

    def test_an_argument_inside_ends_them(self, engine: Engine) -> None:
        """What follows an argument would have seen it, and it is another one in the next prompt."""
        engine.load_schema(
            '<schema name="trip"><module name="a">We go.</module><module name="b">To <param name="x" len="12"/> then.'
            '</module><module name="c">And home.</module></schema>'
        )
        for value in ("Rome", "Oslo"):
            engine.generate(f'<prompt schema="trip"><a/><b x="{value}"/><c/>When?</prompt>', SHORT)
            engine.refine(uses=1)
        result = engine.generate('<prompt schema="trip"><a/><b x="Bern"/><c/>When?</prompt>', SHORT, FAST)
        modules = result.stats.modules
        assert [(module.path, module.exact) for module in modules] == [("a", True), ("b", False), ("c", False)]

    def test_a_prompt_ends_refining(self, engine: Engine) -> None:
        for names in (("cat", "dog"), ("cat", "dog", "cow"), ("dog", "cow")):
            engine.generate(prompt(*names), SHORT, FAST)
        reached, answered = threading.Event(), threading.Event()

        def wait_for_the_prompt(_: object) -> None:
            reached.set()
            answered.wait(60)

        thread = threading.Thread(target=lambda: engine.refine(uses=1, progress=wait_for_the_prompt))
        thread.start()
        assert reached.wait(60)
        stream = engine.stream(prompt("cat"), SHORT)
        threading.Timer(0.2, answered.set).start()
        assert list(stream)
        thread.join(60)
        assert not thread.is_alive()


class TestPlaces:
    """One file's states serve every order, every subset and every schema."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> list[Path]:
        names = ["cat", "dog", "cow", "hen", "owl"]
        for name in names:
            (tmp_path / name).write_text(f"The {name} is in the house. " * 4)
        return [tmp_path / name for name in names]

    def test_what_is_known_in_any_order_is_not_computed_again(self, engine: Engine, files: list[Path]) -> None:
        first = engine.ask("Who is it?", files, SHORT, FAST).stats
        stored = len(engine.store.entries())
        for order in (files[::-1], files[2:4], files[1:], files[:1], [files[3], files[0]]):
            stats = engine.ask("Who is it?", order, SHORT, FAST).stats
            assert all(module.hit for module in stats.modules)
            own = first.prompt_tokens - first.cached_tokens
            assert stats.computed_tokens < min(own, 60), "the question only"
        assert len(engine.store.entries()) == stored == 1 + len(files), "one copy of each file"

    def test_a_changed_file_is_computed_alone(self, engine: Engine, files: list[Path]) -> None:
        engine.ask("Who is it?", files, SHORT, FAST)
        files[1].write_text("Another dog, a longer text, that moves all that stands after it.")
        modules = engine.ask("Who is it?", files, SHORT, FAST).stats.modules
        assert [module.path for module in modules if not module.hit] == ["dog"]

    def test_states_of_one_schema_serve_another(self, engine: Engine) -> None:
        engine.encode(SCHEMA.format(what="moon"))
        more = SCHEMA.replace('name="pets"', 'name="more"').replace('name="dog"', 'name="wolf"')
        longer = more.replace("all day and all night.", "all day and all night, and all the days and nights.")
        engine.load_schema(longer.format(what="moon"))
        stats = engine.generate('<prompt schema="more"><wolf/><cow/>Where?</prompt>', SHORT, FAST).stats
        assert all(module.hit for module in stats.modules)

    def test_neutral_text_that_finds_no_positions(self, tiny_model: Path, tmp_path: Path) -> None:
        """Near the model's last position states stay where they are."""
        with Engine(tiny_model, cache_dir=tmp_path / "states") as engine:
            room = engine.spec.max_positions
            text = "?" * (room - 100)
            engine.load_schema(
                f'<schema name="long"><module name="a">{text}</module><module name="b">The end?</module></schema>'
            )
            result = engine.generate('<prompt schema="long"><a/><b/>Where?</prompt>', SHORT, FAST)
            assert result.stats.new_tokens > 0
            assert all(
                e.encoded_position_ids[-1] < room
                for e in engine.lay_out('<prompt schema="long"><a/><b/>Where?</prompt>').encodings
            )


class TestFidelity:
    LONG = (
        '<schema name="long">So. <module name="a">'
        + "The cat sleeps. " * 9
        + '</module><module name="b">'
        + "The dog runs. " * 9
        + '</module><module name="c">'
        + "The cow stands. " * 9
        + "</module></schema>"
    )
    PROMPT = '<prompt schema="long"><a/><b/><c/>Where is it?</prompt>'

    def test_more_is_computed_again_the_closer_it_is_to_be(self, engine: Engine) -> None:
        engine.load_schema(self.LONG)
        engine.generate(self.PROMPT, SHORT, FAST)
        computed, distance = {}, {}
        for level in FIDELITIES:
            serving = Serving(fidelity=level)
            stats = engine.generate(self.PROMPT, SHORT, serving).stats
            computed[level] = stats.computed_tokens
            assert stats.cached_tokens + stats.computed_tokens == stats.prompt_tokens
            distance[level] = engine.compare(self.PROMPT, serving).kl
        modules = engine.lay_out(self.PROMPT).encodings
        approximate = modules[-1].tokens + modules[-2].tokens
        own = computed["fast"]
        assert computed["balanced"] == own + int(SHARE * approximate)
        assert computed["full"] == own + approximate
        assert distance["full"] < 1e-9
        assert distance["balanced"] < distance["fast"]

    def test_what_is_short_is_computed(self, engine: Engine) -> None:
        engine.load_schema(SCHEMA.format(what="moon"))
        result = engine.generate(prompt("cat", "dog"), SHORT)
        reasons = {module.path: module.reason for module in result.stats.modules}
        assert reasons["dog"] == COMPUTED
        again = engine.generate(prompt("cat", "dog"), SHORT)
        assert [m.path for m in again.stats.modules if m.hit] == ["pets", "cat"]
        assert engine.compare(prompt("cat", "dog")).kl < 1e-9

    def test_the_next_prompt_has_the_true_cells(self, engine: Engine) -> None:
        engine.load_schema(self.LONG)
        before = engine.generate(self.PROMPT, SHORT, FAST).token_ids
        for level in ("balanced", "fast", "balanced", "balanced", "fast"):
            found = engine.generate(self.PROMPT, SHORT, Serving(fidelity=level)).token_ids  # type: ignore[arg-type]
            assert level != "fast" or found == before

    def test_the_needed_level_is_told(self, engine: Engine) -> None:
        engine.load_schema(self.LONG)
        assert engine.compare('<prompt schema="long"><a/>Where?</prompt>').needed == "fast"
        assert engine.compare(self.PROMPT).needed in FIDELITIES

    def test_an_unknown_level(self) -> None:
        with pytest.raises(OptionError, match="fast, balanced, full"):
            Serving(fidelity="best")  # type: ignore[arg-type]


class TestNeutralText:
    def test_nothing_of_it_is_stored_or_in_a_prompt(self, engine: Engine) -> None:
        laid_out = engine.lay_out(prompt("cat", "dog", "cow"))
        dog = next(encoding for encoding in laid_out.encodings if encoding.paths == ("dog",))
        layout = laid_out.schema.modules["dog"]
        assert len(dog.token_ids) > dog.tokens, "neutral text stands before it"
        assert dog.kept_token_ids.tolist() == layout.token_ids.tolist()
        assert dog.kept_position_ids.tolist() == layout.position_ids.tolist()
        assert (np.diff(dog.position_ids) == 1).all()
        assert laid_out.tokens == len(laid_out.in_position_order())

    def test_nothing_of_an_absent_module_leaks(self, engine: Engine) -> None:
        """Another text of the same length in a module before leaves the states of those after it as they are."""
        before = {e.paths: e.key for e in engine.lay_out(prompt("dog", "cow")).encodings}
        engine.load_schema(SCHEMA.format(what="moon").replace("all day and all night", "all night and all day"))
        after = {e.paths: e.key for e in engine.lay_out(prompt("dog", "cow")).encodings}
        assert before == after

    def test_it_stands_only_where_modules_may_be_absent(self, engine: Engine) -> None:
        layout = engine.load_schema(SCHEMA.format(what="moon"))
        cat, dog = (engine.composer.schema(layout.schema).encodings.single(name) for name in ("cat", "dog"))
        assert len(cat.token_ids) == cat.tokens, "the schema's own text stands before it"
        assert len(dog.token_ids) - dog.tokens == len(engine.tokenizer.encode(neutral_text()))
        assert dog.position_ids[0] == layout.modules["cat"].start, "it stands right after the schema's own text"

    def test_the_older_rules_stay(self, tiny_model: Path, tmp_path: Path) -> None:
        keys = set()
        for rule in ENCODING_RULES:
            with Engine(tiny_model, encoding=rule, cache_dir=tmp_path / "states") as engine:
                engine.load_schema(SCHEMA.format(what="moon"))
                keys.add(engine.lay_out(prompt("dog")).encodings[-1].key)
        assert len(keys) == len(ENCODING_RULES) == 3
