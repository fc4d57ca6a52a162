"""Moves keys of rotary models to other positions: a rotation by p and one by d are together one by p + d."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import StatesError
from edge_pc.models.positions import PositionEncoding, RotaryEncoding


def rotate(
    keys: NDArray[Any], position: PositionEncoding, shift: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Keys of cells that are placed `shift` positions after where they were encoded.

    Args:
        keys: float32 or float16 `[..., tokens, head_dim]`, as they are stored.
        position: how the model encodes positions.
        shift: in tokens, of any sign.
        out: float32, of the shape of `keys`, where the result goes; must not overlap `keys`.

    Returns:
        `out`, or a new array.

    Raises:
        StatesError: cells of such a model cannot be placed at other positions.
    """
    if position.fixed:
        raise StatesError(f"states of this model cannot be moved to other positions: {position.fixed}")
    if out is None:
        out = np.empty(keys.shape, dtype=np.float32)
    if not isinstance(position, RotaryEncoding) or not shift:
        out[...] = keys
        return out
    angles = np.array(position.frequencies, dtype=np.float64) * shift
    turns = np.exp(1j * angles).astype(np.complex64)
    rotated, dims = keys[..., : position.dims].astype(np.float32, copy=False), position.dims
    if position.interleaved:  # neighbours are the two parts of a complex number
        np.multiply(rotated.view(np.complex64), turns, out=out[..., :dims].view(np.complex64))
    else:
        first, second = rotated[..., : dims // 2], rotated[..., dims // 2 :]
        np.subtract(first * turns.real, second * turns.imag, out=out[..., : dims // 2])
        np.add(second * turns.real, first * turns.imag, out=out[..., dims // 2 : dims])
    out[..., dims:] = keys[..., dims:]
    return out
