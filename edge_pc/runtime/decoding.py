"""The loop of later tokens, for one answer and for many: each round computes one token of every answer not done yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edge_pc.backends.base import Backend, Context, DecodeStep, Logits
from edge_pc.runtime.answer import Answer
from edge_pc.runtime.stats import Started


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """A prefilled prompt in its context, and its answer."""

    context: Context
    started: Started
    answer: Answer


def decode(backend: Backend[Any], live: Sequence[Live]) -> Iterator[list[str]]:
    """Yield, token by token, the text that each answer gains (maybe none), until all are done."""
    yield [one.answer.begin(one.started) for one in live]
    while going := [one for one in live if not one.answer.done]:
        gained = dict(zip(map(id, going), step(backend, going), strict=True))
        yield [one.answer.take(gained[id(one)]) if id(one) in gained else "" for one in live]


def step(backend: Backend[Any], going: Sequence[Live]) -> list[Logits]:
    """Compute the token chosen last of each of these answers, none of them done: logits for the next ones.

    Who joins or leaves does so between two steps.
    """
    return backend.decode([DecodeStep(one.context, one.answer.token, one.answer.position) for one in going])
