"""The one protocol between the engine and whatever runs the model.

A `Backend` is an opened model. A `Context` is one live prompt in it: cached spans are injected, a run of tokens is
forwarded, later tokens are decoded. How a backend honours a plan is its own business, under one invariant:
**causality is by position**: a computed token sees exactly the present cells with a smaller or equal position,
wherever a backend keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer

IntArray = NDArray[np.int32]
Logits = NDArray[np.float32]

# Called with the number of tokens computed since the last call.
Progress = Callable[[int], None]

# A single row goes through another matrix kernel than many rows, and its logits differ (DESIGN.md: by 0.4 to 0.8 of
# 30). A prompt therefore always computes at least this many tokens, and stored logits are never needed.
MIN_COMPUTED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend lays out the KV states of a number of tokens in one array.

    Attributes:
        name: identifies the layout; part of every store key, so that states of another layout are never found.
        dtype: of the array, as numpy spells it (`float32`, `float16`, `uint8`).
        shape: of the array for one token, with `token_axis` of size 1.
        token_axis: the axis along which tokens lie.
        token_multiple: tokens are padded with zeros to a multiple of this, so that each row starts on a page.
        congruent: zeros stand in front, too, so many that the first token's index is congruent to its position modulo
            `token_multiple`: where cells lie at their positions, pages of the array fit pages of the arena.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    token_axis: int
    token_multiple: int = 1
    congruent: bool = False

    def lead(self, position_ids: IntArray) -> int:
        """The index of the first token in the array that holds tokens at `position_ids`."""
        return int(position_ids[0]) % self.token_multiple if self.congruent and len(position_ids) else 0

    def array_shape(self, position_ids: IntArray) -> tuple[int, ...]:
        """The shape of the array that holds tokens at `position_ids`, padding included."""
        tokens = self.lead(position_ids) + len(position_ids)
        shape = list(self.shape)
        shape[self.token_axis] *= -(-tokens // self.token_multiple) * self.token_multiple
        return tuple(shape)

    def nbytes(self, position_ids: IntArray) -> int:
        """The size in bytes of the array that holds tokens at `position_ids`, padding included."""
        return int(np.prod(self.array_shape(position_ids), dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class KVStates:
    """KV states of some cells, in position order, as a backend's layout describes them.

    Attributes:
        key: the store key; equal keys mean equal states.
        array: shape `layout.array_shape(position_ids)`; read-only, memory-mapped when `path` is given.
        token_ids, position_ids: int32 `[tokens]`, without padding; positions ascend strictly.
        path, offset: the file that `array` maps, and where the array's bytes start in it; None when only in memory.
    """

    key: str
    array: NDArray[Any]
    token_ids: IntArray
    position_ids: IntArray
    path: Path | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A contiguous range of cells `[start, stop)` of stored KV states."""

    states: KVStates
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def position_ids(self) -> IntArray:
        return self.states.position_ids[self.start : self.stop]

    @property
    def token_ids(self) -> IntArray:
        return self.states.token_ids[self.start : self.stop]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a context holds before the first token: cells injected from `spans`, and the run that is computed.

    Attributes:
        spans: disjoint in their positions.
        token_ids, position_ids: the run, int32 `[n]`, positions ascending strictly and disjoint from the spans'.
        exact: put the cells of the spans in position order, by copying, so that sums are added up in the same order
            as in full prefill and results are equal to the last bit (DESIGN.md, slot order and rounding).
    """

    spans: tuple[Span, ...]
    token_ids: IntArray
    position_ids: IntArray
    exact: bool = False

    @property
    def cached_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What `Context.prefill` gives back.

    Attributes:
        logits: float32 `[vocab]`, of the token with the largest position.
        computed_tokens: counted where they were computed.
        assembly_ms, forward_ms: time spent injecting and computing.
    """

    logits: Logits
    computed_tokens: int
    assembly_ms: float
    forward_ms: float


class Context(Protocol):
    """One live prompt. Not shared between threads; `close` returns its memory to the backend."""

    def prefill(self, plan: Plan, progress: Progress | None = None) -> Prefill:
        """Replace whatever the context held by the plan's cells and compute its run (at least one token).

        Raises:
            StatesError: stored states cannot be used after all; the context holds nothing then.
        """
        ...

    def encode(self, plan: Plan, keep: IntArray, progress: Progress | None = None) -> NDArray[Any]:
        """Compute the plan's run as `prefill` does and return the KV states of its tokens `keep`.

        Args:
            plan: the guaranteed context as spans; the tokens to encode as the run. Runs of one token are encoded by
                the same kernels as longer ones.
            keep: int32 indices into the run, ascending: the cells to return (placeholders are left out).

        Returns:
            A new array of shape `layout.array_shape(plan.position_ids[keep])`, padding zero.
        """
        ...

    def close(self) -> None:
        """Drop all cells and give the memory back. The context must not be used afterwards."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """One further token of one context: `token_id` is computed at `position_id`, behind all present cells."""

    context: Context
    token_id: int
    position_id: int


class Backend(Protocol):
    """An opened model. Safe to use from several threads; each context belongs to one thread at a time.

    Attributes:
        name: as in the table of backends.
        spec: the model's sizes and identity.
        kv_layout: of the KV states it reads and makes.
        tokenizer: the model's.
        chat_template: source of the model's chat template, or None.
    """

    name: str
    spec: ModelSpec
    kv_layout: KVLayout
    tokenizer: Tokenizer
    chat_template: str | None

    def new_context(self, capacity: int) -> Context:
        """A context with room for `capacity` cells (at most `spec.max_positions`)."""
        ...

    def decode(self, steps: Sequence[DecodeStep]) -> list[Logits]:
        """Compute the next token of each context, together where the backend can; logits float32 `[vocab]` each."""
        ...

    def close(self) -> None:
        """Free the model. Contexts must be closed before."""
        ...


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How a backend runs.

    Attributes:
        threads: compute threads; None: the CPUs this process may use.
        provider: execution provider (`cpu`, `cuda`, …).
        assembly: `map` file pages into the arena, `copy` them, or `auto`: whichever is faster for each span.
        kv_storage: dtype of stored KV states, `float32` or `float16`.
        verbose: let native libraries log to stderr.
    """

    threads: int | None = None
    provider: str = "cpu"
    assembly: str = "auto"
    kv_storage: str = "float32"
    verbose: bool = False
