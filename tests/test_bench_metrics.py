"""Scores of answers against values worked out separately or by LongBench's own code, and how sure differences are."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.metrics import (
    best,
    common_prefix,
    edit_similarity,
    f1,
    longest_common_subsequence,
    normalize,
    retrieval,
    rouge_l,
    substring,
)
from benchmarks.statistics import mean_interval, paired_test


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat, sat!", "cat sat"),
        ("An  apple\na\tday", "apple day"),
        ("theatre and an-other", "theatre and another"),
        ("U.S.A.", "usa"),
        ("the", ""),
        ("Zürich’s", "zürich’s"),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("Mary Chapin Carpenter", "mary chapin carpenter.", 1.0),
        ("It was Mary Carpenter", "Mary Chapin Carpenter", 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ("yes yes yes", "yes", 0.5),  # repeated words count: precision 1/3, recall 1
        ("yes yes", "yes yes no", 0.8),
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
    ],
)
def test_f1(answer: str, right: str, score: float) -> None:
    assert f1(answer, right) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("It happened in March 1930, they say.", "march 1930", 1.0),
        ("in March of 1930", "March 1930", 0.0),
        ("1930", "March 1930", 0.0),
        ("anything", "the", 0.0),
    ],
)
def test_substring(answer: str, right: str, score: float) -> None:
    assert substring(answer, right) == score


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        # These four were computed by the package that LongBench uses (rouge 1.0.1).
        ("The cat sat on the mat.", "A cat was on the mat.", 0.6666666616666668),
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 0.6153846108506877),
        ("police kill the gunman", "the gunman kill police", 0.4999999950000001),
        ("a b. ", "a b", 0.7999999952000001),
        ("same words here", "same words here", 1.0),
        ("Same", "same", 0.0),
        ("", "right", 0.0),
        ("...", "right", 0.0),
    ],
)
def test_rouge_l(answer: str, right: str, score: float) -> None:
    assert rouge_l(answer, right) == pytest.approx(score, abs=1e-8)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("Paragraph 12", 1.0), ("12 or 3", 0.5), ("Paragraph 1", 0.0), ("the twelfth", 0.0), ("112", 0.0)],
)
def test_retrieval_counts_the_numbers_of_an_answer(answer: str, score: float) -> None:
    assert retrieval(answer, "Paragraph 12") == score


def test_the_best_of_several_right_answers_counts() -> None:
    assert best(f1, "two", ["twice", "two", "both"]) == 1.0
    assert best(f1, "two", ["twice"]) == 0.0


def test_longest_common_subsequence_keeps_order() -> None:
    assert longest_common_subsequence(list("abcde"), list("xbace")) in (list("bce"), list("ace"))
    assert longest_common_subsequence([], ["a"]) == []


def test_agreement_of_token_sequences() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 3)) == 2
    assert common_prefix((), (1,)) == 0
    assert edit_similarity((1, 2, 3), (1, 2, 3)) == 1.0
    assert edit_similarity((1, 2, 3, 4), (2, 3, 4, 5)) == pytest.approx(6 / 8)
    assert edit_similarity((), ()) == 1.0
    assert edit_similarity((1,), (2,)) == 0.0


def test_an_interval_is_reproducible_holds_the_mean_and_shrinks_with_more_values() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.normal(5, 1, 20).tolist(), rng.normal(5, 1, 500).tolist()
    narrow, wide = mean_interval(many), mean_interval(few)
    assert mean_interval(few) == wide
    assert wide.low < wide.mean < wide.high
    assert wide.mean == pytest.approx(np.mean(few))
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    # The textbook's interval, mean ± 1.96 standard errors.
    assert narrow.low == pytest.approx(np.mean(many) - 1.96 * np.std(many) / np.sqrt(500), abs=0.01)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    intervals = [mean_interval(rng.random(60).tolist()) for _ in range(60)]
    covered = sum(interval.low <= 0.5 <= interval.high for interval in intervals)
    assert 50 <= covered <= 60


def test_paired_test_of_equal_scores_finds_nothing() -> None:
    test = paired_test([0, 1, 1], [0, 1, 1])
    assert (test.difference.mean, test.difference.low, test.difference.high) == (0, 0, 0)
    assert test.p_value == 1
    assert (test.better, test.worse) == (0, 0)


def test_few_differences_are_tested_exactly() -> None:
    # All five better: of 32 sign assignments two are as extreme; the item without a difference does not count.
    test = paired_test([0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1])
    assert test.p_value == pytest.approx(2 / 32)
    assert (test.better, test.worse) == (5, 0)
    # One better, one worse: nothing is less extreme.
    assert paired_test([0, 1], [1, 0]).p_value == 1
    # A single difference is as large with the other sign.
    assert paired_test([0, 1], [1, 1]).p_value == 1


def test_many_differences_are_tested_at_random_but_always_alike() -> None:
    rng = np.random.default_rng(2)
    first = rng.random(100)
    shifted = (first + 0.2 + 0.05 * rng.standard_normal(100)).tolist()
    mixed = (first + 0.05 * rng.standard_normal(100)).tolist()
    assert paired_test(first.tolist(), shifted).p_value < 0.001
    assert paired_test(first.tolist(), mixed).p_value > 0.05
    assert paired_test(first.tolist(), mixed) == paired_test(first.tolist(), mixed)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="2 values against 1"):
        paired_test([1, 2], [1])
