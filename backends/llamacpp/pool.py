"""The one cache that all prompts share: its sequences, its resident modules, and the thread that works on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from edge_pc.backends.base import Logits, Plan
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import FIRST_SEQUENCE, Cells
from edge_pc.backends.llamacpp.moved import BlobReader, moved
from edge_pc.backends.llamacpp.native import SEQUENCES, NativeContext
from edge_pc.backends.llamacpp.resident import Residents
from edge_pc.backends.llamacpp.thread import NativeThread
from edge_pc.backends.llamacpp.workbench import Workbench
from edge_pc.errors import ContextLengthError, EdgePCError, StatesError

T = TypeVar("T")

# The cache to begin with. All of its memory is taken at once, so it is smaller for models with large cells (23 KB for
# SmolLM2-135M, half a megabyte for a 7B model without grouped queries).
_FIRST_CELLS = 8192
_FIRST_BYTES = 512 << 20

# Cells beside those of a plan: the parts of blocks that are copied, a companion row.
_SPARE_CELLS = 256

_RESIDENTS = range(FIRST_SEQUENCE, FIRST_SEQUENCE + 64)
_PROMPTS = range(_RESIDENTS.stop, SEQUENCES)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the cache holds.

    Attributes:
        cells: all there are.
        held: of these, in use by open prompts; a module that several share counts once.
        idle: modules that no open prompt uses.
    """

    cells: int
    held: int
    idle: int


class Lease:
    """Held by a context as long as it is open, and by nobody else. When it is gone, the context's prompt leaves.

    A call could be interrupted before it is made; that something is gone can be seen at any time.
    """


class Pool:
    """The cache and who uses it. `run` and `later` may be called by any thread; all else is work for them.

    Args:
        thread: does the work.
        open_context: makes an empty cache of the given number of cells.
        blobs: the format of its states.
        reader: makes blobs of stored states.
        workbench: computes tokens between cached ones.
        size: cells to begin with; None: as many as are usual.

    Attributes:
        generation: counts how often the cache was emptied because a failure left it in an unknown state, or because it
            held infinite numbers.
    """

    def __init__(
        self,
        thread: NativeThread,
        open_context: Callable[[int], NativeContext],
        blobs: BlobFormat,
        reader: BlobReader,
        workbench: Workbench,
        size: int | None,
    ) -> None:
        self._thread = thread
        self.blobs = blobs
        self.reader = reader
        self.workbench = workbench
        usual = max(_SPARE_CELLS, min(_FIRST_CELLS, _FIRST_BYTES // blobs.nbytes(1)))
        self.cells = Cells(open_context, blobs, size or usual)
        self.residents = Residents(self.cells, reader, _RESIDENTS)
        self.generation = 0
        self._broken = False
        self._sequences = list(_PROMPTS)
        self._leases: dict[int, tuple[weakref.ref[Lease], Callable[[], None]]] = {}

    def run(self, work: Callable[[], T]) -> T:
        """Work on the cache and wait for it; see `NativeThread.begin`."""
        return self._thread.run(partial(self._guarded, work))

    def later(self, work: Callable[[], object]) -> None:
        """Work on the cache some time; see `NativeThread.later`."""
        self._thread.later(partial(self._guarded, work))

    def take_sequence(self, lease: weakref.ref[Lease], leave: Callable[[], None]) -> int:
        """A sequence for a new prompt.

        Args:
            lease: the sequence is the prompt's until this is gone.
            leave: empties it then.

        Raises:
            ContextLengthError: too many prompts are open.
        """
        self.tidy()
        if not self._sequences:
            raise ContextLengthError("too many prompts are open at once", hint="close some of them")
        sequence = self._sequences.pop()
        self._leases[sequence] = lease, leave
        return sequence

    def tidy(self) -> None:
        """Let prompts leave whose contexts are closed or gone."""
        for sequence, (lease, leave) in list(self._leases.items()):
            if lease() is None:
                leave()
                del self._leases[sequence]
                self._sequences.append(sequence)

    def admit(self, plan: Plan, sequence: int, further: int) -> None:
        """Make room for a plan's cells after those of `sequence`, and for `further` ones that may be computed.

        Modules that nobody uses, this plan included, leave.

        Raises:
            ContextLengthError: there is not enough memory; the sequence is as it was.
        """
        self.tidy()
        residents, cells = self.residents, self.cells
        wanted = dict.fromkeys(moved(span) for span in plan.spans)
        residents.evict_idle(wanted)
        present = [resident.sequence for source in wanted if (resident := residents.find(source))]
        last = max(cells.books.last_place(one) for one in (sequence, *present))
        missing = sum(len(source.states.position_ids) for source in wanted if not residents.find(source))
        count = missing + further + _SPARE_CELLS
        if cells.room(last) < count and residents.idle_cells() and not self.use().held:
            residents.evict_idle()  # the room below them is better than a larger cache
            self.admit(plan, sequence, further)
        else:
            cells.make_room(count, last)

    def checked(self, logits: Logits) -> Logits:
        """The same logits, when they are numbers.

        Infinite numbers in damaged states make all that is computed over the same cache useless, even after their cells
        are free: masks and weights of zero do not undo them. So the cache is emptied before the next work on it.

        Raises:
            StatesError: they are not.
        """
        if not np.isfinite(logits).all():
            self._broken = True
            raise StatesError(
                "no answer can be computed: states in the cache hold infinite numbers, or the model's file does",
                hint="prefill the prompt again, without stored states",
            )
        return logits

    def use(self) -> CacheUse:
        """What the cache holds."""
        self.tidy()
        held = self.cells.books.used(_PROMPTS)
        return CacheUse(self.cells.books.size, held, self.cells.books.used(range(FIRST_SEQUENCE, SEQUENCES)) - held)

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._broken:
            self.cells.clear()
            self.workbench.close()
            self.residents.forget()
            self.generation += 1
            self._broken = False
        try:
            return work()
        except EdgePCError:  # raised where the books agree with the cache
            raise
        except BaseException:  # refused memory, say, between two changes that belong together
            self._broken = True
            raise
