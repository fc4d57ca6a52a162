"""The bytes of a states file. `docs/store-format.md` is the specification; this is its only implementation.

    header    4096 bytes: a `.npy` header, padded so that the array starts on a page
    array     C order
    metadata  JSON: what the array is, down to its checksum, so that a file explains itself
    footer    32 bytes: length of the metadata, its checksum, magic

Invariant: whatever bytes a file holds, reading it gives `Metadata` that passed every check below, or `StatesError`
(`OSError` when the system cannot read it). Nothing is unpickled or evaluated, and nothing is mapped before its size,
dtype, order and shape are known to be right.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from io import FileIO
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray
from edge_pc.errors import StatesError

FORMAT = 1
HEADER_BYTES = 4096
MAGIC = b"EPCSTAT1"
FOOTER = struct.Struct("<Q16s8s")
# About 24 bytes a token: room for two million tokens.
MAX_METADATA_BYTES = 64 * 1024 * 1024
MAX_DIMENSIONS = 32
# In the metadata: an id of ten digits and its comma; all that is not ids.
_ID_BYTES = 11
_NAMES_BYTES = 1024
CHECKSUM_TAG = "xxh3_128"
_CHECKSUM = re.compile(rf"{CHECKSUM_TAG}:[0-9a-f]{{32}}")
# The last second of the year 9999, the largest time that `datetime` takes.
MAX_TIME = 253402300799.0
# dtype → how a `.npy` header spells it. All are little-endian.
DESCRIPTORS = {"float32": "<f4", "float16": "<f2", "uint8": "|u1"}
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """What a states file says of its array.

    Attributes:
        key: the store key.
        layout: name of the backend layout.
        dtype: `float32`, `float16` or `uint8`.
        shape: of the array, padding included.
        token_ids, position_ids: int32 `[tokens]`, without padding; positions ascend strictly. Read-only.
        model, schema, module: where the states come from, for people; the key covers what matters.
        created: seconds since 1970, UTC.
        checksum: `xxh3_128:` and 32 hexadecimal digits, over the array's bytes.

    Raises:
        StatesError: a value is of the wrong type or out of range.
    """

    key: str
    layout: str
    dtype: str
    shape: tuple[int, ...]
    token_ids: IntArray
    position_ids: IntArray
    model: str
    schema: str
    module: str
    created: float
    checksum: str

    def __post_init__(self) -> None:
        for name in ("key", "layout", "dtype", "model", "schema", "module", "checksum"):
            _check_text(name, getattr(self, name))
        if not is_key(self.key):
            raise StatesError(f"metadata: {self.key[:80]!r} is not a store key")
        if self.dtype not in DESCRIPTORS:
            raise StatesError(f"metadata: dtype {self.dtype[:80]!r}, expected one of {', '.join(DESCRIPTORS)}")
        if not 1 <= len(self.shape) <= MAX_DIMENSIONS or not all(
            type(size) is int and 1 <= size < 2**63 for size in self.shape
        ):
            raise StatesError(f"metadata: the shape is not a list of 1 to {MAX_DIMENSIONS} sizes")
        if type(self.created) not in (int, float) or not 0 <= self.created <= MAX_TIME:
            raise StatesError("metadata: 'created' is not a time")
        if not _CHECKSUM.fullmatch(self.checksum):
            raise StatesError(f"metadata: the checksum is not {CHECKSUM_TAG}")
        if len(self.token_ids) != len(self.position_ids):
            raise StatesError(f"metadata: {len(self.token_ids)} token ids but {len(self.position_ids)} position ids")
        if (np.diff(self.position_ids) <= 0).any():
            raise StatesError("metadata: position ids do not ascend")

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(DESCRIPTORS[self.dtype]).itemsize

    def to_json(self) -> bytes:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"format": FORMAT, "tokens": self.tokens, "shape": list(self.shape)}
        values |= {"token_ids": self.token_ids.tolist(), "position_ids": self.position_ids.tolist()}
        return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, text: bytes) -> Metadata:
        """Raises StatesError when `text` is not the metadata of this format, whatever it is."""
        try:
            values = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as exc:
            raise StatesError(f"metadata is not JSON: {exc}") from exc
        if not isinstance(values, dict):
            raise StatesError("metadata is not a JSON object")
        if values.pop("format", None) != FORMAT:
            raise StatesError(f"metadata is not of format {FORMAT}", hint="the states are encoded again")
        tokens = values.pop("tokens", None)
        if values.keys() != {field.name for field in fields(cls)}:
            raise StatesError("metadata lacks a field or has an unknown one")
        if not isinstance(values["shape"], list):
            raise StatesError("metadata: the shape is not a list")
        values["shape"] = tuple(values["shape"])
        values["token_ids"] = frozen_ids("token ids", values["token_ids"])
        values["position_ids"] = frozen_ids("position ids", values["position_ids"])
        metadata = cls(**values)
        if type(tokens) is not int or tokens != metadata.tokens:
            raise StatesError(f"metadata: {metadata.tokens} token ids, but the number of tokens differs")
        return metadata


def is_key(key: str) -> bool:
    """Whether `key` can name a file: 1 to 128 of `a-z` and `0-9`."""
    return 1 <= len(key) <= 128 and key.isascii() and key.isalnum() and key == key.lower()


def frozen_ids(what: str, ids: Any) -> IntArray:
    """`ids` (a list or an array) as a new read-only int32 array.

    Raises:
        StatesError: it is empty, not one-dimensional, not of integers, or holds a negative or too large number.
    """
    try:
        array = np.array(ids)
    except (ValueError, OverflowError) as exc:
        raise StatesError(f"{what} are not a list of integers") from exc
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise StatesError(f"{what} are not a list of integers")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise StatesError(f"{what} are out of range")
    frozen = array.astype(np.int32)
    frozen.setflags(write=False)
    return frozen


def pack_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The `.npy` header, version 1.0, of a C-ordered array: always `HEADER_BYTES` bytes."""
    text = f"{{'descr': {DESCRIPTORS[dtype]!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    prefix = np.lib.format.magic(1, 0) + struct.pack("<H", HEADER_BYTES - np.lib.format.MAGIC_LEN - 2)
    return prefix + text.encode("ascii").ljust(HEADER_BYTES - len(prefix) - 1) + b"\n"


