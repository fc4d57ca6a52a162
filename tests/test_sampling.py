"""The choice of the next token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from edge_pc import OptionError, Sampling
from edge_pc.runtime.answer import _held_back
from edge_pc.runtime.compare import kl_divergence
from edge_pc.runtime.sampling import Sampler

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
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"stop": "text"},
        {"stop": ("",)},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(OptionError, match=name):
        Sampling(**wrong)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert _held_back("all is we", ("well", "end")) == 2
    assert _held_back("all is e", ("well", "end")) == 1
    assert _held_back("all is", ("well", "end")) == 0


def test_kl_of_known_distributions() -> None:
    uniform = np.zeros(2, dtype=np.float32)
    skewed = np.log(np.array([0.9, 0.1], dtype=np.float32))
    assert kl_divergence(uniform, uniform) == 0
    assert kl_divergence(uniform, skewed) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), abs=1e-6)
