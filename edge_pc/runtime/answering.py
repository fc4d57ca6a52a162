"""From prompts to answers in one opened model: what one prompt, many prompts and conversations share."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

from edge_pc.backends.base import Backend, Context
from edge_pc.compose.laid_out import LaidOut, check_length
from edge_pc.progress import OnProgress
from edge_pc.runtime.answer import Answer
from edge_pc.runtime.constraint import Grammars
from edge_pc.runtime.decoding import Live, decode
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.lifetime import Lifetime
from edge_pc.runtime.prefill import prefill
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.selections import Selections
from edge_pc.runtime.serving import Serving
from edge_pc.runtime.stats import Result, Started
from edge_pc.runtime.stream import Stream
from edge_pc.runtime.watch import Cancelled, Watch
from edge_pc.store import StateStore

# Brings a prompt to its first token's logits, for as long as the block lasts.
Begin = Callable[[Answer, Watch], AbstractContextManager[Live]]


class Answering:
    """Answers prompts. Safe to use from several threads.

    Args:
        backend: computes.
        encoder: gets states.
        store: checks files while answers are made.
        lifetime: of the engine.
        model: the model's name, for people.

    Attributes:
        backend, encoder, store, lifetime, model: as given.
        selections: those that prompts made lately.
        refining: work that the next prompt ends.
    """

    def __init__(
        self, backend: Backend[Any], encoder: Encoder, store: StateStore, lifetime: Lifetime, model: str
    ) -> None:
        self.backend = backend
        self.encoder = encoder
        self.store = store
        self.lifetime = lifetime
        self.model = model
        self.selections = Selections()
        self.refining = Watch()
        self._grammars = Grammars(backend.tokenizer, backend.spec)

    @property
    def max_positions(self) -> int:
        """Of the model."""
        return self.backend.spec.max_positions

    def answer(self, sampling: Sampling) -> Answer:
        """An answer that has not begun.

        Raises:
            OptionError: the grammar of `sampling` cannot be used.
        """
        constraint = None if sampling.grammar is None else self._grammars.start(sampling.grammar)
        return Answer(sampling, self.backend.tokenizer, self.backend.spec.eos_ids, constraint)

    def stream(self, begin: Begin, sampling: Sampling, progress: OnProgress | None) -> Stream:
        """The path of a prompt: prefill, answer. Errors come with the first piece."""
        answer, watch = self.answer(sampling), Watch(progress)

        def pieces() -> Generator[str, None, None]:
            try:
                with begin(answer, watch) as live:
                    for (piece,) in decode(self.backend, [live]):
                        if piece:
                            yield piece
                        self.store.start_checks()  # the first token did not wait for it
                        watch.check()
            except Cancelled:
                answer.cancel()

        return self.lifetime.add(Stream(pieces(), answer, watch))

    @contextmanager
    def prefilled(
        self, lay_out: Callable[[], LaidOut], answer: Answer, serving: Serving, watch: Watch
    ) -> Iterator[Live]:
        """A prompt brought to its first token's logits in a context of its own, for as long as the block lasts."""
        submitted = self.submit()
        prompt = lay_out()
        self.make_room(prompt, answer)
        with closing(self.backend.new_context(prompt.tokens + answer.max_tokens)) as context:
            yield Live(context, self.prefill(context, prompt, submitted, serving, watch), answer)

    def submit(self) -> float:
        """A prompt comes: what was done while nobody waited ends; `time.perf_counter()`."""
        submitted = time.perf_counter()
        self.lifetime.require_open()
        self.refining.cancel()
        return submitted

    def make_room(self, prompt: LaidOut, answer: Answer) -> None:
        """Let an answer be no longer than there is room after its prompt.

        Raises:
            ContextLengthError: the length that was asked for does not fit.
        """
        answer.max_tokens = answer.sampling.answer_room(self.max_positions - prompt.end)
        check_length(prompt, answer.max_tokens, self.max_positions)

    def prefill(self, context: Context, prompt: LaidOut, submitted: float, serving: Serving, watch: Watch) -> Started:
        """Bring a prompt to its first token's logits; see `prefill`."""
        started = prefill(context, prompt, self.encoder, submitted, serving, watch)
        self.selections.count(prompt)
        return started


def exhaust(stream: Stream) -> Result:
    """The result of a stream after its end."""
    for _ in stream:
        pass
    return stream.result
