"""Keys that are moved to other positions, against a rotation that is computed pair by pair in Python's own floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_pc.errors import StatesError
from edge_pc.models.positions import (
    AlibiEncoding,
    LearnedEncoding,
    OpaqueEncoding,
    PositionEncoding,
    RotaryEncoding,
)
from edge_pc.models.rotation import rotate

FREQUENCIES = tuple(10000.0 ** (-pair / 8) / 1.7 for pair in range(8))


def at_position(key: NDArray[Any], position: int, encoding: RotaryEncoding) -> NDArray[np.float64]:
    """One key `[head_dim]` that was not rotated yet, rotated by its position."""
    rotated = key.astype(np.float64)
    pairs = len(encoding.frequencies)
    for pair, frequency in enumerate(encoding.frequencies):
        a, b = (2 * pair, 2 * pair + 1) if encoding.interleaved else (pair, pair + pairs)
        turned = complex(key[a], key[b]) * complex(math.cos(position * frequency), math.sin(position * frequency))
        rotated[a], rotated[b] = turned.real, turned.imag
    return rotated


@pytest.mark.parametrize("shift", [1, -1, 37, -300, 8000])
@pytest.mark.parametrize("head_dim", [16, 24], ids=["all dimensions", "some dimensions"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_moved_keys_are_those_of_the_new_position(dtype: str, interleaved: bool, head_dim: int, shift: int) -> None:
    encoding = RotaryEncoding(FREQUENCIES, interleaved)
    plain = np.random.default_rng(0).standard_normal((2, 3, 5, head_dim))
    positions = np.array([300, 301, 317, 1000, 5000])

    def keys(moved: int) -> NDArray[np.float64]:
        rows = [[at_position(k, p + moved, encoding) for k, p in zip(h, positions, strict=True)] for h in plain[0]]
        return np.array([rows])

    stored, wanted = keys(0).astype(dtype), keys(shift)
    tolerance = 1e-5 if dtype == "float32" else 2e-3  # what storing in 16 bit costs
    moved = rotate(stored, encoding, shift)
    assert moved.dtype == np.float32
    assert np.abs(moved - wanted).max() <= tolerance * np.abs(wanted).max()
    if head_dim > encoding.dims:
        np.testing.assert_array_equal(moved[..., encoding.dims :], stored[..., encoding.dims :])


def test_the_result_goes_where_it_is_wanted() -> None:
    encoding = RotaryEncoding(FREQUENCIES, interleaved=False)
    keys = np.random.default_rng(1).standard_normal((2, 3, 300, 16)).astype(np.float32)
    before = keys.copy()
    arena = np.full((2, 3, 400, 16), 7, dtype=np.float32)
    part = arena[:, :, 50:350]
    assert rotate(keys, encoding, 5, out=part) is part
    np.testing.assert_array_equal(part, rotate(keys, encoding, 5))
    assert (arena[:, :, :50] == 7).all()
    assert (arena[:, :, 350:] == 7).all()
    np.testing.assert_array_equal(keys, before)


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257, 1000])
def test_any_number_of_tokens(tokens: int) -> None:
    encoding = RotaryEncoding(FREQUENCIES, interleaved=False)
    keys = np.random.default_rng(2).standard_normal((2, tokens, 16)).astype(np.float32)
    wanted = [[at_position(key, 9, encoding) for key in head] for head in keys]
    np.testing.assert_allclose(rotate(keys, encoding, 9), np.reshape(wanted, keys.shape), atol=1e-5)


def test_keys_that_hold_no_position_are_copied() -> None:
    keys = np.random.default_rng(3).standard_normal((2, 5, 16)).astype(np.float32)
    np.testing.assert_array_equal(rotate(keys, AlibiEncoding(8.0), 100), keys)
    np.testing.assert_array_equal(rotate(keys, RotaryEncoding(FREQUENCIES, True), 0), keys)


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        (LearnedEncoding(positions=2048), "a learned vector of its own"),
        (OpaqueEncoding("nobody knows"), "nobody knows"),
    ],
)
def test_states_that_cannot_be_moved(encoding: PositionEncoding, reason: str) -> None:
    with pytest.raises(StatesError, match=f"cannot be moved to other positions: .*{reason}"):
        rotate(np.zeros((1, 1, 16), dtype=np.float32), encoding, 3)
