"""The one protocol between the engine and whatever runs the model.

A `Backend` is an opened model. A `Context` is one live prompt in it: cached spans are injected, runs of tokens are
forwarded, later tokens are decoded. How a backend honours a plan is its own business, under one invariant:
**causality is by position**: a computed token sees exactly the present cells with a smaller or equal position,
wherever a backend keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer

IntArray = NDArray[np.int32]
Logits = NDArray[np.float32]

# Called with the number of tokens computed since the last call. It may raise to stop the work; what the context holds
# is undefined then, until the next `prefill`.
OnTokens = Callable[[int], None]


class KVLayout(Protocol):
    """How a backend lays out the KV states of some cells in one array.

    Attributes:
        name: identifies the layout; part of every store key, so that states of another layout are never found.
        dtype: of the array, as numpy spells it (`float32`, `float16`, `uint8`).
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def array_shape(self, position_ids: IntArray) -> tuple[int, ...]:
        """The shape of the array that holds cells at `position_ids`, padding included."""
        ...


def states_bytes(layout: KVLayout, position_ids: IntArray) -> int:
    """The size in bytes of the array that holds cells at `position_ids`, padding included."""
    return int(np.prod(layout.array_shape(position_ids), dtype=np.int64)) * np.dtype(layout.dtype).itemsize


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
    """A contiguous range of cells `[start, stop)` of stored KV states, moved by `shift` positions from where they were
    encoded."""

    states: KVStates
    start: int
    stop: int
    shift: int = 0

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def position_ids(self) -> IntArray:
        """Where the cells are in the prompt, int32 `[tokens]`."""
        positions: IntArray = self.states.position_ids[self.start : self.stop] + np.int32(self.shift)
        return positions

    @property
    def token_ids(self) -> IntArray:
        return self.states.token_ids[self.start : self.stop]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Cells to inject from `spans`, and the run that is computed.

    Attributes:
        spans: disjoint in their positions.
        token_ids, position_ids: the run, int32 `[n]` with n ≥ 1, positions ascending strictly; its last token has the
            largest position of all, so that its logits are those of the next token. A token of the run takes the place
            of the span's cell that has its position: nothing sees that cell.
        exact: sums must be added up in the order of full prefill, so that results are equal bit for bit
            (DESIGN.md, slot order and rounding).
    """

    spans: tuple[Span, ...]
    token_ids: IntArray
    position_ids: IntArray
    exact: bool = False

    @property
    def cached_tokens(self) -> int:
        """The spans' cells, those included whose place the run takes."""
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What `Context.prefill` and `Context.append` give back.

    Attributes:
        logits: float32 `[vocab]`, of the run's last token.
        computed_tokens: counted where they were computed; a backend may compute some cached cells again.
        assembly_ms, forward_ms: time spent injecting and computing.
    """

    logits: Logits
    computed_tokens: int
    assembly_ms: float
    forward_ms: float


ContextT = TypeVar("ContextT", bound="Context")


class Context(Protocol):
    """One live prompt. Not shared between threads; `close` returns its memory to the backend."""

    def prefill(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """Replace whatever the context held by the plan's cells and compute its run.

        Raises:
            StatesError: stored states cannot be used after all; what the context holds is undefined then, until the
                next `prefill`.
        """
        ...

    def append(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """Add the plan's cells to those that are there, and compute its run; all its positions lie after theirs.

        Those that were there stay as they were, also where `on_tokens` ends the work: `truncate` drops what it left.

        Raises:
            StatesError: as `prefill`.
            ContextLengthError: there is no room for them; the context is as it was.
        """
        ...

    def attention(self, plan: Plan) -> NDArray[np.float32]:
        """How much the plan's run attends to each cell of its spans: a guide to which of them matter for the answer.

        The spans are placed, as in a `prefill` that follows; logits are not computed.

        Returns:
            float32 `[plan.cached_tokens]`, in the order of the spans: weights of attention, in which way averaged over
            tokens, heads and layers is the backend's business.

        Raises:
            StatesError: as `prefill`.
        """
        ...

    def truncate(self, position_id: int) -> None:
        """Drop every cell at `position_id` or after it."""
        ...

    def encode(self, plan: Plan, keep: IntArray, on_tokens: OnTokens | None = None) -> NDArray[Any]:
        """Compute the plan's run as `prefill` does and return the KV states of its tokens `keep`.

        Args:
            plan: the guaranteed context as spans; the tokens to encode as the run.
            keep: int32 indices into the run, ascending: the cells to return (placeholders are left out).

        Returns:
            A new array of shape `layout.array_shape(plan.position_ids[keep])`, padding zero.
        """
        ...

    def read(self, position_ids: IntArray) -> NDArray[Any]:
        """The KV states of cells that are there, as `encode` gives them.

        Args:
            position_ids: int32, of the cells, ascending.

        Returns:
            A new array of shape `layout.array_shape(position_ids)`, padding zero.

        Raises:
            StatesError: a cell is not there.
        """
        ...

    def fork(self: ContextT, capacity: int) -> ContextT:
        """A second context with the same cells, none of them computed again; from then on each goes its own way.

        Args:
            capacity: of the new one; at least the cells that are there.

        Raises:
            StatesError: the cells have been lost.
        """
        ...

    def close(self) -> None:
        """Drop all cells and give the memory back. The context must not be used afterwards."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep(Generic[ContextT]):
    """One further token of one context: `token_id` is computed at `position_id`, after all present cells."""

    context: ContextT
    token_id: int
    position_id: int


class Backend(Protocol[ContextT]):
    """An opened model. Safe to use from several threads; each context belongs to one thread at a time.

    Attributes:
        name: as in the table of backends.
        spec: the model's sizes and identity.
        kv_layout: of the KV states it reads and makes.
        tokenizer: the model's.
        chat_template: the model's.
    """

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    @property
    def kv_layout(self) -> KVLayout: ...

    def new_context(self, capacity: int) -> ContextT:
        """A context with room for `capacity` cells (at most `spec.max_positions`)."""
        ...

    def decode(self, steps: Sequence[DecodeStep[ContextT]]) -> list[Logits]:
        """Compute the next token of each context, together where the backend can; logits float32 `[vocab]` each."""
        ...

    def close(self) -> None:
        """Free the model. Contexts must be closed before; a second time nothing happens."""
        ...
