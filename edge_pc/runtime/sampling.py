"""How an answer is sampled, as a person asks for it; `sampler.py` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
}


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

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            check_number(name, getattr(self, name), allowed)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) and text for text in stops):
            raise OptionError(f"stop is {self.stop!r}, expected a text or a list of texts, none of them empty")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def answer_room(self, free: int) -> int:
        """How many tokens the answer may take where the model has `free` positions left.

        A number that was given is kept, so that one which does not fit is refused; at least one token is wanted.
        """
        return max(1, min(DEFAULT_MAX_TOKENS, free)) if self.max_tokens is None else self.max_tokens
