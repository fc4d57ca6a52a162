"""Modules that stay in the cache in sequences of their own, so that prompts join them without a copy.

A cell costs every forward of every prompt its share of attention, used or not: on 2 cores about 35 µs for a run of 32
tokens and 3 µs for each decoded token, against 3.5 µs to load it again. So a module that no prompt uses stays only
until the next prompt comes and does not use it either: the budget of idle cells is what the last prompt left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from edge_pc.backends.base import KVStates
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.cells import Cells

# Plugs that a load may take to lie in lanes (see `cells.py`): few, they are copied too.
_PLUG_LIMIT = 64


@dataclass(slots=True)
class _Resident:
    states: KVStates
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
        self._free_sequences = list(sequences)
        self._residents: OrderedDict[str, _Resident] = OrderedDict()

    def missing(self, states: KVStates) -> int:
        """Cells that `hold` would load."""
        return 0 if self._find(states) else len(states.position_ids)

    def hold(self, states: KVStates, index: int) -> int | None:
        """Keep states in the cache until they are released, loading them if they are not there.

        Args:
            index: of the first of their cells in the prompt, for their place.

        Returns:
            The sequence that has them; None when residents have no sequence left.

        Raises:
            StatesError: the states are not of the expected format.
            ContextLengthError: there are not enough free cells.
        """
        resident = self._find(states)
        if resident is None:
            if not self._free_sequences and not self._evict_oldest():
                return None
            resident = _Resident(states, self._free_sequences[-1])
            self._load(states, resident.sequence, index)
            self._residents[states.key] = resident
            self._free_sequences.pop()
        resident.users += 1
        self._residents.move_to_end(states.key)
        return resident.sequence

    def release(self, states: KVStates) -> None:
        """One user less."""
        self._residents[states.key].users -= 1

    def evict_idle(self, wanted: Collection[str] = ()) -> None:
        """Evict the modules that no prompt uses, but for those that the next one wants.

        Args:
            wanted: keys of their states.
        """
        for resident in list(self._residents.values()):
            if not resident.users and resident.states.key not in wanted:
                self._evict(resident)

    def _find(self, states: KVStates) -> _Resident | None:
        return self._residents.get(states.key)

    def _load(self, states: KVStates, sequence: int, index: int) -> None:
        blob = self._blobs.check(states.array, states.position_ids)
        plugs = self._cells.align(index, -1, len(states.position_ids), _PLUG_LIMIT)
        try:
            self._cells.load(sequence, blob, states.position_ids)
        finally:
            self._cells.unplug(plugs)

    def _evict_oldest(self) -> bool:
        resident = next((r for r in self._residents.values() if not r.users), None)
        if resident is not None:
            self._evict(resident)
        return resident is not None

    def _evict(self, resident: _Resident) -> None:
        self._cells.drop(resident.sequence)
        self._free_sequences.append(resident.sequence)
        del self._residents[resident.states.key]
