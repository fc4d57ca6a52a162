"""One answer: the tokens chosen, as text in whole characters, and when it ends."""

from __future__ import annotations

import time
from dataclasses import fields

from edge_pc.backends.base import Logits
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.constraint import Constraint
from edge_pc.runtime.sampler import Sampler, log_probabilities
from edge_pc.runtime.sampling import DEFAULT_MAX_TOKENS, Sampling
from edge_pc.runtime.stats import NO_PREFILL, PrefillStats, Result, Started, Stats, StopReason, TokenLogprobs


class Answer:
    """One answer, a token at a time: `take` logits, then compute `token` at `position` for the next ones, until `done`.

    Args:
        sampling: how tokens are chosen, and what ends the answer.
        tokenizer: turns ids into text.
        eos_ids: tokens that end an answer.
        constraint: what a grammar allows; None: everything.

    Attributes:
        sampling: as given.
        max_tokens: the answer has at most so many tokens.
        token: the token chosen last.
        position: its position.
        done: the answer has ended.
        logprobs: of each token so far, if they are asked for.
    """

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._constraint = constraint
        self._detokenizer = tokenizer.detokenizer()
        self._eos_ids = eos_ids
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self._sampled = 0
        self._text = ""
        self._given = 0
        self._stop: StopReason = "length"
        self._first_token = self._last_token = 0.0
        self.max_tokens = sampling.answer_room(DEFAULT_MAX_TOKENS)
        self.token = 0
        self.position = 0
        self.done = False
        self.logprobs: list[TokenLogprobs] = []

    def cancel(self) -> None:
        """End the answer where it is; the text so far stays."""
        if not self.done:
            self._stop = "cancelled"
            self.done = True

    def begin(self, started: Started) -> str:
        """Choose the first token; returns the text that is certain."""
        self._started = started
        self._sampler = Sampler(self.sampling, started.prompt_ids, self._constraint)
        self.position = started.position - 1
        return self.take(started.logits)

    def take(self, logits: Logits) -> str:
        """Choose the next token from logits float32 `[vocab]`; returns the text that is certain now, maybe none."""
        self.token = self._sampler.choose(logits)
        self.position += 1
        self._count_token()
        if self.token in self._eos_ids:
            self._stop = "eos"
            return self._finish()
        self._token_ids.append(self.token)
        if self.sampling.logprobs is not None:
            self.logprobs.append(log_probabilities(logits, self.token, self.sampling.logprobs))
        self._text += self._detokenizer.push(self.token)
        if self._cut_at_stop():
            self.done = True
            return self._give(len(self._text))
        if self._constraint is not None and self._constraint.complete:
            self._stop = "eos"
            return self._finish()
        if len(self._token_ids) == self.max_tokens:
            return self._finish()
        return self._give(len(self._text) - _held_back(self._text, self.sampling.stops))

    def result(self) -> Result:
        """The answer so far; of one that was cancelled before its first token, none.

        Raises:
            RuntimeError: it has not begun.
        """
        started = self._started
        if not self._sampled and not self.done:
            raise RuntimeError("the answer has not begun: iterate over the stream first")
        seconds = self._last_token - self._first_token
        prefill = started.stats if started else NO_PREFILL
        stats = Stats(
            **{field.name: getattr(prefill, field.name) for field in fields(PrefillStats)},
            new_tokens=len(self._token_ids),
            ttft_ms=(self._first_token - started.submitted) * 1e3 if started and self._sampled else 0.0,
            decode_tokens_per_s=(self._sampled - 1) / seconds if seconds else 0.0,
        )
        return Result(self._text, tuple(self._token_ids), self._stop, stats, logprobs=tuple(self.logprobs))

    @property
    def begun(self) -> bool:
        """Whether its first token was chosen."""
        return self._sampled > 0

    @property
    def computed_ids(self) -> tuple[int, ...]:
        """The tokens that were computed to choose those after them: all but the one chosen last."""
        return tuple(self._token_ids[: max(self._sampled - 1, 0)])

    def said_ids(self) -> tuple[int, ...]:
        """The tokens of the text: as chosen, but where a stop string cut it those of the text that is left."""
        if self._stop != "stop":
            return tuple(self._token_ids)
        count = len(self._token_ids)
        while not self._text.startswith(kept := self._tokenizer.decode(self._token_ids[:count])):
            count -= 1
        return (*self._token_ids[:count], *self._tokenizer.encode(self._text[len(kept) :].replace("\0", "")))

    def _finish(self) -> str:
        """End the answer with what the detokenizer still holds."""
        self._text += self._detokenizer.finish()
        self._cut_at_stop()
        self.done = True
        return self._give(len(self._text))

    def _give(self, certain: int) -> str:
        piece = self._text[self._given : certain]
        self._given = max(self._given, certain)
        return piece

    def _count_token(self) -> None:
        self._sampled += 1
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token

    def _cut_at_stop(self) -> bool:
        """End the text before the first stop string in it."""
        found = [index for index in (self._text.find(stop) for stop in self.sampling.stops) if index >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._stop = "stop"
        return bool(found)


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
