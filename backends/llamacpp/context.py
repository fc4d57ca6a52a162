"""One live prompt: a sequence of the shared cache that joins resident modules and computes what is left.

Position gaps. `llama_decode` refuses a sequence whose next position is not its largest plus one (llama_batch_allocr
checks it for every sequence of a batch, and only an empty sequence may start anywhere). Masks are made of the cells'
position labels alone, and keys keep the rotation they were computed with. So the last cell before a gap is replaced, in
this sequence only, by a copy whose label is the run's start minus one: still before the run, and nothing else changes.
The other ways fail: a dummy cell would be attended to, a token of several sequences needs equal positions in all of
them, and shifting positions rotates keys.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, KVLayout, KVStates, Logits, Plan, Prefill, Progress
from edge_pc.backends.llamacpp.blob import Bytes
from edge_pc.backends.llamacpp.cells import TRANSIT
from edge_pc.backends.llamacpp.native import BATCH_TOKENS
from edge_pc.backends.llamacpp.pool import Pool
from edge_pc.backends.llamacpp.steps import Compute, Place, batches, placed_positions, steps
from edge_pc.errors import StatesError

# Plugs a run may take to lie in lanes behind the cells before it (see `cells.py`); exact mode takes any number.
_PLUG_LIMIT = 64


class LlamaCppContext:
    """One live prompt.

    Args:
        pool: the shared cache.
        layout: of the arrays that `encode` makes.
        capacity: cells it may come to hold.

    Attributes:
        sequence: its sequence in the cache.
    """

    def __init__(self, pool: Pool, layout: KVLayout, capacity: int) -> None:
        self._pool = pool
        self._layout = layout
        self._capacity = capacity
        self._held: list[KVStates] = []
        self._plugs: list[IntArray] = []
        self._relabelled: dict[int, int] = {}
        self.sequence = pool.take_sequence()

    def prefill(self, plan: Plan, progress: Progress | None = None) -> Prefill:
        """Join or load the plan's spans, compute its run; the logits are of the run's last token.

        Raises:
            ModelError: there is not enough memory.
            StatesError: states of a span are not in the expected format.
        """
        try:
            return self._prefill(plan, progress)
        except BaseException:
            with self._pool.lock:
                self._clear()
            raise

    def encode(self, plan: Plan, keep: IntArray, progress: Progress | None = None) -> NDArray[Any]:
        self.prefill(plan, progress)
        positions = plan.position_ids[keep]
        array: NDArray[Any] = np.zeros(self._layout.array_shape(positions), dtype=self._layout.dtype)
        if len(keep):
            blob = self._read(positions)
            array.reshape(-1)[: len(blob)] = blob
        return array

    def continue_at(self, position: int) -> None:
        """Let the sequence end right before `position`, which lies behind all its cells. The lock is held."""
        cells = self._pool.cells
        last = cells.last(self.sequence)
        if 0 <= last < position - 1:
            cells.relabel(self.sequence, last, position - 1)
            self._relabelled[last] = position - 1

    def close(self) -> None:
        with self._pool.lock:
            self._clear()
            self._pool.give_back(self.sequence)

    def _prefill(self, plan: Plan, progress: Progress | None) -> Prefill:
        started = time.perf_counter()
        todo = list(steps(plan))
        with self._pool.lock:
            self._clear()
            self._pool.admit(plan, self._capacity)
            sources = self._hold(plan, todo)
        logits, computed, forward = np.empty(0, dtype=np.float32), 0, 0.0
        for step in todo:
            if isinstance(step, Place):
                self._place(plan, step, sources[step.span])
                continue
            began = time.perf_counter()
            for start, stop in batches(step.start, step.stop, BATCH_TOKENS):
                logits = self._compute(plan, start, stop)
                computed += stop - start
                if progress:
                    progress(stop - start)
            forward += time.perf_counter() - began
        assembly = time.perf_counter() - started - forward
        return Prefill(logits, computed, assembly_ms=assembly * 1e3, forward_ms=forward * 1e3)

    def _hold(self, plan: Plan, todo: list[Place | Compute]) -> list[int | None]:
        """The resident sequence of each span; None where its cells are to be copied.

        In exact mode, modules that do not lie in the order of this prompt are loaded anew.
        """
        sources = self._hold_all(plan)
        if not plan.exact or self._in_lanes(plan, todo, sources):
            return sources
        self._release()
        self._pool.residents.evict_idle()
        sources = self._hold_all(plan)
        if self._in_lanes(plan, todo, sources):
            return sources
        self._release()
        return [None] * len(plan.spans)

    def _hold_all(self, plan: Plan) -> list[int | None]:
        residents = self._pool.residents
        sources: list[int | None] = [None] * len(plan.spans)
        positions = np.concatenate([*(span.position_ids for span in plan.spans), plan.position_ids])
        for number in sorted(range(len(plan.spans)), key=lambda number: plan.spans[number].position_ids[0]):
            span = plan.spans[number]
            before = int(np.count_nonzero(positions < span.position_ids[0]))
            sources[number] = residents.hold(span.states, before - span.start)
            if sources[number] is not None:
                self._held.append(span.states)
        return sources

    def _in_lanes(self, plan: Plan, todo: list[Place | Compute], sources: list[int | None]) -> bool:
        """Whether the cells to place lie as full prefill would put them, with only runs behind them."""
        cells = self._pool.cells
        places = [np.empty(0, dtype=np.int32)]
        for step, following in zip(todo, [*todo[1:], None], strict=True):
            if isinstance(step, Place):
                source, positions = sources[step.span], placed_positions(plan, step)
                if source is None:
                    return False
                places.append(cells.places(source, int(positions[0]), int(positions[-1]) + 1))
            elif isinstance(following, Place):
                return False
        return cells.in_lanes(np.concatenate(places))

    def _place(self, plan: Plan, step: Place, source: int | None) -> None:
        positions = placed_positions(plan, step)
        with self._pool.lock:
            if source is not None:
                self._pool.cells.join(source, self.sequence, int(positions[0]), int(positions[-1]) + 1)
            else:
                self._copy(plan, step, positions)

    def _copy(self, plan: Plan, step: Place, positions: IntArray) -> None:
        """Place cells of the prompt's own, copied from the stored states."""
        states, blobs, cells = plan.spans[step.span].states, self._pool.blobs, self._pool.cells
        blob = blobs.check(states.array, states.position_ids)
        if len(positions) < len(states.position_ids):
            blob = blobs.take(blob, np.arange(step.start, step.stop, dtype=np.int32), positions)
        self._align(len(positions), plan.exact)
        cells.load(TRANSIT, blob, positions)
        cells.join(TRANSIT, self.sequence)
        cells.drop(TRANSIT)

    def _compute(self, plan: Plan, start: int, stop: int) -> Logits:
        """Compute tokens `[start, stop)` of the run; logits of the run's last token, empty for others."""
        token_ids, position_ids = plan.token_ids[start:stop], plan.position_ids[start:stop]
        row, last = stop - start - 1, stop == len(plan.token_ids)
        companion = row == 0
        if companion:
            # A single row would go through another kernel; the second one is never seen and taken out again.
            token_ids, position_ids = token_ids[[0, 0]], position_ids[[0, 0]] + np.array([0, 1], dtype=np.int32)
        cells = self._pool.cells
        with self._pool.lock:
            self.continue_at(int(position_ids[0]))
            self._align(len(token_ids), plan.exact)
            sequences = np.full(len(token_ids), self.sequence, dtype=np.int32)
            cells.compute(token_ids, position_ids, sequences, [row] if last else [])
            if companion:
                cells.drop(self.sequence, int(position_ids[1]), int(position_ids[1]) + 1)
            return cells.logits(row) if last else np.empty(0, dtype=np.float32)

    def _align(self, count: int, exact: bool) -> None:
        """Let the next cells lie in lanes behind the present ones, if these do."""
        cells = self._pool.cells
        places = cells.places(self.sequence)
        if cells.in_lanes(places):
            limit = cells.size if exact else _PLUG_LIMIT
            self._plugs.append(cells.align(len(places), int(places.max(initial=-1)), count, limit))

    def _read(self, positions: IntArray) -> Bytes:
        """The blob of own cells at `positions`, in their order."""
        blobs, cells = self._pool.blobs, self._pool.cells
        labels = np.array([self._relabelled.get(position, position) for position in positions.tolist()])
        with self._pool.lock:
            try:
                for piece in np.split(labels, np.flatnonzero(np.diff(labels) != 1) + 1):
                    cells.join(self.sequence, TRANSIT, int(piece[0]), int(piece[-1]) + 1)
                blob = cells.read(TRANSIT)
            finally:
                cells.drop(TRANSIT)
        found = blobs.positions(blob)
        order = np.argsort(found, kind="stable").astype(np.int32)
        if not np.array_equal(found[order], labels):
            raise StatesError("the cells that libllama gives are not those that were computed")
        if np.any(np.diff(order) < 0):
            return blobs.take(blob, order, positions)
        blobs.frame(blob, positions)
        return blob

    def _release(self) -> None:
        for states in self._held:
            self._pool.residents.release(states)
        self._held.clear()

    def _clear(self) -> None:
        cells = self._pool.cells
        cells.drop(TRANSIT)
        cells.drop(self.sequence)
        for plugs in self._plugs:
            cells.unplug(plugs)
        self._plugs.clear()
        self._relabelled.clear()
        self._release()
