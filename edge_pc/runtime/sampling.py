"""How an answer is sampled, as a person asks for it; `sampler.py` does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edge_pc.checks import Range, check_number
from edge_pc.errors import OptionError

# What an answer may take where nobody says; less where the model has fewer positions left.
DEFAULT_MAX_TOKENS = 256


# Beyond these, temperatures and penalties mean nothing more: they only leave the range of float32.
RANGES = {
    "max_tokens": Range(int, 1, or_none=True),
    "temperature": Range(float, 0, 1000),
    "top_k": Range(int, 0),
    "top_p": Range(float, 0, 1, open=True),
    "min_p": Range(float, 0, 1),
    "repetition_penalty": Range(float, 0.001, 1000),
    "seed": Range(int, 0, or_none=True),
    "logprobs": Range(int, 0, 100, or_none=True),
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be. Make it with `json`, `regex` or `lark`.

    Attributes:
        kind: what `source` is: a JSON Schema, a regular expression, or rules as llguidance writes them in Lark's way.
        source: its text.
    """

    kind: Literal["json", "regex", "lark"]
    source: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | None = None) -> Grammar:
        """JSON that fits a JSON Schema, given as its text or as Python objects; any JSON object without one.

        Raises:
            OptionError: it is no JSON object.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else {"type": "object"} if schema is None else schema
            source = json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise OptionError(f"the JSON Schema is not JSON: {exc}") from exc
        if not isinstance(parsed, Mapping):
            raise OptionError(f"the JSON Schema is {source[:40]}, expected a JSON object")
        return cls("json", source)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """Text that follows `rules`, in llguidance's dialect of Lark; the rule `start` is the whole answer."""
        return cls("lark", rules)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is sampled. The defaults are greedy.

    Attributes:
        max_tokens: length of the answer, at most; None: 256, or as many as fit after the prompt.
        temperature: 0 takes the likeliest token; larger values, up to 1000, flatten the distribution.
        top_k: keep this many likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities add up to this; above 0, at most 1.
        min_p: keep tokens at least this likely, relative to the likeliest; from 0 to 1.
        repetition_penalty: logits of tokens that the prompt (modules included) or the answer holds are divided by it
            when positive and multiplied when negative; 1 changes nothing. From 0.001 to 1000.
        seed: of the random numbers, 0 or more; None takes fresh ones.
        stop: the answer ends before the first of these strings; one string is one of them.
        logprobs: keep each token's log-probability, and those of so many likeliest tokens, up to 100; None keeps none.
        grammar: what the answer must look like, such as JSON of a schema; None leaves it free.

    Raises:
        OptionError: a value is of the wrong type or out of its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            check_number(name, getattr(self, name), allowed)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
            raise OptionError(f"stop is {self.stop!r}, expected a text or a list of texts, none of them empty")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise OptionError(
                f"grammar is {self.grammar!r}, expected a Grammar", hint="make it with Grammar.json(schema)"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def answer_room(self, free: int) -> int:
        """How many tokens the answer may take where the model has `free` positions left.

        A number that was given is kept, so that one which does not fit is refused; at least one token is wanted.
        """
        return max(1, min(DEFAULT_MAX_TOKENS, free)) if self.max_tokens is None else self.max_tokens
