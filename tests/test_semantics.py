"""What a model sees: every rule of positions, causality, guaranteed context, scaffolds and parameters.

Logits are compared with an independent implementation that is told the rules as a matrix (`reference.py`), on every
backend from this one source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from reference import ROOT, Reference, expected_logits, guaranteed, isolated, jointly, served_logits

from edge_pc import Engine, Sampling, Serving
from edge_pc.compose.laid_out import LaidOut

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
BACKENDS = ["onnx", pytest.param("llamacpp", marks=needs_llamacpp)]

# llama.cpp keeps keys and values in 16 bit.
TOLERANCE = {"onnx": 2e-3, "llamacpp": 0.15}

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_engine(backend: str, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> Iterator[MakeEngine]:
    """Opens engines over one store; they are closed at the end."""
    opened: list[Engine] = []

    def make(**options: Any) -> Engine:
        model = tiny_model if backend == "onnx" else tiny_gguf
        options = {"encoding": "guaranteed", "tail": "imported", **options}
        engine = Engine(model, backend=backend, cache_dir=tmp_path / "states", **options)
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def laid_out(engine: Engine, prompt: str) -> LaidOut:
    return engine.lay_out(prompt)


def first_logits(engine: Engine, prompt: str, *, exact: bool = False) -> Any:
    """Logits of the first token, as served."""
    layout = engine.lay_out(prompt)
    plan = layout.cached_plan([o.states for o in engine.encoder.obtain(layout.encodings)], exact=exact)
    context = engine.backend.new_context(layout.tokens)
    try:
        return context.prefill(plan).logits
    finally:
        context.close()


def check(engine: Engine, reference: Reference, prompt: str, sees: Any, **extra: Any) -> None:
    close(
        engine, prompt, expected_logits(reference, laid_out(engine, prompt), sees, at_least=at_least(engine), **extra)
    )


def at_least(engine: Engine) -> int:
    """How many cells are computed for a prompt at least (chunks.py)."""
    return 2 if engine.backend.name == "onnx" else 1


def close(engine: Engine, prompt: str, wanted: Any) -> None:
    """The prompt's logits, as served, are `wanted`."""
    for _ in range(2):  # a miss, then a hit
        for exact in (False, True):
            got = first_logits(engine, prompt, exact=exact)
            np.testing.assert_allclose(got, wanted, atol=TOLERANCE[engine.backend.name])


TRIP = """<schema name="trip">
  You plan trips.
  <module name="plan">
    Plan a trip of <param name="duration" len="9"/> in total, please.
    <union>
      <module name="rome">Rome is old, and full of <param name="sights" len="12"/> to see.</module>
      <module name="oslo">Oslo is in the north.</module>
    </union>
    Be brief.
  </module>
  Use short words.
  <module name="style" cache="false">Write in the style of a sailor.</module>
  <module name="budget">There is little money to spend.</module>
  And answer now, with care.
</schema>"""


class TestPositions:
    def test_document_order_unions_and_parameters(self, make_engine: MakeEngine) -> None:
        layout = make_engine().load_schema(TRIP)
        modules = layout.modules
        plan, rome, oslo = modules["plan"], modules["plan/rome"], modules["plan/oslo"]
        opening = int((modules[ROOT].position_ids < plan.start).sum())
        assert plan.start == opening
        assert rome.start == oslo.start, "members of a union share a start"
        duration = plan.slots[0]
        behind_slot = plan.position_ids[plan.position_ids >= duration.start]
        assert behind_slot[0] == duration.start + 9, "a parameter takes its length"
        be_brief = plan.position_ids[plan.position_ids >= rome.start]
        assert be_brief[0] == rome.start + max(rome.length, oslo.length), "a union takes the longest"
        assert modules["style"].start > plan.start + plan.length
        assert modules["budget"].start >= modules["style"].start + modules["style"].length

    def test_lengths_50_and_60_put_the_next_at_110(self, make_engine: MakeEngine) -> None:
        schema = f"""<schema name="s"><module name="a">{"?" * 50}</module><module name="b">{"?" * 60}</module>
        <module name="c">x</module></schema>"""
        modules = make_engine().load_schema(schema).modules
        assert (modules["a"].length, modules["b"].length) == (50, 60)
        assert modules["c"].start == 110

    @pytest.mark.parametrize("tail", ["imported", "schema"])
    def test_free_text_starts_behind_the_last_cell_or_the_schema(self, make_engine: MakeEngine, tail: str) -> None:
        engine = make_engine(tail=tail)
        layout = engine.load_schema(
            '<schema name="s"><module name="a">one two</module><module name="b">three four</module></schema>'
        )
        prompt = laid_out(engine, '<prompt schema="s"><a/>five</prompt>')
        assert prompt.position_ids[0] == (layout.modules["a"].length if tail == "imported" else layout.length)


