"""One opened model for experiments: a prompt prepared under any encoding rule, and continued as often as wanted.

A full prefill is the dear part of every comparison. `Lab.full` computes it once and keeps its states in memory, so that
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

import numpy as np

from edge_pc.backends import open_backend
from edge_pc.backends.base import BackendOptions, Context, DecodeStep, KVStates, Logits, Plan, Span
from edge_pc.bench.setup import BenchOptions, model_path
from edge_pc.compose.choices import EncodingRule, Placeholder, Tail
from edge_pc.compose.encodings import EncodingOptions, SchemaEncodings
from edge_pc.compose.laid_out import LaidOut, check_length, lay_out_prompt
from edge_pc.compose.schema_layout import SchemaLayout, lay_out
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.pml import Schema, Selection
from edge_pc.runtime.encoder import Encoder
from edge_pc.store import StateStore
from edge_pc.system.home import make_home

# Tokens of a full prefill that are computed again with each continuation: as many as a short question has, so that
# they go through the same kernels.
CONTINUED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to reuse states; the defaults are the engine's."""

    encoding: EncodingRule = "guaranteed"
    placeholder: Placeholder = "nothing"
    tail: Tail = "imported"


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


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A prompt with its tokens and positions, and what gets its states."""

    prompt: LaidOut
    encoder: Encoder


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
        self.backend = open_backend(backend, model, BackendOptions(threads=threads))
        self.spec = self.backend.spec
        self.tokenizer = self.backend.tokenizer
        self.template = ChatTemplate(self.backend.chat_template, self.spec.special_tokens)
        self._model = model.name
        self._folder = tempfile.TemporaryDirectory(prefix="edge-pc-bench-", dir=folder)
        self.store = StateStore(Path(self._folder.name))
        unk = self.spec.special_tokens.get("unk_token")
        self._unk_id = self.tokenizer.id_of(unk) if unk else None

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
        return self.backend.chat_template is not None

    @property
    def has_unk(self) -> bool:
        """Whether `placeholder="unk"` is possible with this model."""
        return self._unk_id is not None

    def lay_out_schema(self, schema: Schema) -> SchemaLayout:
        """As `Engine.load_schema`."""
        spec = self.spec
        return lay_out(schema, self.tokenizer, self.template, bos_id=spec.bos_id, max_positions=spec.max_positions)

    def lay_out(
        self, schema: Schema, selection: Selection, variant: Variant = Variant(), *, answer_tokens: int = 1
    ) -> LaidOut:
        """Give a checked prompt its tokens and positions.

        Raises:
            ContextLengthError: the schema, or the prompt and its answer, are longer than the model's positions.
        """
        layout = self.lay_out_schema(schema)
        options = EncodingOptions(variant.encoding, variant.placeholder, self._unk_id)
        encodings = SchemaEncodings(layout, (self.spec.fingerprint, self.backend.kv_layout.name), options)
        prompt = lay_out_prompt(selection, encodings, layout, self.tokenizer, self.template, variant.tail)
        check_length(prompt, answer_tokens, self.spec.max_positions)
        return LaidOut(prompt, Encoder(self.backend, self.store, layout, encodings, self._model))

    def cached(self, laid_out: LaidOut) -> Ready:
        """Get the states of a prompt's modules, from the store or by encoding them."""
        states = [obtained.states for obtained in laid_out.encoder.obtain_all(laid_out.prompt.encodings)]
        return Ready(laid_out.prompt.cached_plan(states, exact=False), laid_out.prompt.end)

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

    def log_likelihoods(self, ready: Ready, answer: Sequence[int]) -> list[float]:
        """Log probability of each token of a given answer, in nats, each after the tokens before it."""
        found = []
        with self._prefilled(ready, len(answer)) as (context, logits):
            for index, token in enumerate(answer):
                if index:
                    logits = self._decode(context, answer[index - 1], ready.end + index - 1)
                found.append(log_probability(logits, token))
        return found

    def forget(self) -> None:
        """Delete all stored states, so that the disk holds those of one item at a time."""
        self.store.remove(entry.key for entry in self.store.entries())

    @contextmanager
    def _prefilled(self, ready: Ready, further: int) -> Iterator[tuple[Context, Logits]]:
        """A context that holds the prompt and has room for `further` tokens, and the first one's logits."""
        cells = ready.plan.cached_tokens + len(ready.plan.token_ids) + further
        with closing(self.backend.new_context(cells)) as context:
            yield context, context.prefill(ready.plan).logits

    def _decode(self, context: Context, token: int, position: int) -> Logits:
        (logits,) = self.backend.decode([DecodeStep(context, token, position)])
        return logits


def open_lab(options: BenchOptions, backend: str) -> Lab:
    """A lab for what a bench was asked to measure; its caller closes it."""
    path = model_path(options, backend)
    folder = options.cache_dir or make_home()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Lab(path, backend=backend, threads=options.threads, folder=folder)


def log_probability(logits: Logits, token: int) -> float:
    """The natural logarithm of a token's probability, given logits `[vocab]`."""
    values = logits.astype(np.float64)
    largest = values.max()
    return float(values[token] - largest - np.log(np.exp(values - largest).sum()))
