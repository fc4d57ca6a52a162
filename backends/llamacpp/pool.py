"""The one cache that all prompts share: its room, its sequences, its resident modules, and the lock around them.

A prompt is admitted when there is room for all that it may come to need, its answer included, so that an answer that
has begun is not cut off by another prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_pc.backends.base import Plan
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import FIRST_SEQUENCE, Cells
from edge_pc.backends.llamacpp.resident import Residents
from edge_pc.backends.llamacpp.session import SEQUENCES, Session
from edge_pc.errors import ContextLengthError

if TYPE_CHECKING:
    from edge_pc.backends.llamacpp.context import LlamaCppContext

# Cells of the cache unless a prompt needs more; all of their memory is taken at once (23 KB each for SmolLM2).
DEFAULT_CELLS = 8192

# Cells beside those of the plan: plugs, copies of relabelled cells, a companion row.
_SPARE_CELLS = 256

_RESIDENT_SEQUENCES = 64

# How long a prompt waits for the prompts of other threads before it gives up.
_WAIT_SECONDS = 60.0


class Pool:
    """The cache and who uses it. Everything that changes it happens while `lock` is held.

    Args:
        open_session: makes a context with so many cells.
        blobs: the format of its states.
        cells: the room to begin with.
    """

    def __init__(self, open_session: Callable[[int], Session], blobs: BlobFormat, cells: int) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.blobs = blobs
        self._open_session = open_session
        self._contexts: list[LlamaCppContext] = []
        self._sequences = list(range(FIRST_SEQUENCE + _RESIDENT_SEQUENCES, SEQUENCES))
        self._set_up(cells)

    def enter(self, context: LlamaCppContext) -> int:
        """Register a new context and make sure that its capacity fits at all; gives its sequence.

        Raises:
            ContextLengthError: too many contexts are open, or the cache is too small and in use.
        """
        with self.lock:
            room = context.capacity + _SPARE_CELLS
            if room > self.session.cells:
                self._wait_for(lambda: not self._contexts, room)
                self.session.close()
                self._set_up(room)
            if not self._sequences:
                raise ContextLengthError(f"{len(self._contexts)} prompts are open at once", hint="close some of them")
            self._contexts.append(context)
            return self._sequences.pop()

    def leave(self, context: LlamaCppContext) -> None:
        """Forget a context; its cells must be gone."""
        with self.lock:
            self._contexts.remove(context)
            self._sequences.append(context.sequence)
            self.lock.notify_all()

    def admit(self, plan: Plan, context: LlamaCppContext) -> None:
        """Make room for a plan and the rest of its context's capacity; waits for prompts of other threads.

        Modules that nobody uses, this plan included, are evicted.

        Raises:
            ContextLengthError: there is no room, and none is to be expected.
        """
        wanted = {span.states.key: span.states for span in plan.spans}

        def fits() -> bool:
            self.residents.evict_idle(wanted)
            loads = sum(self.residents.missing(states) for states in wanted.values())
            needed = loads + max(len(plan.token_ids), context.capacity - plan.cached_tokens) + _SPARE_CELLS
            needed += sum(other.reserved for other in self._contexts if other is not context)
            return self.cells.free >= needed

        self._wait_for(fits, context.capacity)

    def close(self) -> None:
        """Free the cache."""
        with self.lock:
            self.session.close()

    def _set_up(self, cells: int) -> None:
        self.session = self._open_session(cells)
        self.cells = Cells(self.session, self.blobs)
        resident = range(FIRST_SEQUENCE, FIRST_SEQUENCE + _RESIDENT_SEQUENCES)
        self.residents = Residents(self.cells, self.blobs, resident)

    def _wait_for(self, condition: Callable[[], bool], room: int) -> None:
        if condition():
            return
        me = threading.get_ident()
        others = any(context.thread != me for context in self._contexts)
        if not others or not self.lock.wait_for(condition, timeout=_WAIT_SECONDS):
            raise ContextLengthError(
                f"the prompt needs {room} cells; of the cache's {self.session.cells}, {self.cells.free} are free "
                f"beside {len(self._contexts)} open prompts",
                hint="close other prompts first",
            )
