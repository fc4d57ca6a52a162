"""Answers of a given form, and how likely their tokens were."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc import Engine, Grammar, MissingDependencyError, OptionError, Sampling
from edge_pc.cli import main
from edge_pc.runtime.sampler import log_probabilities

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PML = '<schema name="s"><user><module name="m">Some text to start from.</module></user></schema>'
PROMPT = '<prompt schema="s"><m/><user>Who?</user></prompt>'


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tiny_model, cache_dir=tmp_path_factory.mktemp("states")) as engine:
        engine.load_schema(PML)
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_an_answer_fits_its_json_schema(engine: Engine, temperature: float) -> None:
    grammar = Grammar.json(SCHEMA)
    for seed in range(5):
        result = engine.generate(PROMPT, Sampling(temperature=temperature, seed=seed, grammar=grammar))
        value = json.loads(result.text)
        assert value["name"] in ("ada", "bob")
        assert value["age"] in range(10)
        assert result.stop == "eos"


def test_other_grammars(engine: Engine) -> None:
    assert engine.generate(PROMPT, Sampling(grammar=Grammar.regex("(yes|no)!"))).text in ("yes!", "no!")
    rules = 'start: "a" b "c"\nb: /[0-9]{2}/'
    text = engine.generate(PROMPT, Sampling(grammar=Grammar.lark(rules))).text
    assert text[0] == "a"
    assert text[1:3].isdigit()
    assert text[3:] == "c"
    anything = engine.generate(PROMPT, Sampling(max_tokens=30, grammar=Grammar.json()))
    assert anything.text.startswith("{")


def test_a_grammar_goes_with_stops_and_penalties(engine: Engine) -> None:
    sampling = Sampling(
        temperature=1.0, seed=3, repetition_penalty=1.3, top_k=2, stop=",", grammar=Grammar.json(SCHEMA)
    )
    result = engine.generate(PROMPT, sampling)
    assert result.text in ('{"name": "ada"', '{"name": "bob"')
    assert result.stop == "stop"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json({"type": "nonsense"}), "the JSON Schema cannot be used: Invalid type: nonsense"),
        (Grammar.regex("("), "the regular expression cannot be used:"),
        (Grammar.lark("start: missing"), "the grammar cannot be used:"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_before_any_work(engine: Engine, grammar: Grammar, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        engine.stream(PROMPT, Sampling(grammar=grammar))
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("schema", "said"), [("{", "is not JSON"), ("[1]", "is [1]"), ({"a": object()}, "is not JSON")]
)
def test_what_is_no_json_object_is_no_json_schema(schema: Any, said: str) -> None:
    with pytest.raises(OptionError, match="the JSON Schema") as caught:
        Grammar.json(schema)
    assert said in caught.value.message
    with pytest.raises(OptionError, match="expected a Grammar"):
        Sampling(grammar=schema)


def test_without_llguidance_the_extra_is_named(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        engine.load_schema(PML)
        with pytest.raises(MissingDependencyError) as caught:
            engine.generate(PROMPT, Sampling(grammar=Grammar.json()))
    assert caught.value.hint == 'pip install "edge-prompt-cache[serve]"'


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    result = engine.generate(PROMPT, Sampling(max_tokens=6, logprobs=3))
    assert [each.token_id for each in result.logprobs] == list(result.token_ids)
    for each in result.logprobs:
        assert each.top[0] == (each.token_id, each.logprob), "greedy takes the likeliest"
        assert [p for _, p in each.top] == sorted((p for _, p in each.top), reverse=True)
        assert 0 < sum(np.exp([p for _, p in each.top])) <= 1
    warm = engine.generate(PROMPT, Sampling(max_tokens=6, logprobs=0, temperature=1.5, seed=2))
    assert len(warm.logprobs) == len(warm.token_ids)
    assert warm.logprobs[0].top == ()
    assert engine.generate(PROMPT, Sampling(max_tokens=6)).logprobs == ()


def test_log_probabilities_of_known_logits() -> None:
    logits = np.log(np.array([0.5, 0.125, 0.25, 0.125], dtype=np.float32)) + 7
    found = log_probabilities(logits, 1, 2)
    assert found.logprob == pytest.approx(np.log(0.125), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 2]
    assert [np.exp(p) for _, p in found.top] == pytest.approx([0.5, 0.25], abs=1e-6)
    assert len(log_probabilities(logits, 1, 100).top) == 4


def test_bytes_of_tokens_make_up_the_text(engine: Engine) -> None:
    text = "naïve 漢字 🙂 the end\n"
    ids = engine.tokenizer.encode(text)
    assert b"".join(engine.tokenizer.bytes_of(id_) for id_ in ids).decode() == text
    assert engine.tokenizer.bytes_of(1) == b"<|im_start|>"
    assert engine.tokenizer.bytes_of(10**6) == b""


def test_the_command_line_takes_a_json_schema(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.xml").write_text(PML)
    (tmp_path / "p.xml").write_text(PROMPT)
    (tmp_path / "shape.json").write_text(json.dumps(SCHEMA))
    command = ["run", str(tmp_path / "p.xml"), "--model", str(tiny_model), "--json-schema"]
    assert main([*command, str(tmp_path / "shape.json")]) == 0
    assert json.loads(capsys.readouterr().out)["name"] in ("ada", "bob")
    assert main([*command, str(tmp_path / "shape.json"), "--json", "--logprobs", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["token_id"] for each in printed["logprobs"]] == printed["token_ids"]
    assert [len(each["top"]) for each in printed["logprobs"]] == [2] * len(printed["token_ids"])
    (tmp_path / "shape.json").write_text("no")
    assert main([*command, str(tmp_path / "shape.json")]) == 2
    assert "the JSON Schema is not JSON" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "missing.json")]) == 2
    assert "the file cannot be read" in capsys.readouterr().err