PROMPTS = {
    "nothing imported": '<prompt schema="trip">Hello there</prompt>',
    "no text of its own": '<prompt schema="trip"><budget/></prompt>',
    "one module after a gap": '<prompt schema="trip"><budget/>Where to?</prompt>',
    "argument in mid-module": '<prompt schema="trip"><plan duration="3 days"/>Where to?</prompt>',
    "nested, two arguments": '<prompt schema="trip"><plan duration="ten"><rome sights="art"/></plan>Where?</prompt>',
    "shorter union member": '<prompt schema="trip"><plan duration="2"><oslo/></plan><budget/>Where?</prompt>',
    "cache=false": '<prompt schema="trip"><style/><budget/>Where?</prompt>',
    "everything": '<prompt schema="trip"><plan duration="1"><rome sights="a b"/></plan><style/><budget/>Go</prompt>',
}


class TestGuaranteedContext:
    @pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
    def test_logits(self, make_engine: MakeEngine, reference: Reference, prompt: str) -> None:
        engine = make_engine()
        layout = engine.load_schema(TRIP)
        check(engine, reference, prompt, guaranteed(layout))

    @pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
    def test_neutral_text_is_seen_by_its_module_only(
        self, make_engine: MakeEngine, reference: Reference, prompt: str
    ) -> None:
        engine = make_engine(encoding="neutral")
        engine.load_schema(TRIP)
        close(engine, prompt, served_logits(reference, laid_out(engine, prompt), at_least=at_least(engine)))

    @pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
    def test_gaps_are_closed_by_default(self, make_engine: MakeEngine, reference: Reference, prompt: str) -> None:
        engine = make_engine(encoding="neutral", tail=None)
        engine.load_schema(TRIP)
        packed = laid_out(engine, prompt)
        assert packed.computed_plan().position_ids.tolist() == list(range(packed.tokens))
        close(engine, prompt, served_logits(reference, packed, at_least=at_least(engine)))

    def test_isolated_keeps_the_papers_rule(self, make_engine: MakeEngine, reference: Reference) -> None:
        engine = make_engine(encoding="isolated")
        engine.load_schema(TRIP)
        for prompt in (PROMPTS["everything"], PROMPTS["one module after a gap"]):
            check(engine, reference, prompt, isolated)

    def test_the_rules_give_different_logits(self, make_engine: MakeEngine, reference: Reference) -> None:
        """Otherwise the two tests above could not tell them apart."""
        engine = make_engine()
        layout = engine.load_schema(TRIP)
        prompt = laid_out(engine, PROMPTS["everything"])
        ours = expected_logits(reference, prompt, guaranteed(layout))
        theirs = expected_logits(reference, prompt, isolated)
        assert np.abs(ours - theirs).max() > 3 * max(TOLERANCE.values())

    def test_importing_one_module_after_another_changes_nothing(
        self, make_engine: MakeEngine, reference: Reference
    ) -> None:
        """The authors' code gives wrong rows to the third of these prompts."""
        engine = make_engine()
        layout = engine.load_schema(
            "<schema name='s'><module name='a'>alpha one</module><module name='b'>beta two</module>"
            "<module name='c'>gamma three</module><module name='d'>delta four</module></schema>"
        )
        for imports in ("<a/>", "<a/>", "<a/>", "<a/><d/>", "<d/>", "<b/><d/>", "<c/>", "<d/>"):
            check(engine, reference, f"<prompt schema='s'>{imports}Go on</prompt>", guaranteed(layout))


