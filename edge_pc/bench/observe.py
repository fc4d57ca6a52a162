"""One prompt continued in full and with reused states, and how much the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edge_pc.bench.lab import Continuation, Lab, Ready, log_probability
from edge_pc.bench.metrics import common_prefix, edit_similarity
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.compare import kl_divergence


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One way to continue a prompt.

    Attributes:
        answer: the greedy one.
        gold_nats: log-likelihood of the right answer per token, in nats; None where it has no token.
    """

    answer: Continuation
    gold_nats: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Reuse against full prefill of the same tokens.

    Attributes:
        kl: Kullback-Leibler divergence of the first token's distribution from the full one, in nats.
        same_first_token: both have the same likeliest first token.
        gold_full, gold_cached: log-likelihood of the right answer per token, in nats.
        same_tokens: tokens of the greedy answers before the first that differs.
        answer_tokens: tokens of the full one.
        edit_similarity: of the two greedy answers, 1 when they are the same.
    """

    kl: float
    same_first_token: bool
    gold_full: float | None
    gold_cached: float | None
    same_tokens: int
    answer_tokens: int
    edit_similarity: float

    def as_row(self) -> dict[str, Any]:
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(self).items()}


def observe(lab: Lab, ready: Ready, gold: Sequence[int], max_tokens: int) -> Observation:
    """Continue a prompt greedily, and measure the likelihood of the right answer's tokens `gold`."""
    answer = lab.greedy(ready, max_tokens)
    likelihoods = lab.log_likelihoods(ready, gold) if gold else []
    return Observation(answer, float(np.mean(likelihoods)) if likelihoods else None)


def agreement(full: Observation, cached: Observation) -> Agreement:
    """How much two ways to continue the same prompt agree."""
    answers = full.answer.token_ids, cached.answer.token_ids
    first_full, first_cached = full.answer.logits[0], cached.answer.logits[0]
    return Agreement(
        kl=kl_divergence(first_full, first_cached),
        same_first_token=int(np.argmax(first_full)) == int(np.argmax(first_cached)),
        gold_full=full.gold_nats,
        gold_cached=cached.gold_nats,
        same_tokens=common_prefix(*answers),
        answer_tokens=len(answers[0]),
        edit_similarity=edit_similarity(*answers),
    )


def parting(full: Continuation, cached: Continuation, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Where two greedy answers part, and how sure each way was of its own token there; None: they are the same.

    A full prefill that was nearly undecided there (its two probabilities are close) explains a difference by chance; a
    sure one shows that reuse has lost something.
    """
    index = common_prefix(full.token_ids, cached.token_ids)
    if index == len(full.token_ids) == len(cached.token_ids):
        return None
    chosen, other = (int(np.argmax(way.logits[index])) for way in (full, cached))

    def probability(way: Continuation, token: int) -> float:
        return round(float(np.exp(log_probability(way.logits[index], token))), 4)

    return {
        "token": index,
        "full_chose": tokenizer.decode([chosen]),
        "cached_chose": tokenizer.decode([other]),
        "full_probabilities": [probability(full, chosen), probability(full, other)],
        "cached_probabilities": [probability(cached, chosen), probability(cached, other)],
    }
