"""libllama's state blob: what is built is what libllama gives, and what is not exactly that is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc.backends.base import Plan, states_bytes
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.blob import BlobFormat, Bytes
from edge_pc.errors import ModelError, StatesError

pytestmark = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")

FORMAT = BlobFormat(layers=3, width=8)
POSITIONS = np.array([4, 5, 9], dtype=np.int32)


def filled() -> Bytes:
    blob = FORMAT.build(POSITIONS)
    parts = FORMAT.parts(blob, 3)
    rng = np.random.default_rng(0)
    parts.keys[:] = rng.integers(0, 255, parts.keys.shape)
    parts.values[:] = rng.integers(0, 255, parts.values.shape)
    return blob


def stored(blob: Bytes) -> Any:
    array = np.zeros(FORMAT.kv_layout(3).array_shape(np.arange(3, dtype=np.int32)), dtype=np.uint8)
    array.reshape(-1)[: len(blob)] = blob
    return array


def test_a_golden_blob_of_one_cell() -> None:
    blob = BlobFormat(layers=1, width=2).build(np.array([7], dtype=np.int32))
    words = blob.tobytes()
    assert words[:16] == b"\xd8\x3c\x14\xaf" + b"\0\0\0\0" + b"\1\0\0\0" + b"\1\0\0\0", "header"
    assert words[16:28] == b"\7\0\0\0" + b"\1\0\0\0" + b"\0\0\0\0", "table"
    assert words[28:36] == b"\1\0\0\0" + b"\1\0\0\0", "sizes"
    assert words[36:52] == b"\1\0\0\0" + b"\4\0\0\0\0\0\0\0" + b"\0\0\0\0", "keys"
    assert words[52:68] == b"\1\0\0\0" + b"\2\0\0\0" + b"\2\0\0\0" + b"\0\0\0\0", "values"
    assert len(words) == 68


def test_the_layout_has_room_for_a_blob_of_any_length() -> None:
    for blobs in (FORMAT, smollm2 := BlobFormat(layers=30, width=192)):
        for tokens in (*range(1, 40), 1000):
            assert blobs.nbytes(tokens) <= states_bytes(blobs.kv_layout(3), np.arange(tokens, dtype=np.int32))
    assert states_bytes(smollm2.kv_layout(3), np.arange(1000, dtype=np.int32)) < 1.01 * smollm2.nbytes(1000)


def test_the_layout_names_all_that_keeps_states_apart() -> None:
    name = FORMAT.kv_layout(3).name
    assert all(part in name for part in ("llamacpp", "state3", "f16", "noflash"))
    assert FORMAT.kv_layout(4).name != name


def test_what_was_built_is_accepted() -> None:
    blob = filled()
    assert np.array_equal(FORMAT.check(stored(blob), POSITIONS), blob)


def test_a_change_in_any_byte_but_keys_and_values_is_refused() -> None:
    parts = FORMAT.parts(blob := filled(), 3)
    free = np.zeros(len(blob), dtype=bool)
    for content in (parts.keys, parts.values):
        content[:] = 0
        before = blob.copy()
        content[:] = 255
        free |= before != blob
    assert 0 < np.count_nonzero(~free) < len(blob)
    for index in np.flatnonzero(~free):
        broken = filled()
        broken[index] ^= 1
        with pytest.raises(StatesError, match=r"header|table|sizes"):
            FORMAT.check(stored(broken), POSITIONS)


def test_a_blob_cut_anywhere_is_refused() -> None:
    blob = filled()
    for length in range(len(blob)):
        with pytest.raises(StatesError):
            FORMAT.check(blob[:length], POSITIONS)


def test_other_positions_another_dtype_and_another_model_are_refused() -> None:
    array = stored(filled())
    with pytest.raises(StatesError, match="table"):
        FORMAT.check(array, POSITIONS + 1)
    with pytest.raises(StatesError, match="float32"):
        FORMAT.check(array.astype(np.float32), POSITIONS)
    with pytest.raises(StatesError):
        BlobFormat(layers=3, width=4).check(array, POSITIONS)


def test_some_cells_of_a_blob() -> None:
    blob = filled()
    taken = FORMAT.take(blob, np.array([2, 0], dtype=np.int32), np.array([30, 31], dtype=np.int32))
    assert FORMAT.positions(taken).tolist() == [30, 31]
    whole, some = FORMAT.parts(blob, 3), FORMAT.parts(taken, 2)
    assert np.array_equal(some.keys, whole.keys[:, [2, 0]])
    assert np.array_equal(some.values, whole.values[:, :, [2, 0]])


def test_encoded_states_are_in_the_format(tiny_gguf: Path) -> None:
    """The real library's bytes, of tokens whose positions have a gap."""
    backend = LlamaCppBackend(tiny_gguf)
    positions = np.array([3, 4, 5, 20, 21], dtype=np.int32)
    context = backend.new_context(8)
    array = context.encode(Plan((), np.arange(10, 15, dtype=np.int32), positions), np.array([0, 1, 2, 4]))
    context.close()
    blobs = BlobFormat(backend.spec.layers, backend.spec.kv_heads * backend.spec.head_dim)
    kept = positions[[0, 1, 2, 4]]
    parts = blobs.parts(blobs.check(array, kept), 4)
    assert parts.keys.any(axis=(0, 2)).all()
    assert parts.values.any(axis=(0, 1, 3)).all()
    backend.close()


def test_a_library_that_keeps_its_cache_otherwise_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_pc.backends.llamacpp.blob.MAGIC", 0x12345678)
    with pytest.raises(ModelError, match="the way this version of edge-pc expects"):
        LlamaCppBackend(tiny_gguf)
