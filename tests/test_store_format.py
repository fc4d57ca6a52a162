"""The bytes of a states file: what is written, and that nothing malformed is ever taken for one."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import PaddedLayout
from store_tools import BYTES, HALF, LAYOUT, put, states_array

from edge_pc.backends.base import KVLayout
from edge_pc.errors import StatesError
from edge_pc.store import StateStore
from edge_pc.store.entry import open_entry, read_entry
from edge_pc.store.format import (
    FOOTER,
    HEADER_BYTES,
    MAGIC,
    MAX_METADATA_BYTES,
    Metadata,
    frozen_ids,
    pack_header,
    pack_trailer,
)

KEY = "ab12"


def metadata(**changes: Any) -> Metadata:
    values = {
        "key": KEY,
        "layout": "l",
        "dtype": "float32",
        "shape": (2, 2),
        "token_ids": frozen_ids("token ids", [5, 6]),
        "position_ids": frozen_ids("position ids", [0, 3]),
        "model": "tiny",
        "schema": "trip",
        "module": "tokyo/ueno",
        "created": 1700000000.5,
        "checksum": "xxh3_128:0f1fe4c1c8a0e0b6c1a0a2a0e0d0c0b0",
    }
    return Metadata(**{**values, **changes})


# A whole file, written from docs/store-format.md.
GOLDEN_ARRAY = np.array([[0, 1], [2, 3]], np.float32)
GOLDEN_JSON = (
    b'{"checksum":"xxh3_128:8852304960645e65c790ab1c20deb2f0","created":1700000000.5,"dtype":"float32","format":1,'
    b'"key":"ab12","layout":"l","model":"tiny","module":"tokyo/ueno","position_ids":[0,3],"schema":"trip",'
    b'"shape":[2,2],"token_ids":[5,6],"tokens":2}'
)
GOLDEN_FILE = (
    b"\x93NUMPY\x01\x00\xf6\x0f"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }".ljust(4085)
    + b"\n"
    + struct.pack("<4f", 0, 1, 2, 3)
    + GOLDEN_JSON
    + struct.pack("<Q", 251)
    + bytes.fromhex("b21b4416751f2f42d7630987abb0f639")
    + b"EPCSTAT1"
)


def with_metadata(text: bytes, array: bytes = GOLDEN_ARRAY.tobytes(), length: int | None = None) -> bytes:
    """A file with this metadata, and a footer that agrees with it."""
    footer = FOOTER.pack(len(text) if length is None else length, xxhash.xxh3_128_digest(text), MAGIC)
    return pack_header("float32", (2, 2)) + array + text + footer


def with_values(**changes: Any) -> bytes:
    values = json.loads(metadata(checksum=checksum_of(GOLDEN_ARRAY.tobytes())).to_json())
    return with_metadata(json.dumps({**values, **changes}).encode())


def checksum_of(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def read(path: Path, data: bytes) -> Metadata:
    path.write_bytes(data)
    with open_entry(str(path)) as (file, status):
        return read_entry(file, status, KEY, thorough=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / f"{KEY}.npy"


def test_golden_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.5)
    layout = PaddedLayout("l", "float32", (2, 1), 1)
    ids = np.array([5, 6], np.int32), np.array([0, 3], np.int32)
    states = StateStore(tmp_path).put(KEY, layout, GOLDEN_ARRAY, *ids, model="tiny", schema="trip", module="tokyo/ueno")
    assert states.path == tmp_path / "ab" / "ab12.npy"
    assert states.offset == 4096
    assert states.path.read_bytes() == GOLDEN_FILE


def test_golden_file_is_read(file: Path) -> None:
    found = read(file, GOLDEN_FILE)
    assert (found.key, found.schema, found.module, found.shape) == (KEY, "trip", "tokyo/ueno", (2, 2))
    assert found.token_ids.tolist() == [5, 6]
    assert found.position_ids.tolist() == [0, 3]


@pytest.mark.parametrize("layout", [LAYOUT, HALF, BYTES], ids=lambda layout: layout.dtype)
def test_numpy_maps_the_file_and_the_array_starts_on_a_page(tmp_path: Path, layout: KVLayout) -> None:
    states = put(StateStore(tmp_path), 1, 20, layout)
    assert states.path is not None
    mapped = np.load(states.path, mmap_mode="r", allow_pickle=False)
    assert isinstance(mapped, np.memmap)
    assert mapped.offset == HEADER_BYTES == 4096
    assert mapped.dtype == np.dtype(layout.dtype)
    np.testing.assert_array_equal(mapped, states_array(1, 20, layout))
    np.testing.assert_array_equal(np.load(io.BytesIO(states.path.read_bytes())), mapped)


def test_largest_header_fits() -> None:
    header = pack_header("float32", (2**63 - 1,) * 32)
    assert len(header) == HEADER_BYTES


def test_every_cut_is_noticed(file: Path) -> None:
    whole = GOLDEN_FILE
    sizes = {0, 1, 6, 8, 10, 128, 4095, *range(HEADER_BYTES, len(whole))}
    for size in sizes:
        with pytest.raises(StatesError):
            read(file, whole[:size])


def test_every_changed_byte_is_noticed(file: Path) -> None:
    whole = GOLDEN_FILE
    # Of the header's spaces a few stand for all.
    places = [*range(160), *range(160, 4090, 97), *range(4090, len(whole))]
    for place in places:
        with pytest.raises(StatesError):
            read(file, whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = GOLDEN_FILE
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 300)))
    damaged = whole[:start] + data.draw(st.binary(max_size=300)) + whole[stop:]
    path = tmp_path_factory.getbasetemp() / f"{KEY}.npy"
    if damaged == whole:
        read(path, damaged)
    else:
        with pytest.raises(StatesError):
            read(path, damaged)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        bytes(10_000),
        GOLDEN_FILE * 2,
        GOLDEN_FILE + b"\n",
        b"\n" + GOLDEN_FILE,
        with_metadata(GOLDEN_JSON, length=2**64 - 1),
        with_metadata(GOLDEN_JSON, length=2**63),
        with_metadata(GOLDEN_JSON, length=MAX_METADATA_BYTES + 1),
        with_metadata(GOLDEN_JSON, length=0),
    ],
    ids=["empty", "magic", "zeros", "twice", "longer", "shifted", "huge", "negative", "over the limit", "no metadata"],
)
def test_foreign_files(file: Path, data: bytes) -> None:
    with pytest.raises(StatesError):
        read(file, data)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"cos\nsystem\n(S'false'\ntR.",
    ],
    ids=["empty", "list", "null", "not UTF-8", "cut", "deep", "bare", "long number", "pickle"],
)
def test_metadata_that_is_none(file: Path, text: bytes) -> None:
    with pytest.raises(StatesError):
        read(file, with_metadata(text))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": "1"},
        {"format": None},
        {"extra": 1},
        {"key": "../../etc/passwd"},
        {"key": "AB12"},
        {"key": ""},
        {"key": "a" * 129},
        {"key": 12},
        {"key": "cd34"},
        {"layout": None},
        {"dtype": "object"},
        {"dtype": "float64"},
        {"dtype": "uint8"},
        {"dtype": ["float32"]},
        {"shape": [4]},
        {"shape": [2, 3]},
        {"shape": [2, 2, 1]},
        {"shape": []},
        {"shape": [2, 0]},
        {"shape": [-2, -2]},
        {"shape": [2.0, 2]},
        {"shape": [True, 4]},
        {"shape": [10**4000, 10**4000]},
        {"shape": [1] * 33},
        {"shape": "22"},
        {"shape": None},
        {"tokens": 3},
        {"tokens": 2.0},
        {"tokens": None},
        {"token_ids": [5]},
        {"token_ids": []},
        {"token_ids": [5, -1]},
        {"token_ids": [5, 2**31]},
        {"token_ids": [5, 2**64]},
        {"token_ids": [5, 10**400]},
        {"token_ids": [5, 6.5]},
        {"token_ids": [5, "6"]},
        {"token_ids": [[5], [6]]},
        {"token_ids": [5, [6]]},
        {"token_ids": [5, None]},
        {"token_ids": {"5": 6}},
        {"token_ids": "56"},
        {"token_ids": [True, False]},
        {"position_ids": [0, 0]},
        {"position_ids": [3, 0]},
        {"position_ids": [0, 3, 4]},
        {"model": 5},
        {"schema": None},
        {"module": "\ud800"},
        {"created": "now"},
        {"created": True},
        {"created": -1},
        {"created": 1e300},
        {"created": float("nan")},
        {"created": float("inf")},
        {"created": 10**400},
        {"checksum": ""},
        {"checksum": "xxh3_128:"},
        {"checksum": "xxh3_128:" + "g" * 32},
        {"checksum": "md5:" + "0" * 32},
        {"checksum": "xxh3_128:" + "0" * 32},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_metadata_with_one_wrong_value(file: Path, changes: dict[str, Any]) -> None:
    """Checksum and footer agree with it, as if someone had made the file on purpose."""
    read(file, with_values())
    with pytest.raises(StatesError):
        read(file, with_values(**changes))


@pytest.mark.parametrize("name", ["key", "shape", "tokens", "token_ids", "checksum", "created", "format"])
def test_metadata_that_lacks_a_value(file: Path, name: str) -> None:
    values = json.loads(metadata(checksum=checksum_of(GOLDEN_ARRAY.tobytes())).to_json())
    del values[name]
    with pytest.raises(StatesError):
        read(file, with_metadata(json.dumps(values).encode()))


@pytest.mark.parametrize(
    ("descr", "order", "shape"),
    [("<f8", False, "(1, 2)"), ("|O", False, "(2, 2)"), ("<f4", True, "(2, 2)"), ("<f4", False, "(4,)")],
)
def test_header_that_says_otherwise_than_the_metadata(file: Path, descr: str, order: bool, shape: str) -> None:
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 4086) + text.ljust(4085) + b"\n"
    with pytest.raises(StatesError, match="header"):
        read(file, header + GOLDEN_FILE[HEADER_BYTES:])


def test_metadata_survives_any_text(file: Path) -> None:
    name = 'ünï\x00"\\\n\u2028🎌'
    found = read(file, with_values(model=name, schema=name, module=name))
    assert (found.model, found.schema, found.module) == (name, name, name)


def test_metadata_over_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_pc.store.format.MAX_METADATA_BYTES", 100)
    with pytest.raises(StatesError, match="limit is 100"):
        pack_trailer(metadata())