def pack_trailer(metadata: Metadata) -> bytes:
    """Metadata and footer, which follow the array.

    Raises:
        StatesError: the metadata is larger than `MAX_METADATA_BYTES`.
    """
    text = metadata.to_json()
    if len(text) > MAX_METADATA_BYTES:
        raise StatesError(f"metadata has {len(text)} bytes, the limit is {MAX_METADATA_BYTES}")
    return text + FOOTER.pack(len(text), xxhash.xxh3_128_digest(text), MAGIC)


def file_bytes(array_bytes: int, tokens: int) -> int:
    """How large a states file gets, at most (names for people of usual length)."""
    return HEADER_BYTES + array_bytes + _NAMES_BYTES + 2 * _ID_BYTES * tokens + FOOTER.size


def read_metadata(file: FileIO, size: int) -> Metadata:
    """Check header, metadata, footer and sizes of a `file` of `size` bytes. The array is not read.

    Raises:
        StatesError: they are not those of a whole states file.
    """
    room = size - HEADER_BYTES - FOOTER.size
    if room < 0:
        raise StatesError(f"file truncated: it has {size} bytes, fewer than header and footer")
    length, digest, magic = FOOTER.unpack(_read_at(file, size - FOOTER.size, FOOTER.size))
    if magic != MAGIC:
        raise StatesError("file truncated or not a states file: it does not end with the footer")
    if length > min(room, MAX_METADATA_BYTES):
        raise StatesError(f"footer: metadata of {length} bytes do not fit into the file")
    text = _read_at(file, size - FOOTER.size - length, length)
    if xxhash.xxh3_128_digest(text) != digest:
        raise StatesError("checksum of the metadata does not match")
    metadata = Metadata.from_json(text)
    if metadata.nbytes + length != room:
        raise StatesError(f"file of {size} bytes, its metadata say {metadata.nbytes + size - room + length}")
    if _read_at(file, 0, HEADER_BYTES) != pack_header(metadata.dtype, metadata.shape):
        raise StatesError("header is not that of the array")
    return metadata


def array_checksum(array: NDArray[Any]) -> str:
    """The tagged checksum of the bytes of a C-contiguous array."""
    return f"{CHECKSUM_TAG}:{xxhash.xxh3_128_hexdigest(array.data.cast('B'))}"


def check_array(file: FileIO, metadata: Metadata, after_block: Callable[[], None] = lambda: None) -> None:
    """Read the whole array and compare its checksum. Reads, not a mapping: a file cut meanwhile must not kill us.

    Args:
        after_block: called after each block that was read; it may raise to stop.

    Raises:
        StatesError: the checksum differs, or the file ended early.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    remaining = metadata.nbytes
    file.seek(HEADER_BYTES)
    while remaining:
        count = file.readinto(buffer[: min(remaining, _READ_BYTES)])
        if not count:
            raise StatesError("file truncated while it was read")
        digest.update(buffer[:count])
        remaining -= count
        after_block()
    if f"{CHECKSUM_TAG}:{digest.hexdigest()}" != metadata.checksum:
        raise StatesError("checksum of the array does not match")


def _read_at(file: FileIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    parts = []
    while size:
        part = file.read(size)
        if not part:
            raise StatesError("file truncated while it was read")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise StatesError(f"metadata: {name!r} is not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise StatesError(f"metadata: {name!r} is not valid Unicode") from exc
