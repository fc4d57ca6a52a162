"""One live prompt in the cache: a sequence that joins resident modules and has its own cells.

Position gaps. `llama_decode` refuses a sequence whose next position is not its largest plus one (llama_batch_allocr
checks it for every sequence of a batch, and only an empty sequence may start anywhere). Masks are made of the cells'
position labels alone, and keys keep the rotation they were computed with. So the last cell before a gap is replaced, in
this sequence only, by a copy whose label is the run's start minus one: still before the run, and nothing else changes.
The other ways fail: a dummy cell would be attended to, a token of several sequences needs equal positions in all of
them, and shifting positions rotates keys.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, Logits, Plan
from edge_pc.backends.llamacpp.blob import Bytes
from edge_pc.backends.llamacpp.books import BLOCK
from edge_pc.backends.llamacpp.moved import Moved, moved
from edge_pc.backends.llamacpp.pool import Lease, Pool
from edge_pc.backends.llamacpp.resident import Resident
from edge_pc.backends.llamacpp.steps import Place, steps
from edge_pc.errors import EngineError, StatesError


@dataclass(slots=True)
class _Held:
    """A module in use, and the first position at which the prompt has cells of it."""

    resident: Resident
    position: int


class LivePrompt:
    """One live prompt. All of it is work for the pool.

    Args:
        pool: the shared cache.
        capacity: cells it may come to hold.
        lease: of the context whose prompt it is.
    """

    def __init__(self, pool: Pool, capacity: int, lease: weakref.ref[Lease]) -> None:
        self._pool = pool
        self._lease = lease
        self._capacity = capacity
        self._sequence: int | None = None
        self._generation = pool.generation
        self._held: dict[Moved, _Held] = {}
        self._relabelled: dict[int, int] = {}  # position → label

    def open(self) -> None:
        """Take a sequence.

        Raises:
            ContextLengthError: too many prompts are open.
        """
        self._sequence = self._pool.take_sequence(self._lease, self._leave)

    @property
    def sequence(self) -> int:
        if self._sequence is None:
            raise EngineError("this context is closed", hint="open another one")
        return self._sequence

    def start(self, plan: Plan) -> None:
        """Drop all cells and make room for a plan's.

        Raises:
            ContextLengthError: there is not enough memory.
        """
        self._clear()
        self._admit(plan)

    def go_on(self, plan: Plan) -> int:
        """Make room for a plan's cells after those that are there; returns the position after these.

        Raises:
            StatesError: they have been lost.
            ContextLengthError: there is not enough memory; all is as it was.
        """
        self._require_cells()
        self._admit(plan)
        return self.end

    @property
    def end(self) -> int:
        """The position after the last cell."""
        return self._position_of(self._pool.cells.books.last(self.sequence)) + 1

    def place(self, plan: Plan, step: Place) -> None:
        """Join cells of a module, or copy those that would not lie as in full prefill, where that is required.

        Raises:
            StatesError: the states are not of the expected format, or cannot be moved.
        """
        source, start, stop = moved(plan.spans[step.span]), step.start, step.stop
        resident = self._hold(source, start, exact=plan.exact)
        if resident is None:
            self._copy(source, start, stop)
        elif not plan.exact or self._follows(resident, start, stop):
            self._join(resident, start, stop)
        else:
            to_next_block = -(self._pool.cells.books.last_place(self.sequence) + 1) % BLOCK
            next_block = min(start + to_next_block, stop)
            self._copy(source, start, next_block)
            if self._follows(resident, next_block, stop):
                self._join(resident, next_block, stop)
            else:
                self._copy(source, next_block, stop)

    def compute(self, plan: Plan, start: int, stop: int) -> Logits:
        """Compute tokens `[start, stop)` of the run; logits of the run's last token, empty for others.

        Raises:
            StatesError: cells before them have been lost.
            ContextLengthError: there is not enough memory for a larger cache.
        """
        token_ids, position_ids = plan.token_ids[start:stop], plan.position_ids[start:stop]
        row, last = stop - start - 1, stop == len(plan.token_ids)
        companion = row == 0
        if companion:
            # A single row would go through another kernel; the second one is never seen and taken out again.
            token_ids, position_ids = token_ids[[0, 0]], position_ids[[0, 0]] + np.array([0, 1], dtype=np.int32)
        self.let_end_before(int(position_ids[0]))
        cells, sequence = self._pool.cells, self.sequence
        places = cells.extend(sequence, len(token_ids))
        cells.compute(token_ids, position_ids, np.full(len(token_ids), sequence), places, [row] if last else [])
        if companion:
            cells.drop(sequence, int(position_ids[1]), int(position_ids[1]) + 1)
        return self._pool.checked(cells.logits(row)) if last else np.empty(0, dtype=np.float32)

    def compute_scattered(self, plan: Plan) -> tuple[Logits, float]:
        """Place all of a plan's cells, then compute its whole run at once; its logits, and the seconds that took.

        Raises:
            StatesError: cells have been lost, or states are not of the expected format or cannot be moved.
            ContextLengthError: there is not enough memory.
        """
        self._to_workbench(plan)
        placed = time.perf_counter()
        logits, blob = self._pool.workbench.compute(plan.token_ids, plan.position_ids)
        seconds = time.perf_counter() - placed
        self._pool.cells.add(self.sequence, blob, plan.position_ids)
        return self._pool.checked(logits), seconds

    def attention(self, plan: Plan) -> NDArray[np.float32]:
        """How much a plan's run attends to the cells of its spans, float32 `[plan.cached_tokens]`.

        Raises:
            StatesError, ContextLengthError: as `compute_scattered`.
        """
        there = self._to_workbench(plan)
        weights = np.zeros(plan.cached_tokens, dtype=np.float32)
        if len(there):
            found = self._pool.checked(self._pool.workbench.attention(plan.token_ids, plan.position_ids))
            wanted = np.concatenate([span.position_ids for span in plan.spans])
            order = np.argsort(wanted)
            weights[order[np.searchsorted(wanted, there, sorter=order)]] = found
        return weights

    def _to_workbench(self, plan: Plan) -> IntArray:
        """Place a plan's cells, and take all of the prompt's to the workbench; returns their positions."""
        self._require_cells()
        for step in steps(plan):
            if isinstance(step, Place):
                self.place(plan, step)
        blob, positions = self._pool.cells.read_all(self.sequence)
        for position, label in self._relabelled.items():
            positions[positions == label] = position
        self._pool.workbench.load(blob, positions, len(plan.token_ids))
        return positions

    def let_end_before(self, position: int) -> None:
        """Let the sequence end right before `position`, which lies after all its cells.

        Raises:
            StatesError: the cells have been lost.
        """
        self._require_cells()
        last = self._pool.cells.books.last(self.sequence)
        if 0 <= last < position - 1:
            self._relabel(last, position - 1)

    def truncate(self, position_id: int) -> None:
        """Drop every cell at `position_id` or after it.

        Raises:
            StatesError: the cells have been lost.
        """
        self._require_cells()
        for position, label in list(self._relabelled.items()):
            if position < position_id <= label + 1:  # the last cell that stays, and no run after it any more
                self._relabel(label, position)
        self._pool.cells.drop(self.sequence, position_id)
        self._relabelled = {p: label for p, label in self._relabelled.items() if p < position_id}
        for source, held in list(self._held.items()):
            if held.position >= position_id:
                held.resident.users -= 1
                del self._held[source]

    def share(self, other: LivePrompt) -> None:
        """Replace all cells by those of another prompt, which keeps them, too.

        Raises:
            StatesError: they have been lost.
        """
        other._require_cells()
        self._clear()
        self._pool.cells.join(other.sequence, self.sequence)
        self._held = {source: replace(held) for source, held in other._held.items()}
        for held in self._held.values():
            held.resident.users += 1
        self._relabelled = dict(other._relabelled)

    def read(self, positions: IntArray) -> Bytes:
        """The blob of the cells at `positions`, in their order.

        Raises:
            StatesError: they have been lost, or libllama gives others.
        """
        self._require_cells()
        blobs = self._pool.blobs
        labels = np.array([self._relabelled.get(position, position) for position in positions.tolist()], dtype=np.int32)
        blob = self._pool.cells.read(self.sequence, labels)
        found = blobs.positions(blob)
        order = np.argsort(found, kind="stable").astype(np.int32)
        if not np.array_equal(found[order], labels):
            raise StatesError("the cells that libllama gives are not those that were computed")
        if np.any(np.diff(order) < 0):
            return blobs.take(blob, order, positions)
        blobs.frame(blob, positions)
        return blob

    def _leave(self) -> None:
        self._clear()
        self._sequence = None

    def _clear(self) -> None:
        self._pool.cells.drop(self.sequence)
        for held in self._held.values():
            held.resident.users -= 1
        self._held.clear()
        self._relabelled.clear()
        self._generation = self._pool.generation

    def _admit(self, plan: Plan) -> None:
        present = len(self._pool.cells.books.labels(self.sequence))
        left = self._capacity - present - plan.cached_tokens
        self._pool.admit(plan, self.sequence, max(len(plan.token_ids), left))

    def _require_cells(self) -> None:
        if self._generation != self._pool.generation:
            raise StatesError("this prompt's cells were lost when other work failed", hint="prefill it again")

    def _position_of(self, label: int) -> int:
        return next((position for position, other in self._relabelled.items() if other == label), label)

    def _relabel(self, label: int, new: int) -> None:
        position = self._position_of(label)
        self._pool.cells.relabel(self.sequence, label, new)
        self._relabelled.pop(position, None)
        if new != position:
            self._relabelled[position] = new

    def _hold(self, source: Moved, start: int, *, exact: bool) -> Resident | None:
        """The resident that has the states; None when there cannot be one more, or none with all of their cells."""
        if source in self._held:
            return self._held[source].resident
        cells, residents, positions = self._pool.cells, self._pool.residents, source.position_ids
        if positions[0] < 0:  # the cells before the span's would have labels that libllama takes for free places
            return None
        resident = residents.find(source)
        if resident and exact and not resident.users and not self._follows(resident, start, len(positions)):
            residents.evict(resident)  # to be loaded where it lies as it should
        resident = residents.hold(source, lambda count: cells.extend(self.sequence, count))
        if resident:
            self._held[source] = _Held(resident, int(positions[start]))
        return resident

    def _follows(self, resident: Resident, start: int, stop: int) -> bool:
        """Whether cells `[start, stop)` of a resident lie after the prompt's as in full prefill."""
        return self._pool.cells.books.follow(
            self.sequence, self._pool.cells.books.places(*_range(resident, start, stop))
        )

    def _join(self, resident: Resident, start: int, stop: int) -> None:
        """Share cells `[start, stop)` of a resident."""
        sequence, first, end = _range(resident, start, stop)
        self._pool.cells.join(sequence, self.sequence, first, end)

    def _copy(self, source: Moved, start: int, stop: int) -> None:
        """Add cells `[start, stop)` of stored states as the prompt's own."""
        if start < stop:
            blob = self._pool.reader.read(source, start, stop)
            self._pool.cells.add(self.sequence, blob, source.position_ids[start:stop])


