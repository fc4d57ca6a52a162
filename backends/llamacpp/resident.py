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
from edge_pc.backends.llamacpp.cells import Cells
from edge_pc.backends.llamacpp.moved import BlobReader, Moved


@dataclass(slots=True, eq=False)
class Resident:
    """A module in the cache, at one place: the sequence that has its cells, and how many prompts use it."""

    source: Moved
    sequence: int
    users: int = 0


class Residents:
    """The modules in the cache, least recently used first.

    Args:
        cells: the cache.
        reader: makes blobs of states.
        sequences: numbers of the sequences that residents may take.
    """

    def __init__(self, cells: Cells, reader: BlobReader, sequences: Collection[int]) -> None:
        self._cells = cells
        self._reader = reader
        self._sequences = sequences
        self.forget()

    def find(self, source: Moved) -> Resident | None:
        """The resident that has these states at this place, if there is one."""
        return self._residents.get(source)

    def hold(self, source: Moved, places: Callable[[int], IntArray]) -> Resident | None:
        """Keep states in the cache until they are released, loading them if they are not there.

        Args:
            places: gives the places for the given number of new cells.

        Returns:
            None when residents have no sequence left.

        Raises:
            StatesError: the states are not of the expected format, or cannot be moved.
            ContextLengthError: there is not enough room.
        """
        resident = self.find(source)
        if resident is None:
            if not self._free_sequences and not self._evict_oldest():
                return None
            positions = source.position_ids
            blob = self._reader.read(source, 0, len(positions))
            resident = Resident(source, self._free_sequences[-1])
            self._cells.load(resident.sequence, blob, positions, places(len(positions)))
            self._residents[source] = resident
            self._free_sequences.pop()
        resident.users += 1
        self._residents.move_to_end(source)
        return resident

    def idle_cells(self) -> int:
        """Cells of the modules that no prompt uses."""
        return sum(len(resident.source.states.position_ids) for resident in self._idle())

    def evict_idle(self, wanted: Collection[Moved] = ()) -> None:
        """Evict the modules that no prompt uses, but for those that the next one wants.

        Args:
            wanted: its states, where it has them.
        """
        for resident in self._idle():
            if resident.source not in wanted:
                self.evict(resident)

    def evict(self, resident: Resident) -> None:
        """Take a module out of the cache; prompts that use it keep its cells."""
        self._cells.drop(resident.sequence)
        self._free_sequences.append(resident.sequence)
        del self._residents[resident.source]

    def forget(self) -> None:
        """Know nothing of a cache that has been emptied."""
        self._residents: OrderedDict[Moved, Resident] = OrderedDict()
        self._free_sequences = list(self._sequences)

    def _idle(self) -> list[Resident]:
        return [resident for resident in self._residents.values() if not resident.users]

    def _evict_oldest(self) -> bool:
        idle = self._idle()
        if idle:
            self.evict(idle[0])
        return bool(idle)