SCAFFOLD = """<schema name="s">Read. <scaffold name="pair"><module name="a">The cat is in the house.</module>
and <module name="b">The house is in the wood.</module></scaffold> Then
<module name="c">Nobody is in the wood.</module> answer this, in your own words:</schema>"""


class TestScaffolds:
    def test_all_members_see_one_another(self, make_engine: MakeEngine, reference: Reference) -> None:
        engine = make_engine()
        sees = jointly(guaranteed(engine.load_schema(SCAFFOLD)), ROOT, "a", "b")
        check(engine, reference, '<prompt schema="s"><a/><b/><c/>Who?</prompt>', sees)

    def test_some_members_do_not(self, make_engine: MakeEngine, reference: Reference) -> None:
        engine = make_engine()
        layout = engine.load_schema(SCAFFOLD)
        check(engine, reference, '<prompt schema="s"><b/><c/>Who?</prompt>', guaranteed(layout))

    def test_joint_states_are_stored_beside_the_single_ones(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.encode(SCAFFOLD)
        for prompt in ("<a/><b/>", "<a/>", "<b/>", "<c/>"):
            engine.generate(f'<prompt schema="s">{prompt}Who?</prompt>', Sampling(max_tokens=1), Serving(strict=True))

    def test_two_scaffolds_at_once(self, make_engine: MakeEngine, reference: Reference) -> None:
        engine = make_engine()
        layout = engine.load_schema(
            '<schema name="s"><scaffold name="x"><module name="a">one</module><module name="b">two</module></scaffold>'
            '<scaffold name="y"><module name="c">three</module><module name="d">four</module></scaffold></schema>'
        )
        sees = jointly(guaranteed(layout), "a", "b", "c", "d")
        check(engine, reference, '<prompt schema="s"><a/><b/><c/><d/>Go</prompt>', sees)


class TestPlaceholders:
    SCHEMA = """<schema name="s">Hi. <module name="a">I have <param name="n" len="9">two</param> cats,
    really.</module> <module name="b">And a dog.</module></schema>"""

    @pytest.mark.parametrize("placeholder", ["nothing", "unk", "default"])
    def test_what_stands_in_the_slot_is_seen_by_its_module_only(
        self, make_engine: MakeEngine, reference: Reference, placeholder: str
    ) -> None:
        engine = make_engine(placeholder=placeholder)
        layout = engine.load_schema(self.SCHEMA)
        slot = layout.modules["a"].slots[0]
        token_ids: dict[str, tuple[int, ...]] = {
            "nothing": (),
            "unk": (0,) * slot.length,
            "default": tuple(engine.tokenizer.encode(" two")),
        }
        cells = [(slot.start + i, token) for i, token in enumerate(token_ids[placeholder])]
        prompt = '<prompt schema="s"><a n="three"/><b/>Well?</prompt>'
        check(engine, reference, prompt, guaranteed(layout), placeholders={"a": cells})

    def test_a_default_text_is_used_and_its_tokens_are_computed(
        self, make_engine: MakeEngine, reference: Reference
    ) -> None:
        engine = make_engine()
        layout = engine.load_schema(self.SCHEMA)
        omitted, given = (f'<prompt schema="s"><a{n}/>Well?</prompt>' for n in ("", ' n="two"'))
        assert laid_out(engine, omitted).token_ids.tolist() == laid_out(engine, given).token_ids.tolist()
        check(engine, reference, omitted, guaranteed(layout))


AROUND = {
    "alone": ("", ""),
    "text before": ("You are a poet. ", ""),
    "text after": ("", " Now answer all that I ask of you."),
    "text around": ("You are a poet. ", " Now answer all that I ask of you."),
}


class TestExactness:
    """Exact mode equals full prefill bit for bit where the same tokens see the same cells."""

    ONE = '<schema name="s">{before}<module name="a">The cat is in the house, and the dog.</module>{after}</schema>'

    @pytest.mark.parametrize("texts", AROUND.values(), ids=AROUND.keys())
    @pytest.mark.parametrize("exact", [True, False])
    def test_one_module(self, make_engine: MakeEngine, texts: tuple[str, str], exact: bool) -> None:
        engine = make_engine()
        engine.load_schema(self.ONE.format(before=texts[0], after=texts[1]))
        for free_text in ("", "Who is it?", "x"):
            compared = engine.compare(
                f'<prompt schema="s"><a/>{free_text}</prompt>', Serving(fidelity="full" if exact else "fast")
            )
            assert compared.max_abs_logit_diff == 0.0, "one module is a single span, exact in either mode"

    def test_one_module_in_a_chat(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.load_schema(
            '<schema name="s"><system>You are a poet.</system><user>Read this: <module name="a">A cat.</module></user>'
            "<assistant>I have read it, and I am ready.</assistant></schema>"
        )
        compared = engine.compare('<prompt schema="s"><a/><user>Who?</user></prompt>', Serving(fidelity="full"))
        assert compared.max_abs_logit_diff == 0.0

    def test_a_scaffold_with_all_its_modules(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.load_schema(
            '<schema name="s">Read. <scaffold name="x"><module name="a">A cat.</module> then <module name="b">A dog.'
            "</module></scaffold> And now answer all that I ask of you.</schema>"
        )
        compared = engine.compare('<prompt schema="s"><a/><b/>Who?</prompt>', Serving(fidelity="full"))
        assert compared.max_abs_logit_diff == 0.0

    @pytest.mark.parametrize("words", [1, 2, 126, 127, 128, 129, 130, 256, 257, 500])
    def test_at_every_length(self, make_engine: MakeEngine, words: int) -> None:
        """A row alone in a tile of the kernel has other last bits; no run may be cut so."""
        engine = make_engine()
        engine.load_schema(f'<schema name="s"><module name="a">{"?" * words}</module></schema>')
        for free_text in ("?", "?" * 127, "?" * 129):
            compared = engine.compare(f'<prompt schema="s"><a/>{free_text}</prompt>', Serving(fidelity="full"))
            assert compared.max_abs_logit_diff == 0.0

    def test_encoded_parts_of_one_text_are_exact(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        """A long file is cut into modules nested in one another."""
        engine = make_engine()
        file = tmp_path / "long.txt"
        file.write_text("\n\n".join(f"The cat of house {n}." for n in range(40)))
        compared = engine.compare_ask("Who?", [file], Serving(fidelity="full"))
        assert compared.max_abs_logit_diff == 0.0


class TestLimits:
    def test_tiny_modules(self, make_engine: MakeEngine, reference: Reference) -> None:
        engine = make_engine()
        layout = engine.load_schema(
            '<schema name="s"><module name="a">!</module><module name="b">xy</module>'
            '<module name="c">???</module></schema>'
        )
        check(engine, reference, '<prompt schema="s"><a/><b/><c/>x</prompt>', guaranteed(layout))
        check(engine, reference, '<prompt schema="s"><a/></prompt>', guaranteed(layout))

    def test_exactly_the_limit_is_allowed(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.load_schema(f'<schema name="s"><module name="a">{"?" * 900}</module></schema>')
        room = engine.spec.max_positions - laid_out(engine, '<prompt schema="s"><a/>?</prompt>').end
        prompt = '<prompt schema="s"><a/>?</prompt>'
        result = engine.generate(prompt, Sampling(max_tokens=room))
        assert result.stats.prompt_tokens == 901
        from edge_pc import ContextLengthError

        with pytest.raises(ContextLengthError, match="take 1025 tokens, and the model has room for 1024"):
            engine.generate(prompt, Sampling(max_tokens=room + 1))


def test_the_vocabulary_has_what_these_tests_count_on() -> None:
    tokens, _ = tiny.vocabulary()
    assert {"!", "?", "x", "y"} <= set(tokens)
