"""What the server is to answer, and what it tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_pc.compose.laid_out import LaidOut
from edge_pc.runtime.answer import Answer
from edge_pc.runtime.serving import Serving
from edge_pc.runtime.stats import Result, TokenLogprobs
from edge_pc.runtime.watch import Watch


class Busy(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True, slots=True)
class Event:
    """What is new of an answer.

    Attributes:
        text: that it gained, maybe none.
        logprobs: of the tokens that it gained, if they were asked for.
        result: the whole answer; None: more will come.
        error: why there will be no answer.
    """

    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    result: Result | None = None
    error: BaseException | None = None

    @property
    def last(self) -> bool:
        return self.result is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Job:
    """A prompt that waits for its answer.

    Attributes:
        prompt: laid out, and short enough for the model.
        answer: what is to be filled.
        serving: how it is served.
        tell: called with each event in the thread that computes; it must not block.
        watch: whoever asked may cancel it.
        submitted: `time.perf_counter()` when it came.
    """

    prompt: LaidOut
    answer: Answer
    serving: Serving
    tell: Callable[[Event], None]
    watch: Watch = field(default_factory=Watch)
    submitted: float = field(default_factory=time.perf_counter)
    _told_logprobs: int = 0

    def gained(self, text: str) -> None:
        """Tell of text and of log-probabilities that are new, and of the end when it has come."""
        logprobs = tuple(self.answer.logprobs[self._told_logprobs :])
        self._told_logprobs += len(logprobs)
        result = self.answer.result() if self.answer.done else None
        if text or logprobs or result:
            self.tell(Event(text, logprobs, result))

    def cancelled(self) -> None:
        """Tell that it ended because whoever asked no longer wants it."""
        self.answer.cancel()
        self.tell(Event(result=self.answer.result()))

    def failed(self, error: BaseException) -> None:
        """Tell that there will be no answer."""
        self.tell(Event(error=error))
