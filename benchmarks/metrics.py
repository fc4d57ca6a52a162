"""How right an answer is, counted as LongBench counts it (Bai et al., arXiv 2308.14508; its `metrics.py`).

Every metric takes an answer and one right answer and gives a number from 0 to 1; with several right answers the best
counts. LongBench's quirks are kept, so that numbers can be set beside published ones.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

Metric = Callable[[str, str], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall over the words of the normalized texts, repeated words counted."""
    words, right_words = normalize(answer).split(), normalize(right).split()
    common = sum((Counter(words) & Counter(right_words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(right_words)
    return 2 * precision * recall / (precision + recall)


def substring(answer: str, right: str) -> float:
    """Whether the normalized right answer stands in the normalized answer."""
    wanted = normalize(right)
    return float(bool(wanted) and wanted in normalize(answer))


def rouge_l(answer: str, right: str) -> float:
    """Rouge-L over the sentences of both texts (summary level, Lin 2004), as the package `rouge` counts it.

    Sentences end at a full stop. The longest common subsequences of each right sentence with all sentences of the
    answer are united; words count once however often they occur. Case and punctuation matter.
    """
    sentences, right_sentences = _sentences(answer), _sentences(right)
    words = {word for sentence in sentences for word in sentence}
    right_words = {word for sentence in right_sentences for word in sentence}
    if not words or not right_words:
        return 0.0
    common: set[str] = set()
    for wanted in right_sentences:
        for sentence in sentences:
            common.update(longest_common_subsequence(wanted, sentence))
    precision, recall = len(common) / len(words), len(common) / len(right_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def retrieval(answer: str, right: str) -> float:
    """The share of the numbers in the answer that are the right passage's, whose name is `Paragraph N`."""
    wanted = _NUMBER.search(right)
    numbers = _NUMBER.findall(answer)
    if wanted is None or not numbers:
        return 0.0
    return numbers.count(wanted[0]) / len(numbers)


METRICS: dict[str, Metric] = {"f1": f1, "rouge_l": rouge_l, "substring": substring, "retrieval": retrieval}


def best(metric: Metric, answer: str, right_answers: Sequence[str]) -> float:
    """The metric against the right answer that fits best."""
    return max((metric(answer, right) for right in right_answers), default=0.0)


def edit_similarity(left: Sequence[int], right: Sequence[int]) -> float:
    """How much two token sequences agree: twice their matching tokens over all their tokens, from 0 to 1."""
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences share before the first that differs."""
    differing = (index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(left), len(right)))


def longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """The longest sequence of words that stand in both, in this order, others between them."""
    lengths = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, word in enumerate(left, start=1):
        for j, other in enumerate(right, start=1):
            above, before = lengths[i - 1][j], lengths[i][j - 1]
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if word == other else max(above, before)
    words = []
    i, j = len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            words.append(left[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words[::-1]


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; white space after the last full stop is a sentence of one empty word, as there."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
