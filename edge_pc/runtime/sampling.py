"""How the next token is chosen from logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import Logits
from edge_pc.errors import OptionError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is sampled. The defaults are greedy.

    Attributes:
        max_tokens: length of the answer, at most.
        temperature: 0 takes the likeliest token; larger values flatten the distribution.
        top_k: keep this many likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities add up to this.
        min_p: keep tokens at least this likely, relative to the likeliest.
        repetition_penalty: logits of tokens that the prompt (modules included) or the answer holds are divided by it
            when positive and multiplied when negative; 1 changes nothing.
        seed: of the random numbers; None takes fresh ones.
        stop: the answer ends before the first of these strings.

    Raises:
        OptionError: a value is out of its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < float("inf"), "above 0"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
            "stop": (isinstance(self.stop, tuple) and all(self.stop), "a tuple of non-empty strings"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise OptionError(f"{name} is {getattr(self, name)!r}, expected {expected}")


class Sampler:
    """Chooses tokens for one answer.

    Args:
        sampling: how.
        prompt_ids: every token of the prompt, for the repetition penalty.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int]) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._seen = set(prompt_ids) if sampling.repetition_penalty != 1 else set()

    def choose(self, logits: Logits) -> int:
        """The next token, from logits float32 `[vocab]`."""
        if self._sampling.repetition_penalty != 1:
            logits = self._penalized(logits)
        token = int(np.argmax(logits)) if self._sampling.temperature == 0 else self._draw(logits)
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
        probabilities = softmax(logits[order].astype(np.float64) / sampling.temperature)
        # The likeliest token always stays; a token stays if what is likelier does not reach top_p yet.
        before = np.cumsum(probabilities) - probabilities
        kept = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[0])
        kept[0] = True
        probabilities = probabilities[kept] / probabilities[kept].sum()
        return int(order[kept][self._random.choice(len(probabilities), p=probabilities)])


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities `[n]` of logits `[n]`."""
    exponentials: NDArray[np.float64] = np.exp(logits - logits.max())
    total: NDArray[np.float64] = exponentials / exponentials.sum()
    return total
