"""Modules that stay in the cache in separate sequences, so that prompts join them without a copy.

A cell costs every forward of every prompt its share of attention, used or not: on 2 cores about 35 µs for a run of 32
tokens and 3 µs for each decoded token, against 3.5 µs to load it again. So a module that no prompt uses stays only
until the next prompt comes and does not use it either: the budget of idle cells is what the last prompt left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from edge_pc.backends.base import IntArray
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import Cells
from edge_pc.backends.llamacpp.moved import MovedStates


@dataclass(slots=True, eq=False)
class Resident:
    """A module in the cache: its states, the sequence that has its cells, and how many prompts use it."""

    states: MovedStates
    sequence: int
    users: int = 0


class Residents:
    """The modules in the cache, least recently used first.

    Args:
        cells: the cache.
        blobs: the format of the states.
        sequences: numbers of the sequences that residents may take.
    """

    def __init__(self, cells: Cells, blobs: BlobFormat, sequences: Collection[int]) -> None:
        self._cells = cells
        self._blobs = blobs
        self._sequences = sequences
        self.forget()

    def find(self, states: MovedStates) -> Resident | None:
        """The resident that has these states, if there is one."""
        return self._residents.get(states)

    def hold(self, states: MovedStates, places: Callable[[int], IntArray]) -> Resident | None:
        """Keep states in the cache until they are released, loading them if they are not there.

        Args:
            places: gives the places for the given number of new cells.

        Returns:
            None when residents have no sequence left.

        Raises:
            StatesError: the states are not of the expected format, or cannot be moved.
            ContextLengthError: there is not enough room.
        """
        resident = self.find(states)
        if resident is None:
            if not self._free_sequences and not self._evict_oldest():
                return None
            blob = states.blob(self._blobs)
            resident = Resident(states, self._free_sequences[-1])
            self._cells.load(resident.sequence, blob, states.position_ids, places(states.tokens))
            self._residents[states] = resident
            self._free_sequences.pop()
        resident.users += 1
        self._residents.move_to_end(states)
        return resident

    def idle_cells(self) -> int:
        """Cells of the modules that no prompt uses."""
        return sum(resident.states.tokens for resident in self._idle())

    def evict_idle(self, wanted: Collection[MovedStates] = ()) -> None:
        """Evict the modules that no prompt uses, but for those that the next one wants.

        Args:
            wanted: its states.
        """
        for resident in self._idle():
            if resident.states not in wanted:
                self.evict(resident)

    def evict(self, resident: Resident) -> None:
        """Take a module out of the cache; prompts that use it keep its cells."""
        self._cells.drop(resident.sequence)
        self._free_sequences.append(resident.sequence)
        del self._residents[resident.states]

    def forget(self) -> None:
        """Know nothing of a cache that has been emptied."""
        # By the object, not by its key: states that were found to be damaged are made again under the same key.
        self._residents: OrderedDict[MovedStates, Resident] = OrderedDict()
        self._free_sequences = list(self._sequences)

    def _idle(self) -> list[Resident]:
        return [resident for resident in self._residents.values() if not resident.users]

    def _evict_oldest(self) -> bool:
        idle = self._idle()
        if idle:
            self.evict(idle[0])
        return bool(idle)
