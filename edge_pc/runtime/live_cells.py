"""The cells of a conversation in a context that stays open: each turn adds to what is there.

What is noted here is surely in the context; there may be more after it, of work that was ended. So a turn begins by
dropping all after the part that is as it should be, and computes the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_pc.backends.base import Backend, Context, IntArray, KVStates, OnTokens, Plan, Prefill, Span
from edge_pc.errors import StatesError

log = logging.getLogger("edge_pc")

# Cells that a context has room for beside those that are wanted now: later turns then seldom need a larger one.
SPARE_CELLS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens and their positions, int32 `[n]` each, positions ascending."""

    token_ids: IntArray
    position_ids: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The position after the last one."""
        return int(self.position_ids[-1]) + 1 if len(self) else 0

    def first(self, count: int) -> Tokens:
        return Tokens(self.token_ids[:count], self.position_ids[:count])

    def after(self, count: int) -> Tokens:
        return Tokens(self.token_ids[count:], self.position_ids[count:])

    def plus(self, token_ids: Any) -> Tokens:
        """With more tokens right after them."""
        added = np.asarray(token_ids, dtype=np.int32)
        positions = np.arange(self.end, self.end + len(added), dtype=np.int32)
        return Tokens(np.concatenate([self.token_ids, added]), np.concatenate([self.position_ids, positions]))

    def common(self, other: Tokens) -> int:
        """How many are the same at the same positions, from the first on."""
        count = min(len(self), len(other))
        same = self.token_ids[:count] == other.token_ids[:count]
        same &= self.position_ids[:count] == other.position_ids[:count]
        return count if same.all() else int(np.argmin(same))


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a conversation has at hand beside the cells that stay where they are.

    Attributes:
        stored: gives stored states, for a context that has no cells.
        dropped: so many cells after those that stay go, and those after them are moved into their place; 0: none.
    """

    stored: Callable[[], Sequence[Span]]
    dropped: int = 0


ONLY_CELLS = Parts(lambda: ())  # nothing else

NO_TOKENS = Tokens(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


class LiveCells:
    """Cells of one conversation.

    Args:
        backend: opens contexts.
        exact: sums are added up in the order of full prefill, see `Plan`.

    Attributes:
        there: the cells that are surely in the context.
    """

    def __init__(self, backend: Backend[Any], *, exact: bool) -> None:
        self._backend = backend
        self._exact = exact
        self._context: Context | None = None
        self._capacity = 0
        self.there = NO_TOKENS

    def empty_context(self, capacity: int) -> Context:
        """The context, without cells, with room for `capacity`; who fills it says so by `note`."""
        self.there = NO_TOKENS
        if self._context is None or self._capacity < capacity:
            self.close()
            self._capacity = self._with_spare(capacity)
            self._context = self._backend.new_context(self._capacity)
        return self._context

    def context(self, capacity: int) -> Context:
        """The context, with all its cells and room for `capacity`."""
        if self._context is None:
            return self.empty_context(capacity)
        if self._capacity < capacity:
            larger = self._context.fork(self._with_spare(capacity))
            self._context.close()
            self._context, self._capacity = larger, self._with_spare(capacity)
        return self._context

    def note(self, tokens: Tokens) -> None:
        """The context has these cells, in this order."""
        self.there = tokens

    def go_on(self, wanted: Tokens, capacity: int, parts: Parts, on_tokens: OnTokens) -> Prefill:
        """Let the context hold the cells of these tokens, of which only those are computed that are nowhere yet.

        Args:
            wanted: all tokens; at least the last is not there.
            parts: what else is at hand.

        Raises:
            Cancelled: `on_tokens` ended the work.
            ContextLengthError: there is not enough memory.
        """
        context, kept = self.context(capacity), self.there.common(wanted)
        try:
            moved = self._moved(wanted, kept, parts.dropped)
            self.cut(kept)
            if kept:
                added = context.append(self._plan(wanted.after(kept), moved), on_tokens)
            else:
                added = context.prefill(self._plan(wanted, parts.stored()), on_tokens)
        except StatesError as exc:
            log.warning("%s; the conversation is computed again", exc.message)
            self.there = NO_TOKENS
            added = context.prefill(self._plan(wanted, ()), on_tokens)
        self.note(wanted)
        return added

    def cut(self, count: int) -> None:
        """Drop all but the first `count` cells, and what is there without being noted."""
        self.there = self.there.first(count)
        if self._context is None:
            return
        try:
            self._context.truncate(self.there.end)
        except StatesError as exc:  # they have been lost; those who go on find out, and compute them
            log.debug("%s", exc.message)

    def read(self, start: int, stop: int) -> Any:
        """The KV states of cells number `[start, stop)` of those that are there.

        Raises:
            StatesError: they have been lost.
        """
        return self.context(0).read(self.there.position_ids[start:stop])

    def fork(self) -> LiveCells:
        """The same cells once more, none of them computed again."""
        forked = LiveCells(self._backend, exact=self._exact)
        if self._context is not None:
            self.cut(len(self.there))
            try:
                forked._context, forked._capacity = self._context.fork(self._capacity), self._capacity
                forked.there = self.there
            except StatesError as exc:  # as in `cut`
                log.debug("%s", exc.message)
        return forked

    def close(self) -> None:
        """Give the memory back."""
        context, self._context, self.there = self._context, None, NO_TOKENS
        if context is not None:
            context.close()

    def _moved(self, wanted: Tokens, kept: int, dropped: int) -> list[Span]:
        """The cells after the first `kept` and `dropped` ones, at the places right after the first."""
        after, places = self.there.after(kept + dropped), wanted.after(kept)
        shift = int(places.position_ids[0]) - int(after.position_ids[0]) if dropped and len(after) else 0
        after = after.first(places.common(Tokens(after.token_ids, after.position_ids + np.int32(shift))))
        if self._context is None or not dropped or not len(after):
            return []
        states = KVStates("moved", self._context.read(after.position_ids), after.token_ids, after.position_ids)
        return [Span(states, 0, len(after), shift)]

    def _plan(self, wanted: Tokens, spans: Sequence[Span]) -> Plan:
        """The plan that computes all tokens but those of the spans."""
        stored = np.concatenate([NO_TOKENS.position_ids, *(span.position_ids for span in spans)])
        missing = ~np.isin(wanted.position_ids, stored)
        return Plan(tuple(spans), wanted.token_ids[missing], wanted.position_ids[missing], self._exact)

    def _with_spare(self, capacity: int) -> int:
        return min(capacity + SPARE_CELLS, self._backend.spec.max_positions)
