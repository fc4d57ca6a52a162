"""Chooses the next token from logits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import Logits
from edge_pc.runtime.constraint import Constraint
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.stats import TokenLogprobs


class Sampler:
    """Chooses tokens for one answer.

    Args:
        sampling: how.
        prompt_ids: every token of the prompt, for the repetition penalty.
        constraint: what tokens a grammar allows; None: all.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int], constraint: Constraint | None = None) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._constraint = constraint
        self._seen = set(prompt_ids) if sampling.repetition_penalty != 1 else set()

    def choose(self, logits: Logits) -> int:
        """The next token, from logits float32 `[vocab]`."""
        if self._constraint is not None:
            logits = self._constraint.mask(logits)
        if self._sampling.repetition_penalty != 1:
            logits = self._penalized(logits)
        token = int(np.argmax(logits)) if self._sampling.temperature == 0 else self._draw(logits)
        if self._constraint is not None:
            self._constraint.take(token)
        self._seen.add(token)
        return token

    def _penalized(self, logits: Logits) -> Logits:
        seen = np.fromiter(self._seen, dtype=np.int64)
        logits = logits.copy()
        values = logits[seen]
        penalty = np.float32(self._sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        return logits

    def _draw(self, logits: Logits) -> int:
        sampling = self._sampling
        order = np.argsort(-logits, kind="stable")
        if sampling.top_k:
            order = order[: sampling.top_k]
        chosen = logits[order].astype(np.float64)
        with np.errstate(over="ignore"):  # at a temperature next to 0 all but the likeliest become minus infinity
            probabilities = softmax((chosen - chosen[0]) / sampling.temperature)
        # The likeliest token always stays; a token stays if what is likelier does not reach top_p yet.
        before = np.cumsum(probabilities) - probabilities
        kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
        kept[0] = True
        probabilities = probabilities[kept] / probabilities[kept].sum()
        return int(order[kept][self._random.choice(len(probabilities), p=probabilities)])


def log_probabilities(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """How likely `token` was, and the `count` likeliest tokens, from logits float32 `[vocab]`."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    count = min(count, len(values))
    likeliest = np.argpartition(-values, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
    likeliest = likeliest[np.argsort(-values[likeliest], kind="stable")]
    return TokenLogprobs(token, float(values[token]), tuple((int(each), float(values[each])) for each in likeliest))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities `[n]` of logits `[n]`."""
    exponentials: NDArray[np.float64] = np.exp(logits - logits.max())
    total: NDArray[np.float64] = exponentials / exponentials.sum()
    return total
