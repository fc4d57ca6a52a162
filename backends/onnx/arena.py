"""The arena: one KV buffer that a live context attends to, filled by mapping file pages over it or by copying.

The arena is one anonymous mapping, seen by numpy and by ONNX Runtime alike: `[layers, 2, kv_heads, capacity, head_dim]`
float32. Mapping puts the pages of a module's file over the arena's own (`MAP_FIXED | MAP_PRIVATE`), so that nothing is
copied, prompts and processes share the pages, and a write never reaches the file. What is moved to other positions than
it was encoded at is always copied, its keys rotated on the way.

Cells are placed in position order, from slot 0 on, spans before the run. A file stores a cell at position p in a row
congruent to p modulo the tokens of a page, so where a prompt leaves no gap, the pages of all its files fit the arena's,
and only the few rows before a file's first whole page are copied. After a gap they fit by chance only; then a few cells
of the piece's end are put before its first, unless the order must be exact.

Invariant: no cell of a piece that can serve again is ever written to. What the last prompt placed can therefore stay,
and the next prompt only replaces what differs. Of a piece with cells that were computed again (`hide`), nothing stays.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, KVStates, Span
from edge_pc.backends.onnx.layout import PagedLayout
from edge_pc.backends.onnx.pieces import Piece, Placed, any_mapped, common_prefix, in_position_order, mappable
from edge_pc.errors import ContextLengthError, StatesError
from edge_pc.models.positions import PositionEncoding
from edge_pc.models.rotation import rotate
from edge_pc.system.cpu import allowed_cpus
from edge_pc.system.pages import can_map, map_over

# Mapping costs a system call per layer, K/V and head whatever the length; copying costs per byte, and a page fault per
# page where the arena has no memory yet. From these numbers of tokens on mapping is the faster one (measured on Zen 4:
# mapping 1.4 ms and 0.5 ms of page faults, copying 2 ms for 384 tokens, into a fresh arena 1.2 ms for 32).
MAP_FROM_TOKENS_WARM = 384
MAP_FROM_TOKENS_FRESH = 32

# Instead of the position of a cell that no token sees.
HIDDEN = np.iinfo(np.int32).max


class Arena:
    """A KV buffer for `capacity` cells.

    Args:
        layout: of the states that are placed.
        position: how the model encodes positions: keys that are moved must be rotated.
        capacity: cells; rounded up so that each head's row starts on a page.
        assembly: `map`, `copy`, or `auto`: whichever is faster for each span.

    Attributes:
        kv: float32 `[layers, 2, kv_heads, capacity, head_dim]`, keys at index 0 of the second axis.
        token_ids, position_ids: int32 `[capacity]`, of the cells in each slot.
        cells: slots in use, from 0 on.
    """

    def __init__(self, layout: PagedLayout, position: PositionEncoding, capacity: int, assembly: str = "auto") -> None:
        self._layout = layout
        self._position = position
        self._copiers = ThreadPoolExecutor(allowed_cpus())
        self.capacity = layout.padded(capacity)
        self._token_bytes = layout.head_dim * 4
        self._row_bytes = self.capacity * self._token_bytes
        self._memory = _anonymous(layout.layers * 2 * layout.kv_heads * self._row_bytes)
        shape = (layout.layers, 2, layout.kv_heads, self.capacity, layout.head_dim)
        self.kv: NDArray[np.float32] = np.frombuffer(self._memory, dtype=np.float32).reshape(shape)
        self.token_ids: IntArray = np.zeros(self.capacity, dtype=np.int32)
        self.position_ids: IntArray = np.zeros(self.capacity, dtype=np.int32)
        self.cells = 0
        self._placed: list[Placed] = []
        self._assembly = assembly if can_map() else "copy"
        self._written = 0  # slots before this one have memory, mapped or not

    @property
    def parts(self) -> list[Piece]:
        """What was placed, in the parts that it was copied and mapped in, by slot."""
        return [part for placed in self._placed for part in placed.parts]

    def place(self, spans: Sequence[Span], *, exact: bool) -> int:
        """Replace all cells by the spans', in slots 0, 1, …; returns how many were not in place already.

        Args:
            exact: strictly in position order, so that sums are added up as in full prefill.

        Raises:
            StatesError: a file was cut short since it was opened, or a span is moved and the model does not allow it.
            ContextLengthError: there is no room for them.
        """
        pieces = in_position_order(spans, first_slot=0)
        self._require_room(pieces[-1].end if pieces else 0)
        kept = common_prefix(self._placed, pieces, exact)
        replaced = self._placed[kept:]
        del self._placed[kept:]  # first: what an interrupt leaves half replaced must not count as placed
        self.cells = self._placed_cells()
        if not kept and any_mapped(replaced):
            self._drop_pages()
        self._unmap(part for placed in replaced for part in placed.parts)
        added = [Placed(piece, self._parts(piece, exact)) for piece in pieces[kept:]]
        if not kept and any_mapped(added):
            self._drop_pages()
        return self._add(added)

    def extend(self, spans: Sequence[Span], *, exact: bool) -> int:
        """Add the spans' cells after those that are there; returns how many they are. See `place`."""
        pieces = in_position_order(spans, first_slot=self.cells)
        self._require_room(pieces[-1].end if pieces else self.cells)
        return self._add([Placed(piece, self._parts(piece, exact)) for piece in pieces])

    def copy_of(self, other: Arena) -> None:
        """Replace all cells by another arena's, in the same slots.

        Raises:
            StatesError: a file was cut short since it was opened.
            ContextLengthError: there is no room for them.
        """
        self._require_room(other.cells)
        self.place((), exact=False)
        self._add(Placed(placed.piece, placed.parts) for placed in takewhile(_unchanged, other._placed))
        rest = slice(self.cells, other.cells)
        self.kv[:, :, :, self.take(other.token_ids[rest], other.position_ids[rest])] = other.kv[:, :, :, rest]

    def slots_of(self, position_ids: IntArray) -> IntArray:
        """The slots of the cells at `position_ids`, int32.

        Raises:
            StatesError: one of them is not there.
        """
        order = np.argsort(self.position_ids[: self.cells]).astype(np.int32)
        there = self.position_ids[order]
        if not np.isin(position_ids, there).all():
            raise StatesError("cells are to be read that are not there")
        slots: IntArray = order[np.searchsorted(there, position_ids)]
        return slots

    def take(self, token_ids: IntArray, position_ids: IntArray) -> slice:
        """Take slots for cells that are computed next; returns their slots.

        Raises:
            ContextLengthError: there is no room for them.
        """
        slots = slice(self.cells, self.cells + len(position_ids))
        self._require_room(slots.stop)
        self.token_ids[slots] = token_ids
        self.position_ids[slots] = position_ids
        self.cells = slots.stop
        self._written = max(self._written, self.cells)
        return slots

    def hide(self, position_ids: IntArray) -> IntArray:
        """Hide the cells at `position_ids`, which are computed again: no token sees them; returns their positions, by
        slot. `settle` ends that."""
        hidden = np.flatnonzero(np.isin(self.position_ids[: self.cells], position_ids))
        positions: IntArray = self.position_ids[hidden]
        self.position_ids[hidden] = HIDDEN
        slots = [(placed.piece.slot, placed.piece.end) for placed in self._placed]
        changed = [bool(np.any((hidden >= start) & (hidden < end))) for start, end in slots]
        self._placed = [replace(p, changed=p.changed or now) for p, now in zip(self._placed, changed, strict=True)]
        return positions

    def settle(self, hidden_position_ids: IntArray, first: int) -> None:
        """Put cells that were computed into slots from `first` on in the place of those that `hide` hid."""
        hidden = np.flatnonzero(self.position_ids[:first] == HIDDEN)
        computed = np.arange(first, self.cells)
        source = first + np.searchsorted(self.position_ids[computed], hidden_position_ids)
        rest = np.setdiff1d(computed, source)
        slots = np.concatenate([hidden, np.arange(first, first + len(rest))])
        cells = np.concatenate([source, rest])
        for array in (self.token_ids, self.position_ids):
            array[slots] = array[cells]
        for row in self.kv.reshape(-1, self.capacity, self.kv.shape[-1]):
            row[slots] = row[cells]
        self.cells = first + len(rest)

    def forget(self, slot: int) -> None:
        """Forget the cells from `slot` on."""
        placed, self._placed = self._placed, []
        for each in placed:
            for part in each.parts:
                if part.mapped and part.end > slot:
                    self._unmap([self._pages_from(part, slot)])
        self._placed = [cut for cut in (each.before(slot) for each in placed) if cut.parts]
        self.cells = slot

    def truncate(self, position_id: int) -> None:
        """Drop the cells at `position_id` and after it; the others stay in their order."""
        stay = self.position_ids[: self.cells] < position_id
        if stay.all():
            return
        first = int(np.argmin(stay))
        # Cells of a piece whose end was put before its start may lie after cells that go.
        moved = first + np.flatnonzero(stay[first:])
        kv, token_ids, position_ids = self.kv[:, :, :, moved], self.token_ids[moved], self.position_ids[moved]
        self.forget(first)
        self.kv[:, :, :, self.take(token_ids, position_ids)] = kv

    def trim(self, keep: int) -> None:
        """Give memory of the slots after the placed cells back to the system, all but the next `keep` slots."""
        self.cells = self._placed_cells()
        first = self._layout.padded(self.cells + keep)
        if self._written <= first:
            return
        used = self._layout.padded(self._written)
        self._written = first
        if hasattr(mmap, "MADV_DONTNEED"):
            for start in self._row_offsets():
                offset, length = start + first * self._token_bytes, (used - first) * self._token_bytes
                self._memory.madvise(mmap.MADV_DONTNEED, offset, length)

    def _placed_cells(self) -> int:
        """How many slots, from 0 on, hold placed cells."""
        return self._placed[-1].piece.end if self._placed else 0

    def _require_room(self, cells: int) -> None:
        if cells > self.capacity:
            raise ContextLengthError(f"{cells} cells do not fit into a context of {self.capacity}")

    def _add(self, added: Iterable[Placed]) -> int:
        """Place pieces after all cells; returns the number of cells added."""
        before = self.cells
        for placed in added:
            for part in placed.parts:
                if not (part.mapped and self._map(part)):
                    self._copy(part)
            self._placed.append(placed)
            self.cells = placed.piece.end
        self._written = max(self._written, self.cells)
        return self.cells - before

    def _pages_from(self, part: Piece, slot: int) -> Piece:
        """The pages of a mapped part that lie wholly from `slot` on."""
        skipped = min(self._layout.padded(max(slot - part.slot, 0)), part.tokens)
        return replace(part, start=part.start + skipped, slot=part.slot + skipped)

    def _drop_pages(self) -> None:
        """Forget all contents at once: replacing pages that are in use makes every single call wait for all cores."""
        if self._written and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)
        self._written = 0

    def _parts(self, piece: Piece, exact: bool) -> list[Piece]:
        """The piece cut into what is copied and what is mapped."""
        states, start, stop, slot = piece.states, piece.start, piece.stop, piece.slot
        if piece.shift:
            return [piece]
        page = self._layout.page_tokens
        shift = (self._row(states, start) - slot) % page
        head = -(slot + shift) % page
        mapped = stop - start - shift - head
        if mapped < self._map_from(piece.end) or not mappable(states) or (shift and exact):
            return [piece]
        parts = [Piece(states, stop - shift, stop, slot), Piece(states, start, start + head, slot + shift)]
        parts.append(Piece(states, start + head, stop - shift, slot + shift + head, mapped=True))
        return [part for part in parts if part.stop > part.start]

    def _row(self, states: KVStates, cell: int) -> int:
        """Where in the array of `states` a cell lies."""
        return self._layout.lead(states.position_ids) + cell

    def _map_from(self, end: int) -> int:
        """The number of tokens from which on a piece that ends before slot `end` is mapped."""
        if self._assembly == "auto":
            return MAP_FROM_TOKENS_WARM if end <= self._written else MAP_FROM_TOKENS_FRESH
        return self._layout.page_tokens if self._assembly == "map" else sys.maxsize

    def _copy(self, piece: Piece) -> None:
        if piece.states.path is not None:
            with suppress(FileNotFoundError):  # a file that was removed keeps its data while it is mapped
                _check_whole(piece.states, piece.states.path.stat().st_size)
        slots = slice(piece.slot, piece.end)
        rows = slice(self._row(piece.states, piece.start), self._row(piece.states, piece.stop))
        if piece.shift:
            self._copy_moved(piece, slots, rows)
        else:
            self.kv[:, :, :, slots] = piece.states.array[:, :, :, rows]
        self._name(piece)

    def _copy_moved(self, piece: Piece, slots: slice, rows: slice) -> None:
        """Copy a piece to other positions than it was encoded at: its keys are rotated on the way, layer by layer."""

        def copy(layer: int) -> None:
            stored, arena = piece.states.array[layer, :, :, rows], self.kv[layer, :, :, slots]
            arena[1] = stored[1]
            for keys, out in zip(stored[0], arena[0], strict=True):
                rotate(keys, self._position, piece.shift, out)

        list(self._copiers.map(copy, range(self._layout.layers)))

    def _name(self, piece: Piece) -> None:
        """Note which cells lie in a piece's slots."""
        slots, cells = slice(piece.slot, piece.end), slice(piece.start, piece.stop)
        self.token_ids[slots] = piece.states.token_ids[cells]
        self.position_ids[slots] = piece.states.position_ids[cells] + np.int32(piece.shift)

    def _map(self, piece: Piece) -> bool:
        """Map the piece; False when the system refuses, as beyond `vm.max_map_count` mappings."""
        states = piece.states
        length = self._mapped_bytes(piece)
        file_row = states.array.shape[3] * self._token_bytes
        file_start = states.offset + self._row(states, piece.start) * self._token_bytes
        base = self.kv.ctypes.data + piece.slot * self._token_bytes
        try:
            with open(str(states.path), "rb", buffering=0) as file:
                _check_whole(states, os.fstat(file.fileno()).st_size)
                for row, start in enumerate(self._row_offsets()):
                    map_over(base + start, length, file.fileno(), file_start + row * file_row)
        except OSError:
            self._unmap([piece])
            return False
        self._name(piece)
        return True

    def _unmap(self, pieces: Iterable[Piece]) -> None:
        """Put anonymous memory back in place of mapped pages."""
        for piece in pieces:
            if piece.mapped and piece.tokens:
                self._written = min(self._written, piece.slot)
                length = self._mapped_bytes(piece)
                base = self.kv.ctypes.data + piece.slot * self._token_bytes
                for start in self._row_offsets():
                    map_over(base + start, length, -1, 0)

    def _mapped_bytes(self, piece: Piece) -> int:
        """Whole pages of one row; what lies after the piece's last cell belongs to nobody, or to what follows."""
        return self._layout.padded(piece.tokens) * self._token_bytes

    def _row_offsets(self) -> range:
        return range(0, self.kv.nbytes, self._row_bytes)


def _unchanged(placed: Placed) -> bool:
    return not placed.changed


def _check_whole(states: KVStates, file_bytes: int) -> None:
    """Refuse a file that was cut short since it was opened: a page after its end kills the process that touches it."""
    if file_bytes < states.offset + states.array.nbytes:
        raise StatesError(f"{states.path} was cut short while it was in use")


def _anonymous(nbytes: int) -> mmap.mmap:
    """Private anonymous memory; pages come into being when they are written."""
    if os.name == "nt":
        return mmap.mmap(-1, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, nbytes, flags=flags)
