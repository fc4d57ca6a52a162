"""One opened model for experiments: a prompt prepared under any encoding rule, and continued as often as wanted.

Full prefill is what takes long in every comparison. `Lab.full` computes it once and keeps its states in memory, so that
an answer, the likelihood of another answer and a repeat each cost a few tokens. Stored states live in a folder that
is deleted with the lab.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edge_pc.backends import open_backend
from edge_pc.backends.base import DecodeStep, KVStates, Logits, Plan, Span
from edge_pc.bench.work import Work
from edge_pc.compose.composer import ComposeOptions, Composer
from edge_pc.compose.laid_out import LaidOut, check_length
from edge_pc.pml import Schema, Selection
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.prefill import found_for, served_plan
from edge_pc.runtime.serving import Fidelity
from edge_pc.store import StateStore

# Tokens of a full prefill that are computed again with each continuation: as many as a short question has, so that
# they go through the same kernels.
CONTINUED_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A prompt whose states are at hand: `plan` can be prefilled again and again; the answer begins at `end`."""

    plan: Plan
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """An answer.

    Attributes:
        token_ids: without the token that ends it.
        logits: float32 `[vocab]` of each token, and of the one that ends it.
    """

    token_ids: tuple[int, ...]
    logits: tuple[Logits, ...]


class Lab:
    """A model and a temporary store.

    Args:
        model: the file or folder that the backend opens.
        backend, threads: as `Engine` takes them.
        folder: where the temporary store is made; None: the system's folder for temporary files.

    Raises:
        ModelError, MissingDependencyError, OptionError: as `Engine`.
    """

    def __init__(
        self, model: Path, *, backend: str = "onnx", threads: int | None = None, folder: Path | None = None
    ) -> None:
        self.backend = open_backend(backend, model, {"threads": threads})
        self.spec = self.backend.spec
        self.tokenizer = self.backend.tokenizer
        self._folder = tempfile.TemporaryDirectory(prefix="edge-pc-bench-", dir=folder)
        self.store = StateStore(Path(self._folder.name))
        self._encoder = Encoder(self.backend, self.store, model.name)
        self._composers: dict[ComposeOptions, Composer] = {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and delete the store."""
        self.backend.close()
        self.store.close()
        self._folder.cleanup()

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self.backend.chat_template.source is not None

    @property
    def has_unk(self) -> bool:
        """Whether `placeholder="unk"` is possible with this model."""
        unk = self.spec.special_tokens.get("unk_token")
        return unk is not None and self.tokenizer.id_of(unk) is not None

    def lay_out(
        self,
        schema: Schema,
        selection: Selection,
        options: ComposeOptions = ComposeOptions(),
        *,
        answer_tokens: int = 1,
    ) -> LaidOut:
        """Give a checked prompt its tokens and positions.

        Raises:
            ContextLengthError: the schema, or the prompt and its answer, are longer than the model's positions.
        """
        if options not in self._composers:
            self._composers[options] = Composer(self.backend, self.backend.kv_layout.name, options)
        prompt = self._composers[options].compose(schema, selection)
        check_length(prompt, answer_tokens, self.spec.max_positions)
        return prompt

    def cached(self, prompt: LaidOut, fidelity: Fidelity = "fast") -> Ready:
        """Get the states of a prompt's modules, from the store or by encoding them, and choose what is computed."""
        served = self._encoder.serve(found_for(prompt, self._encoder, fidelity))
        with closing(self.backend.new_context(prompt.tokens + 1)) as context:
            return Ready(served_plan(context, prompt, served, fidelity), prompt.end)

    def full(self, prompt: LaidOut) -> Ready:
        """Compute a prompt in full, and keep all states but those of its last tokens in memory.

        The logits of continuations equal those of `LaidOut.full_plan`, since states of one span in position order
        do (DESIGN.md: also when they were computed in chunks).
        """
        whole = prompt.full_plan()
        tokens = len(whole.token_ids)
        kept = max(tokens - CONTINUED_TOKENS, 0)
        if kept == 0:
            return Ready(whole, tokens)
        head = Plan((), whole.token_ids[:kept], whole.position_ids[:kept])
        with closing(self.backend.new_context(tokens)) as context:
            array = context.encode(head, np.arange(kept, dtype=np.int32))
        # Equal keys mean equal states: a backend may keep states in its own memory under their key.
        key = f"full{hashlib.blake2b(head.token_ids.tobytes(), digest_size=16).hexdigest()}"
        states = KVStates(key, array, head.token_ids, head.position_ids)
        plan = Plan((Span(states, 0, kept),), whole.token_ids[kept:], whole.position_ids[kept:])
        return Ready(plan, tokens)

    def greedy(self, ready: Ready, max_tokens: int) -> Continuation:
        """The likeliest answer of at most `max_tokens` tokens."""
        token_ids: list[int] = []
        with self._prefilled(ready, max_tokens) as (context, first):
            logits = [first]
            while (token := int(np.argmax(logits[-1]))) not in self.spec.eos_ids:
                token_ids.append(token)
                if len(token_ids) == max_tokens:
                    break
                logits.append(self._decode(context, token, ready.end + len(token_ids) - 1))
        return Continuation(tuple(token_ids), tuple(logits))

    def following(self, ready: Ready, answer: Sequence[int]) -> Iterator[Logits]:
        """The logits `[vocab]` for each token of a given answer, each after the tokens before it."""
        with self._prefilled(ready, len(answer)) as (context, logits):
            for index in range(len(answer)):
                if index:
                    logits = self._decode(context, answer[index - 1], ready.end + index - 1)
                yield logits

    def log_likelihoods(self, ready: Ready, answer: Sequence[int]) -> list[float]:
        """Log probability of each token of a given answer, in nats, each after the tokens before it."""
        following = zip(self.following(ready, answer), answer, strict=True)
        return [log_probability(logits, token) for logits, token in following]

    def forget(self) -> None:
        """Delete all stored states, so that the disk holds those of one item at a time."""
        self.store.remove(entry.key for entry in self.store.entries())

    @contextmanager
    def _prefilled(self, ready: Ready, further: int) -> Iterator[tuple[Any, Logits]]:
        """A context that holds the prompt and has room for `further` tokens, and the first one's logits."""
        cells = ready.plan.cached_tokens + len(ready.plan.token_ids) + further
        with closing(self.backend.new_context(cells)) as context:
            yield context, context.prefill(ready.plan).logits

    def _decode(self, context: Any, token: int, position: int) -> Logits:
        (logits,) = self.backend.decode([DecodeStep(context, token, position)])
        return logits


def open_lab(work: Work[Any]) -> Lab:
    """A lab for what an experiment was asked to measure; its caller closes it."""
    (backend,) = work.backends
    return Lab(work.options.model_path(backend), backend=backend, threads=work.options.threads, folder=work.folder)


def log_probability(logits: Logits, token: int) -> float:
    """The natural logarithm of a token's probability, given logits `[vocab]`."""
    values = logits.astype(np.float64)
    largest = values.max()
    return float(values[token] - largest - np.log(np.exp(values - largest).sum()))
