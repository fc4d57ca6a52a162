"""libllama's state blob of one sequence: a private format, built and checked here and nowhere else.

A blob of T cells, little-endian, without padding:

    header   uint32 magic, int32 sequence, uint32 streams = 1, uint32 T
    table    T × { int32 position, uint32 sequences = 1, int32 sequence }
    sizes    uint32 values transposed = 1 (so without flash attention), uint32 layers
    keys     layers × { int32 type, uint64 row bytes, T × row }
    values   layers × { int32 type, uint32 element bytes, uint32 width, width × T elements }

Our arrays are such blobs of whole modules, cells in position order and sequence 0, so that loading a mapped file copies
its bytes once, inside libllama. A blob that is not exactly this never reaches libllama, which would take some of its
sizes on trust.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray
from edge_pc.errors import StatesError

Bytes = NDArray[np.uint8]

# Changes when our use of the format does; part of every store key.
FORMAT = 1
MAGIC = 0xAF143CD8
TYPE_F16 = 1  # ggml's number of the type
_ELEMENT = 2  # bytes of a float16

_HEADER = np.dtype([("magic", "<u4"), ("sequence", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_SIZES = np.dtype([("transposed", "<u4"), ("layers", "<u4")])
_KEYS = np.dtype([("type", "<i4"), ("row", "<u8")])
_VALUES = np.dtype([("type", "<i4"), ("element", "<u4"), ("width", "<u4")])
_TENSOR = _KEYS.itemsize  # both kinds of tensors have headers of this size

# The tokens of an array carry the blob's fixed part between them: padded to a few, its share is small (0.8 % of
# SmolLM2's states), and so is the padding of a short module.
_TOKEN_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Arrays `[tokens, bytes]`, tokens padded to a few, that begin with a blob of as many cells as there are.

    Attributes:
        name: names the format, with libllama's own number of it.
        bytes_per_token: room for a token's keys and values and its share of the blob's fixed part.
    """

    name: str
    bytes_per_token: int

    @property
    def dtype(self) -> str:
        return "uint8"

    def array_shape(self, position_ids: IntArray) -> tuple[int, ...]:
        """The shape of the array that holds cells at `position_ids`, padding included."""
        return (-(-len(position_ids) // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE, self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Parts:
    """Views into a blob of T cells.

    Attributes:
        header, sizes: one record each.
        table: `[T]` records.
        key_headers, value_headers: uint8 `[layers, 12]`.
        keys: uint8 `[layers, T, row bytes]`.
        values: uint8 `[layers, width, T, element bytes]`.
    """

    header: NDArray[Any]
    table: NDArray[Any]
    sizes: NDArray[Any]
    key_headers: Bytes
    keys: Bytes
    value_headers: Bytes
    values: Bytes


@dataclass(frozen=True, slots=True)
class BlobFormat:
    """The blobs of one model: float16 keys and values, `width` numbers each per layer and cell."""

    layers: int
    width: int

    @property
    def _per_cell(self) -> int:
        return _CELL.itemsize + 2 * self.layers * self.width * _ELEMENT

    @property
    def _fixed(self) -> int:
        return _HEADER.itemsize + _SIZES.itemsize + 2 * self.layers * _TENSOR

    def nbytes(self, cells: int) -> int:
        """Size of a blob of `cells` cells."""
        return self._fixed + cells * self._per_cell

    def kv_layout(self, version: int) -> BlobLayout:
        """The layout of our arrays; `version` is libllama's own number of its sequence states."""
        bytes_per_token = self._per_cell + -(-self._fixed // _TOKEN_MULTIPLE)
        return BlobLayout(f"llamacpp-{FORMAT}-state{version}-f16-noflash", bytes_per_token)

    def build(self, positions: IntArray) -> Bytes:
        """A blob of cells at `positions`, all keys and values zero."""
        blob: Bytes = np.zeros(self.nbytes(len(positions)), dtype=np.uint8)
        self.frame(blob, positions)
        return blob

    def frame(self, blob: Bytes, positions: IntArray, sequence: int = 0) -> None:
        """Write everything but keys and values into a blob of cells at `positions`."""
        parts = self.parts(blob, len(positions))
        parts.header[0] = (MAGIC, sequence, 1, len(positions))
        parts.table["position"] = positions
        parts.table["sequences"] = 1
        parts.table["sequence"] = sequence
        parts.sizes[0] = (1, self.layers)
        parts.key_headers[:] = _bytes(_KEYS, (TYPE_F16, self.width * _ELEMENT))
        parts.value_headers[:] = _bytes(_VALUES, (TYPE_F16, _ELEMENT, self.width))

    def check(self, array: NDArray[Any], positions: IntArray) -> Bytes:
        """The blob at the start of a stored array, when it is exactly one of cells at `positions`.

        Raises:
            StatesError: it is not; the message names the part at fault.
        """
        blob = array.reshape(-1)
        size = self.nbytes(len(positions))
        if blob.dtype != np.uint8 or len(blob) < size:
            raise StatesError(f"KV states are {blob.nbytes} bytes of {blob.dtype}, expected {size} bytes")
        found = self.parts(blob[:size], len(positions))
        table = np.zeros(len(positions), dtype=_CELL)
        table["position"], table["sequences"] = positions, 1
        expected = {
            "header": _bytes(_HEADER, (MAGIC, 0, 1, len(positions))),
            "table": table.view(np.uint8),
            "sizes": _bytes(_SIZES, (1, self.layers)),
            "key_headers": np.tile(_bytes(_KEYS, (TYPE_F16, self.width * _ELEMENT)), (self.layers, 1)),
            "value_headers": np.tile(_bytes(_VALUES, (TYPE_F16, _ELEMENT, self.width)), (self.layers, 1)),
        }
        for name, content in expected.items():
            if getattr(found, name).tobytes() != content.tobytes():
                raise StatesError(f"KV states are not in the format that this libllama reads: their {name} differ")
        return blob[:size]

    def positions(self, blob: Bytes) -> IntArray:
        """The positions in a blob's table, in the order of its cells."""
        cells = (len(blob) - self._fixed) // self._per_cell
        return self.parts(blob, cells).table["position"].astype(np.int32)

    def keys(self, blob: Bytes, cells: int) -> NDArray[np.float16]:
        """The keys in a blob of `cells` cells, a view, float16 `[layers, cells, width]`."""
        keys: NDArray[np.float16] = self.parts(blob, cells).keys.view("<f2")
        return keys

    def take(self, blob: Bytes, cells: IntArray, positions: IntArray) -> Bytes:
        """A new blob of some cells of a blob, in the given order, at `positions`."""
        source = self.parts(blob, (len(blob) - self._fixed) // self._per_cell)
        taken = self.build(positions)
        target = self.parts(taken, len(cells))
        target.keys[:] = source.keys[:, cells]
        target.values[:] = source.values[:, :, cells]
        return taken

    def parts(self, blob: Bytes, cells: int) -> Parts:
        """Views into the parts of a blob of `cells` cells."""
        table = _HEADER.itemsize
        sizes = table + cells * _CELL.itemsize
        keys = sizes + _SIZES.itemsize
        tensors = blob[keys:].reshape(2, self.layers, _TENSOR + cells * self.width * _ELEMENT)
        headers, data = tensors[:, :, :_TENSOR], tensors[:, :, _TENSOR:]
        return Parts(
            header=blob[:table].view(_HEADER),
            table=blob[table:sizes].view(_CELL),
            sizes=blob[sizes:keys].view(_SIZES),
            key_headers=headers[0],
            keys=data[0].reshape(self.layers, cells, self.width * _ELEMENT),
            value_headers=headers[1],
            values=data[1].reshape(self.layers, self.width, cells, _ELEMENT),
        )


def _bytes(record: np.dtype[Any], values: tuple[int, ...]) -> Bytes:
    return np.array([values], dtype=record).view(np.uint8)