def _range(resident: Resident, start: int, stop: int) -> tuple[int, int, int]:
    """A resident's sequence, and the positions `[first, end)` that its cells `[start, stop)` take."""
    if start == stop:
        return resident.sequence, 0, 0
    position_ids = resident.source.position_ids
    return resident.sequence, int(position_ids[start]), int(position_ids[stop - 1]) + 1


def decode(pool: Pool, prompts: Sequence[LivePrompt], token_ids: IntArray, position_ids: IntArray) -> list[Logits]:
    """Compute the next token of each prompt in one pass over the weights; logits float32 `[vocab]` each.

    Cells at these positions or after them are dropped first, so that who was interrupted may ask again.

    Raises:
        StatesError: a prompt's cells have been lost.
        ContextLengthError: there is not enough memory for a larger cache.
    """
    places = []
    for prompt, position in zip(prompts, position_ids.tolist(), strict=True):
        if prompt.end > position:
            prompt.truncate(position)
        prompt.let_end_before(position)
        places += pool.cells.extend(prompt.sequence, 1).tolist()
    order = np.argsort(places)  # libllama fills places in this order
    sequences = np.array([prompt.sequence for prompt in prompts])
    rows = range(len(prompts))
    pool.cells.compute(token_ids[order], position_ids[order], sequences[order], np.array(places)[order], rows)
    row_of = np.argsort(order)
    return [pool.checked(pool.cells.logits(int(row))) for row in row_of]
