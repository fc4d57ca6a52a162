"""The one cache that all prompts share: its room, its sequences, its resident modules, and the lock around them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_pc.backends.base import Plan
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import FIRST_SEQUENCE, Cells
from edge_pc.backends.llamacpp.native import SEQUENCES, Session
from edge_pc.backends.llamacpp.resident import Residents
from edge_pc.errors import ContextLengthError

# The cache to begin with. All of its memory is taken at once, so it is smaller for models with large cells (23 KB for
# SmolLM2-135M, half a megabyte for a 7B model without grouped queries).
_FIRST_CELLS = 8192
_FIRST_BYTES = 512 << 20

# Cells beside those of a plan: plugs, copies of relabelled cells, a companion row.
_SPARE_CELLS = 256

# A larger cache is made at least by this factor larger, because all cells move into it.
_GROWTH = 1.5

_RESIDENT_SEQUENCES = 64


class Pool:
    """The cache and who uses it. Whatever changes it happens while `lock` is held.

    Args:
        open_session: makes an empty cache of so many cells.
        blobs: the format of its states.
        cells: the room to begin with; None: what is usual.
    """

    def __init__(self, open_session: Callable[[int], Session], blobs: BlobFormat, cells: int | None) -> None:
        self.lock = threading.RLock()
        self.blobs = blobs
        self._open_session = open_session
        usual = max(_SPARE_CELLS, min(_FIRST_CELLS, _FIRST_BYTES // blobs.nbytes(1)))
        self.cells = Cells(open_session(cells or usual), blobs)
        shared = FIRST_SEQUENCE + _RESIDENT_SEQUENCES
        self.residents = Residents(self.cells, blobs, range(FIRST_SEQUENCE, shared))
        self._sequences = list(range(shared, SEQUENCES))

    def take_sequence(self) -> int:
        """A sequence for a new prompt.

        Raises:
            ContextLengthError: too many prompts are open.
        """
        with self.lock:
            if not self._sequences:
                raise ContextLengthError("too many prompts are open at once", hint="close some of them")
            return self._sequences.pop()

    def give_back(self, sequence: int) -> None:
        """A prompt's sequence, which is empty."""
        with self.lock:
            self._sequences.append(sequence)

    def admit(self, plan: Plan, capacity: int) -> None:
        """Make room for a plan and for what is left of its context's capacity.

        Modules that nobody uses, this plan included, leave.
        """
        wanted = {span.states.key: span.states for span in plan.spans}
        self.residents.evict_idle(wanted)
        loads = sum(self.residents.missing(states) for states in wanted.values())
        self.make_room(loads + max(len(plan.token_ids), capacity - plan.cached_tokens) + _SPARE_CELLS)

    def make_room(self, cells: int) -> None:
        """See to it that so many cells are free; where they are not, everything moves into a larger cache.

        Raises:
            ModelError: there is not enough memory; all is as it was.
        """
        missing = cells - self.cells.free
        if missing > 0:
            self.cells.move_to(self._open_session(max(self.cells.size + missing, int(_GROWTH * self.cells.size))))

    def close(self) -> None:
        """Free the cache."""
        with self.lock:
            self.cells.close()
