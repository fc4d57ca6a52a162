"""Block quantization: error bounds, corner cases, and the very format that ONNX Runtime's kernel reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_pc.errors import OptionError
from edge_pc.export.quantize import QuantizedMatrix, quantize


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.float32]:
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return packed[:, :count].astype(np.float32)


def dequantize(quantized: QuantizedMatrix, bits: int, columns: int) -> NDArray[np.float32]:
    rows, blocks, size = quantized.packed.shape
    block = size * 8 // bits
    levels = unpack(quantized.packed.reshape(rows, -1), bits, blocks * block).reshape(rows, blocks, block)
    zeros = unpack(quantized.zero_points.reshape(rows, -1), bits, blocks)[:, :, None]
    matrix = (levels - zeros) * quantized.scales.reshape(rows, blocks, 1)
    return matrix.reshape(rows, -1)[:, :columns]


@st.composite
def matrices(draw: st.DrawFn) -> NDArray[np.float32]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 100))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale, offset = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e6])), draw(st.sampled_from([0.0, 5.0, -5.0]))
    return ((rng.standard_normal((rows, columns)) + offset) * scale).astype(np.float32)


def block_ranges(matrix: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """The range of each weight's block, zero included, in the shape of the matrix."""
    ranges = np.empty_like(matrix)
    for start in range(0, matrix.shape[1], block):
        part = matrix[:, start : start + block]
        low, high = part.min(1, initial=0.0), part.max(1, initial=0.0)
        ranges[:, start : start + block] = (high - low)[:, None]
    return ranges


@settings(max_examples=60, deadline=None)
@given(matrix=matrices(), block=st.sampled_from([16, 32, 64]))
def test_8_bit_error_is_at_most_one_step(matrix: NDArray[np.float32], block: int) -> None:
    step = block_ranges(matrix, block) / 255
    error = np.abs(dequantize(quantize(matrix, 8, block), 8, matrix.shape[1]) - matrix)
    assert (error <= step * 1.001).all()


@settings(max_examples=60, deadline=None)
@given(matrix=matrices(), block=st.sampled_from([16, 32, 64]))
def test_4_bit_squared_error_is_at_most_that_of_the_full_range(matrix: NDArray[np.float32], block: int) -> None:
    # Half a step for rounding a weight, half a step for rounding the zero point.
    step = block_ranges(matrix, block).astype(np.float64) / 15
    error = dequantize(quantize(matrix, 4, block), 4, matrix.shape[1]).astype(np.float64) - matrix
    for start in range(0, matrix.shape[1], block):
        part = slice(start, start + block)
        assert ((error[:, part] ** 2).sum(1) <= (step[:, part] ** 2).sum(1) * 1.001).all()


def test_searching_beats_the_full_range_on_normal_weights() -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    step = block_ranges(matrix, 32) / 15
    low = np.minimum(matrix.reshape(64, -1, 32).min(-1), 0)[:, :, None].repeat(32, -1).reshape(matrix.shape)
    zero = np.rint(-low / step)
    full_range = (np.clip(np.rint(matrix / step + zero), 0, 15) - zero) * step
    searched = dequantize(quantize(matrix, 4), 4, 512)
    assert ((searched - matrix) ** 2).mean() < 0.95 * ((full_range - matrix) ** 2).mean()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-38, -1e-42, 3e38])
def test_constant_blocks_come_back(bits: int, value: float) -> None:
    matrix = np.full((2, 40), value, dtype=np.float32)
    np.testing.assert_allclose(dequantize(quantize(matrix, bits), bits, 40), matrix, rtol=1e-5, atol=1e-44)


def test_blocks_of_16_levels_come_back_within_half_a_step_of_8_bits() -> None:
    rng = np.random.default_rng(1)
    levels = rng.integers(0, 16, (8, 64)).astype(np.float32)
    levels[:, [0, 32]], levels[:, [1, 33]] = 0, 15  # each block uses its whole range, as quantizers make it
    matrix = levels * 0.013 - 0.1
    error = dequantize(quantize(matrix, 8), 8, 64) - matrix
    assert np.abs(error).max() <= 0.5 * 15 * 0.013 / 255 * 1.001
    # The levels themselves are hit; what is left is one shift for the whole block.
    assert np.ptp(error.reshape(8, 2, 32), axis=-1).max() < 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 96, 50, 7])
def test_onnxruntime_reads_the_format(bits: int, columns: int) -> None:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((24, columns)) + 0.3).astype(np.float32)
    quantized = quantize(matrix, bits)
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "scales", "zeros"], ["y"], domain="com.microsoft",
        K=columns, N=24, bits=bits, block_size=32, accuracy_level=1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "one_matrix",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 24])],
        [
            numpy_helper.from_array(quantized.packed, "b"),
            numpy_helper.from_array(quantized.scales, "scales"),
            numpy_helper.from_array(quantized.zero_points, "zeros"),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = rng.standard_normal((5, columns)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ dequantize(quantized, bits, columns).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "block"), [(5, 32), (16, 32), (8, 20), (8, 8)])
def test_other_formats_are_refused(bits: int, block: int) -> None:
    with pytest.raises(OptionError, match="expected"):
        quantize(np.zeros((2, 64), np.float32), bits, block)
