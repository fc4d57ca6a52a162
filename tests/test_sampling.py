"""The choice of the next token."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from edge_pc import OptionError, Sampling
from edge_pc.runtime.answer import _held_back
from edge_pc.runtime.compare import kl_divergence
from edge_pc.runtime.sampler import Sampler

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))


def drawn(logits: Any = LOGITS, prompt: tuple[int, ...] = (), **options: Any) -> Counter[int]:
    sampler = Sampler(Sampling(temperature=options.pop("temperature", 1.0), seed=1, **options), prompt)
    return Counter(sampler.choose(logits) for _ in range(4000))


def test_greedy_takes_the_likeliest() -> None:
    assert drawn(temperature=0.0) == {0: 4000}


def test_probabilities_are_the_models() -> None:
    counts = drawn()
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_temperature_flattens() -> None:
    counts = drawn(temperature=2.0)
    roots = np.sqrt([0.5, 0.25, 0.15, 0.1])
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx((roots / roots.sum()).tolist(), abs=0.03)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_cuts(options: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(**options)) == kept


def test_a_seed_repeats() -> None:
    assert drawn(top_p=0.9) == drawn(top_p=0.9)


def test_repetition_penalty_covers_the_prompt_and_the_answer() -> None:
    logits = np.array([2.0, 1.9, -1.0, 0.0], dtype=np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.5), [0, 2])
    assert sampler.choose(logits) == 1, "token 0 of the prompt is penalized: 2 / 1.5 < 1.9"
    assert sampler.choose(logits) == 0, "now 1 is, too: 1.9 / 1.5 < 2 / 1.5"
    assert logits.tolist() == pytest.approx([2.0, 1.9, -1.0, 0.0]), "the caller's logits stay as they are"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 0, "a whole number of at least 1"),
        ("max_tokens", "5", "a whole number of at least 1"),
        ("max_tokens", 2.5, "a whole number of at least 1"),
        ("max_tokens", True, "a whole number of at least 1"),
        ("temperature", -0.1, "a number from 0 to 1000"),
        ("temperature", float("nan"), "a number from 0 to 1000"),
        ("temperature", 10**400, "a number from 0 to 1000"),
        ("temperature", None, "a number from 0 to 1000"),
        ("temperature", "warm", "a number from 0 to 1000"),
        ("top_k", -1, "a whole number of at least 0"),
        ("top_k", 1.0, "a whole number of at least 0"),
        ("top_p", 0.0, "a number above 0 and at most 1"),
        ("top_p", 1.1, "a number above 0 and at most 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", float("nan"), "a number from 0 to 1"),
        ("repetition_penalty", 1e-320, "a number from 0.001 to 1000"),
        ("repetition_penalty", float("inf"), "a number from 0.001 to 1000"),
        ("seed", -1, "a whole number of at least 0"),
        ("seed", False, "a whole number of at least 0"),
        ("stop", "", "a text or a list of texts, none of them empty"),
        ("stop", ("end", ""), "a text or a list of texts, none of them empty"),
        ("stop", ("end", 5), "a text or a list of texts, none of them empty"),
        ("stop", 5, "a text or a list of texts, none of them empty"),
        ("stop", None, "a text or a list of texts, none of them empty"),
    ],
)
def test_a_wrong_value_says_what_was_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Sampling(**{name: value})
    assert caught.value.message == f"{name} is {value!r}, expected {expected}"


def test_one_stop_string_is_not_its_characters() -> None:
    assert Sampling(stop="end").stops == ("end",)
    assert Sampling(stop=["a", "b"]).stops == ("a", "b")
    assert Sampling().stops == ()


def test_only_a_default_length_shrinks_to_what_fits() -> None:
    assert [Sampling().answer_room(free) for free in (1000, 256, 12, 1, 0, -5)] == [256, 256, 12, 1, 1, 1]
    assert Sampling(max_tokens=300).answer_room(12) == 300


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-30])
def test_a_temperature_next_to_0_takes_the_likeliest(temperature: float) -> None:
    logits = np.array([3.0, -3e4, 3.001, 3e-4], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawn(logits, temperature=temperature) == {2: 4000}


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert _held_back("all is we", ("well", "end")) == 2
    assert _held_back("all is e", ("well", "end")) == 1
    assert _held_back("all is", ("well", "end")) == 0


def test_kl_of_known_distributions() -> None:
    uniform = np.zeros(2, dtype=np.float32)
    skewed = np.log(np.array([0.9, 0.1], dtype=np.float32))
    assert kl_divergence(uniform, uniform) == 0
    assert kl_divergence(uniform, skewed) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), abs=1e-6)
