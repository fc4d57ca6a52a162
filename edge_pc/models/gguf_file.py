"""Reads the GGUF format. The whole structure of a file is checked before anything in it is used.

Nothing that a file announces is believed: every count and length is compared with the bytes that are left, and every
tensor must lie inside the file. Readers further on, llama.cpp's among them, may then rely on it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import ModelError
from edge_pc.models.fields import shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Far above any real file: the largest vocabularies have 300,000 tokens, the largest models some thousand tensors.
_MAX_HEADER_BYTES = 128 << 20
_MAX_ENTRIES = 1 << 16
_MAX_ITEMS = 1 << 21
_MAX_NAME_BYTES = 64
_MAX_DIMS = 4

STRING, ARRAY, BOOL = 8, 9, 7
INT32, FLOAT32 = 5, 6
# Kind of value → little-endian numpy dtype.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_DTYPES = {kind: np.dtype(name) for kind, name in {**_NUMBERS, BOOL: "u1"}.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        shape: in C order, matrices `[out, in]`.
        quantization: how its values are packed.
        offset, nbytes: its place in the file.
    """

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An opened GGUF file: its metadata, and its tensors, which are read on demand.

    Attributes:
        path: the file.
        tensors: name → where it is.
        kinds: metadata key → kind of its value, of an array's: of its items, as the format numbers them.

    Raises:
        ModelError: the file is missing, no GGUF, truncated, split over several files, or of foreign byte order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
        except ValueError:  # an empty file cannot be mapped
            self._bytes = np.empty(0, dtype=np.uint8)
        except OSError as exc:
            raise ModelError(f"{path} cannot be read: {exc}") from exc
        try:
            cursor = _Cursor(self._bytes.data)
            tensors, fields = _counts(cursor)
            self._values, self.kinds = _read_metadata(cursor, fields)
            self.tensors = _read_tensors(cursor, tensors, self.get("general.alignment", 32))
        except _Broken as exc:
            raise ModelError(
                f"{path} is not a GGUF file that can be read, or it is truncated ({len(self._bytes)} bytes): {exc}",
                hint="download it again",
            ) from exc

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under `key`: a number, text, bool or list; `default` when absent."""
        return self._values.get(key, default)

    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata: key → number, text, bool or list."""
        return self._values

    def load(self, name: str) -> NDArray[np.float32]:
        """A tensor dequantized to float32, in C order."""
        from gguf import dequantize

        tensor = self.tensors[name]
        packed = self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)
        try:
            array: NDArray[Any] = dequantize(packed, tensor.quantization)
        except NotImplementedError as exc:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the quantization {tensor.quantization.name}, which cannot be read",
                hint="use a file with another quantization, such as Q8_0, Q4_K_M or F16",
            ) from exc
        return array.astype(np.float32, copy=False).reshape(tensor.shape)


class _Broken(Exception):
    """The file's structure is wrong; the text says where and how."""


class _Cursor:
    """Reads one value after another, never beyond the end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.size = len(data)
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        start = self.at
        if count > min(self.size, _MAX_HEADER_BYTES) - start:
            raise _Broken(f"{what} at byte {start} is {count} bytes long, which goes beyond the end or all limits")
        self.at = start + count
        return self._data[start : self.at]

    def number(self, code: str, what: str) -> int:
        """One little-endian number, `code` as `struct` has it."""
        (value,) = struct.unpack(code, self.take(struct.calcsize(code), what))
        return int(value)

    def count(self, limit: int, what: str) -> int:
        count = self.number("<Q", what)
        if count > limit:
            raise _Broken(f"{what} at byte {self.at - 8} is {count}, expected at most {limit}")
        return count

    def text(self, what: str) -> str:
        raw = self.take(self.number("<Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as exc:
            raise _Broken(f"{what} at byte {self.at - len(raw)} is not UTF-8: {exc.reason}") from exc


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """The header's numbers of tensors and of metadata entries."""
    if bytes(cursor.take(4, "the magic number")) != _MAGIC:
        raise _Broken("it does not begin with the bytes GGUF")
    version = cursor.number("<I", "the version")
    if version and not version & 0xFFFF:
        raise _Broken("it was written for machines of the other byte order")
    if version not in _VERSIONS:
        raise _Broken(f"the version is {version}, expected one of {', '.join(map(str, _VERSIONS))}")
    return cursor.count(_MAX_ENTRIES, "the number of tensors"), cursor.count(_MAX_ENTRIES, "the number of fields")


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Key → value, and key → kind of the value or of its items."""
    values: dict[str, Any] = {}
    kinds: dict[str, int] = {}
    for _ in range(count):
        key = cursor.text("the key of a metadata field")
        what = f"metadata {shown(key)}"
        if key in values:
            raise _Broken(f"{what} appears twice")
        kind = cursor.number("<I", what)
        if kind == ARRAY:
            kind = cursor.number("<I", what)
            values[key] = _read_array(cursor, kind, what)
        else:
            values[key] = _read_value(cursor, kind, what)
        kinds[key] = kind
    return values, kinds


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == STRING:
        return cursor.text(what)
    if kind not in _DTYPES:
        raise _Broken(f"{what} is of the unknown kind {kind}")
    dtype = _DTYPES[kind]
    value = np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0].item()
    return bool(value) if kind == BOOL else value


def _read_array(cursor: _Cursor, kind: int, what: str) -> list[Any]:
    count = cursor.count(_MAX_ITEMS, f"the number of items of {what}")
    if kind == STRING:
        return [cursor.text(what) for _ in range(count)]
    if kind not in _DTYPES:
        raise _Broken(f"{what} has items of the unknown kind {kind}")
    dtype = _DTYPES[kind]
    items: list[Any] = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype).tolist()
    return [bool(item) for item in items] if kind == BOOL else items


def _read_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, TensorInfo]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Broken(f"general.alignment is {shown(alignment)}, expected a power of two")
    sizes = {int(kind): (GGMLQuantizationType(kind), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.text("the name of a tensor")
        what = f"tensor {shown(name)}"
        if name in found or len(name.encode()) > _MAX_NAME_BYTES:
            raise _Broken(f"{what} appears twice, or its name is longer than {_MAX_NAME_BYTES} bytes")
        rank = cursor.number("<I", what)
        if not 1 <= rank <= _MAX_DIMS:
            raise _Broken(f"{what} has {rank} dimensions, expected 1 to {_MAX_DIMS}")
        dims = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, what))
        kind, offset = cursor.number("<I", what), cursor.number("<Q", what)
        if kind not in sizes:
            raise _Broken(f"{what} has the unknown type {kind}")
        quantization, block, block_bytes = sizes[kind]
        values = math.prod(dims)
        if not values or dims[0] % block:
            raise _Broken(f"{what} has the dimensions {shown(dims)}, expected rows of whole blocks of {block}")
        if offset % alignment:
            raise _Broken(f"{what} starts at {offset}, expected a multiple of {alignment}")
        found[name] = TensorInfo(dims[::-1], quantization, offset, values // block * block_bytes)
    data = -(-cursor.at // alignment) * alignment
    for name, tensor in found.items():
        if data + tensor.offset + tensor.nbytes > cursor.size:
            raise _Broken(f"tensor {shown(name)} ends at byte {data + tensor.offset + tensor.nbytes}")
    return {name: replace(tensor, offset=data + tensor.offset) for name, tensor in found.items()}
