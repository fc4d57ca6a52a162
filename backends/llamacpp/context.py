"""A context as its caller sees it: it lets the pool's thread work, step by step, and may be interrupted between."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, KVLayout, Logits, OnTokens, Plan, Prefill
from edge_pc.backends.llamacpp.native import BATCH_TOKENS
from edge_pc.backends.llamacpp.pool import Lease, Pool
from edge_pc.backends.llamacpp.prompt import LivePrompt
from edge_pc.backends.llamacpp.steps import Place, batches, is_scattered, steps
from edge_pc.errors import ContextLengthError


class LlamaCppContext:
    """One live prompt.

    Args:
        pool: the shared cache.
        layout: of the arrays that `encode` makes.
        capacity: cells it may come to hold.

    Attributes:
        prompt: its cells in the cache.

    Raises:
        ContextLengthError: too many contexts are open at once.
    """

    def __init__(self, pool: Pool, layout: KVLayout, capacity: int) -> None:
        self._pool = pool
        self._layout = layout
        self._lease: Lease | None = Lease()
        self.prompt = LivePrompt(pool, capacity, weakref.ref(self._lease))
        pool.run(self.prompt.open)

    def prefill(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """Join or load the plan's spans, compute its run.

        Raises:
            StatesError: states of a span are not in the expected format, or cannot be moved.
            ContextLengthError: there is not enough memory.
        """
        started = time.perf_counter()
        self._pool.run(partial(self.prompt.start, plan))
        return self._fill(plan, started, on_tokens)

    def append(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """As `prefill`, after what is there.

        Raises:
            StatesError: as `prefill`; or the cells that were there have been lost.
            ContextLengthError: there is not enough memory; the context is as it was.
        """
        started = time.perf_counter()
        end = self._pool.run(partial(self.prompt.go_on, plan))
        try:
            return self._fill(plan, started, on_tokens)
        except ContextLengthError:
            self.truncate(end)
            raise

    def attention(self, plan: Plan) -> NDArray[np.float32]:
        """Averaged over the plan's last tokens, all heads, and a few layers; see `Context.attention`.

        Raises:
            StatesError, ContextLengthError: as `prefill`.
        """
        self._pool.run(partial(self.prompt.start, plan))
        return self._pool.run(partial(self.prompt.attention, plan))

    def truncate(self, position_id: int) -> None:
        """Drop every cell at `position_id` or after it.

        Raises:
            StatesError: the cells that were there have been lost.
        """
        self._pool.run(partial(self.prompt.truncate, position_id))

    def encode(self, plan: Plan, keep: IntArray, on_tokens: OnTokens | None = None) -> NDArray[Any]:
        """Compute the plan's run and return the KV states of its tokens `keep`; see `Context.encode`.

        Raises:
            StatesError, ContextLengthError: as `prefill`.
        """
        self.prefill(plan, on_tokens)
        return self.read(plan.position_ids[keep])

    def read(self, position_ids: IntArray) -> NDArray[Any]:
        """The KV states of cells that are there; see `Context.read`.

        Raises:
            StatesError: a cell is not there, or the cells have been lost.
        """
        array: NDArray[Any] = np.zeros(self._layout.array_shape(position_ids), dtype=self._layout.dtype)
        if len(position_ids):
            blob = self._pool.run(partial(self.prompt.read, position_ids))
            array.reshape(-1)[: len(blob)] = blob
        return array

    def fork(self, capacity: int) -> LlamaCppContext:
        """A second context that shares the cells; see `Context.fork`.

        Raises:
            StatesError: the cells have been lost.
            ContextLengthError: too many contexts are open at once.
        """
        forked = LlamaCppContext(self._pool, self._layout, capacity)
        self._pool.run(partial(forked.prompt.share, self.prompt))
        return forked

    def close(self) -> None:
        """Leave the cache; nobody waits for it."""
        self._lease = None
        self._pool.later(self._pool.tidy)

    def _fill(self, plan: Plan, started: float, on_tokens: OnTokens | None) -> Prefill:
        """Place and compute the plan's cells in position order."""
        if is_scattered(plan):
            logits, forward = self._pool.run(partial(self.prompt.compute_scattered, plan))
            if on_tokens:
                on_tokens(len(plan.token_ids))
            return _filled(logits, len(plan.token_ids), started, forward)
        logits, computed, forward = np.empty(0, dtype=np.float32), 0, 0.0
        places: list[Place] = []
        for step in steps(plan):
            if isinstance(step, Place):
                places.append(step)
                continue
            for start, stop in batches(step.start, step.stop, BATCH_TOKENS):
                logits, seconds = self._pool.run(partial(self._step, plan, places, start, stop))
                places, computed, forward = [], computed + stop - start, forward + seconds
                if on_tokens:
                    on_tokens(stop - start)
        return _filled(logits, computed, started, forward)

    def _step(self, plan: Plan, places: list[Place], start: int, stop: int) -> tuple[Logits, float]:
        """Work for the pool: place cells, then compute tokens `[start, stop)` of the run. Also the seconds of that."""
        for step in places:
            self.prompt.place(plan, step)
        placed = time.perf_counter()
        return self.prompt.compute(plan, start, stop), time.perf_counter() - placed


def _filled(logits: Logits, computed: int, started: float, forward: float) -> Prefill:
    assembly = time.perf_counter() - started - forward
    return Prefill(logits, computed, assembly_ms=assembly * 1e3, forward_ms=forward * 1e3)
