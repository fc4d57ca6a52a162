"""One prompt continued in full and with reused states, and how much the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lab import Continuation, Lab, Ready, log_probability
from benchmarks.metrics import common_prefix, edit_similarity
from benchmarks.rows import Agreement, Parting
from edge_pc.backends.base import Logits
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.compare import kl_divergence


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One way to continue a prompt.

    Attributes:
        answer: the greedy one.
        gold_nats: log-likelihood of the right answer per token, in nats; None where it has no token.
        following: logits for each token of another answer, where there is one to follow.
    """

    answer: Continuation
    gold_nats: float | None
    following: tuple[Logits, ...] = ()


def observe(
    lab: Lab, ready: Ready, gold: Sequence[int], max_tokens: int, follow: Observation | None = None
) -> Observation:
    """Continue a prompt greedily, and measure the likelihood of the right answer's tokens `gold`.

    Args:
        follow: whose answer is followed, too.
    """
    answer = lab.greedy(ready, max_tokens)
    likelihoods = lab.log_likelihoods(ready, gold) if gold else []
    following = tuple(lab.following(ready, follow.answer.token_ids)) if follow else ()
    return Observation(answer, float(np.mean(likelihoods)) if likelihoods else None, following)


def agreement(full: Observation, cached: Observation) -> Agreement:
    """How much two ways to continue the same prompt agree."""
    answers = full.answer.token_ids, cached.answer.token_ids
    first_full, first_cached = full.answer.logits[0], cached.answer.logits[0]
    pairs = list(zip(full.answer.logits, cached.following, strict=False))
    return Agreement(
        answer_kl=round(float(np.mean([kl_divergence(*pair) for pair in pairs])), 5) if pairs else None,
        same_tops=round(float(np.mean([np.argmax(a) == np.argmax(b) for a, b in pairs])), 5) if pairs else None,
        kl=round(kl_divergence(first_full, first_cached), 5),
        same_first_token=int(np.argmax(first_full)) == int(np.argmax(first_cached)),
        gold_full=None if full.gold_nats is None else round(full.gold_nats, 5),
        gold_cached=None if cached.gold_nats is None else round(cached.gold_nats, 5),
        same_tokens=common_prefix(*answers),
        answer_tokens=len(answers[0]),
        edit_similarity=round(edit_similarity(*answers), 5),
    )


def parting(full: Continuation, cached: Continuation, tokenizer: Tokenizer) -> Parting | None:
    """Where two greedy answers part, and how sure each was of the token it chose; None: they are the same.

    A full prefill that was nearly undecided there (its two probabilities are close) explains a difference by chance; a
    sure one shows that reuse has lost something.
    """
    index = common_prefix(full.token_ids, cached.token_ids)
    if index == len(full.token_ids) == len(cached.token_ids):
        return None
    chosen, other = (int(np.argmax(way.logits[index])) for way in (full, cached))

    def probability(way: Continuation, token: int) -> float:
        return round(float(np.exp(log_probability(way.logits[index], token))), 4)

    return Parting(
        token=index,
        full_chose=tokenizer.decode([chosen]),
        cached_chose=tokenizer.decode([other]),
        full_probabilities=(probability(full, chosen), probability(full, other)),
        cached_probabilities=(probability(cached, chosen), probability(cached, other)),
    )
