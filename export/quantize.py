"""Asymmetric block quantization in the format of ONNX Runtime's `com.microsoft.MatMulNBits`.

A row of the matrix is cut into blocks; each block has a float32 scale and an integer zero point, and a weight is
`(level - zero_point) * scale`. 8-bit levels span the block's range. With 4 bits the range that loses least is searched
for: a few widths of the range, both neighbouring zero points, and the least-squares scale for the levels that result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import OptionError

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]

# Widths tried, in parts of a block's full range: cutting the extremes off can make all other levels finer.
_WIDTHS = np.linspace(0.72, 1.05, 12, dtype=np.float32)
_BLOCKS_AT_ONCE = 4096  # temporaries of the search stay in the processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A quantized matrix `[out, in]`.

    Attributes:
        packed: uint8 `[out, blocks, block * bits / 8]`; with 4 bits the first of two levels is in the low half.
        scales: float32 `[out * blocks]`.
        zero_points: uint8 `[out * ceil(blocks * bits / 8)]`, packed row by row like the levels.
    """

    packed: ByteArray
    scales: FloatArray
    zero_points: ByteArray


def quantize(matrix: FloatArray, bits: int, block: int = 32) -> QuantizedMatrix:
    """Quantize a matrix in blocks along its rows.

    Args:
        matrix: float32 `[out, in]`, finite.
        bits: 4 or 8.
        block: weights that share a scale; a power of two from 16. A row's last block may be shorter: the levels after
            its end stand for zero.

    Raises:
        OptionError: `bits` or `block` is none that MatMulNBits knows.
    """
    if bits not in (4, 8):
        raise OptionError(f"bits is {bits}, expected 4 or 8")
    if block < 16 or block & (block - 1):
        raise OptionError(f"block is {block}, expected a power of two from 16")
    rows, columns = matrix.shape
    count = -(-columns // block)
    padded = np.zeros((rows, count * block), dtype=np.float32)
    padded[:, :columns] = matrix
    blocks = padded.reshape(rows * count, block)

    levels = np.empty(blocks.shape, dtype=np.uint8)
    scales = np.empty(len(blocks), dtype=np.float32)
    zeros = np.empty(len(blocks), dtype=np.uint8)
    fit = _fit_range if bits == 8 else _fit_best
    for part in _parts(len(blocks)):
        scales[part], zero, level = fit(blocks[part], float(2**bits - 1))
        zeros[part], levels[part] = zero, level

    packed = _pack(levels.reshape(rows, count * block), bits)
    return QuantizedMatrix(
        packed=packed.reshape(rows, count, block * bits // 8),
        scales=scales,
        zero_points=_pack(zeros.reshape(rows, count), bits).reshape(-1),
    )


def _parts(total: int) -> Iterator[slice]:
    for start in range(0, total, _BLOCKS_AT_ONCE):
        yield slice(start, min(start + _BLOCKS_AT_ONCE, total))


def _range_scale(blocks: FloatArray, top: float) -> tuple[FloatArray, FloatArray]:
    """Scale and exact (not yet whole) zero point that make the levels 0 to `top` span each block and zero."""
    low = np.minimum(blocks.min(axis=1), 0.0)
    scale = blocks.max(axis=1).clip(0.0) / top - low / top
    scale = np.where(scale > 0.0, scale, np.float32(1.0))
    return scale, (-low / scale).clip(0.0, top)


def _levels(blocks: FloatArray, scale: FloatArray, zero: FloatArray, top: float) -> FloatArray:
    levels: FloatArray = np.clip(np.rint(blocks / scale[:, None] + zero[:, None]), 0.0, top)
    return levels


def _fit_range(blocks: FloatArray, top: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Scales, zero points and levels of blocks `[n, block]`, from each block's smallest and largest weight."""
    scale, exact_zero = _range_scale(blocks, top)
    zero = np.rint(exact_zero)
    return scale, zero, _levels(blocks, scale, zero, top)


def _fit_best(blocks: FloatArray, top: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """As `_fit_range`, with the smallest squared error among the candidates; never worse than `_fit_range`."""
    full_scale, exact_zero = _range_scale(blocks, top)
    # In units of the full range's step, squares of tiny or huge weights stay within float32.
    units = blocks / full_scale[:, None]
    best_scale, best_zero = np.ones_like(full_scale), np.rint(exact_zero)
    best_levels = _levels(units, best_scale, best_zero, top)
    best_error = _squared_error(units, best_scale, best_zero, best_levels)
    for width in _WIDTHS:
        for zero in (np.floor(exact_zero), np.ceil(exact_zero)):
            levels = _levels(units, np.full_like(full_scale, width), zero, top)
            scale = _least_squares_scale(units, levels - zero[:, None])
            error = _squared_error(units, scale, zero, levels)
            better = error < best_error
            best_error[better], best_scale[better] = error[better], scale[better]
            best_zero[better], best_levels[better] = zero[better], levels[better]
    return best_scale * full_scale, best_zero, best_levels


def _least_squares_scale(units: FloatArray, steps: FloatArray) -> FloatArray:
    """The scale that fits `steps * scale` to each block best; 1 where no positive one does."""
    squares = np.einsum("nb,nb->n", steps, steps)
    products = np.einsum("nb,nb->n", steps, units)
    usable = (squares > 0.0) & (products > 0.0)
    scale: FloatArray = np.ones_like(products)
    np.divide(products, squares, out=scale, where=usable)
    return scale


def _squared_error(units: FloatArray, scale: FloatArray, zero: FloatArray, levels: FloatArray) -> FloatArray:
    difference = (levels - zero[:, None]) * scale[:, None] - units
    error: FloatArray = np.einsum("nb,nb->n", difference, difference)
    return error


def _pack(levels: ByteArray, bits: int) -> ByteArray:
    """Levels `[rows, n]` to bytes `[rows, ceil(n * bits / 8)]`."""
    if bits == 8:
        return levels
    if levels.shape[1] % 2:
        levels = np.pad(levels, ((0, 0), (0, 1)))
    return np.bitwise_or(levels[:, 0::2], np.left_shift(levels[:, 1::2], 4), dtype=np.uint8)
