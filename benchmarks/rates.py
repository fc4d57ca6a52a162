"""Measures how fast this machine moves memory and computes, with all allowed CPUs: what a TTFT can be explained by."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from benchmarks.rows import Rates
from edge_pc.system.cpu import allowed_cpus

# Far more than any cache of a laptop; less where memory is short.
_BUFFER_BYTES = 512 << 20
_REPEATS = 5
_MATRIX = 1024
_ROWS = 512
_BLOCK = 32


def measure_rates(memory_bytes: int = 0) -> Rates:
    """Measure in about three seconds.

    Args:
        memory_bytes: what this process may use; 0: unknown. At most an eighth of it is taken.
    """
    nbytes = min(_BUFFER_BYTES, memory_bytes // 16) if memory_bytes else _BUFFER_BYTES
    source = np.ones(nbytes // 8, dtype=np.int64)
    target = np.empty_like(source)
    threads = allowed_cpus()
    with ThreadPoolExecutor(threads) as pool:
        parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))

        def read() -> None:
            list(pool.map(lambda part: part[0].max(), parts))

        copied = 2 * source.nbytes / _best_seconds(copy)
        was_read = source.nbytes / _best_seconds(read)
    return Rates(
        copy_gbps=round(copied / 1e9, 2),
        read_gbps=round(was_read / 1e9, 2),
        float32_gflops=round(_float32_rate() / 1e9, 1),
        int8_gflops=round(_int8_rate() / 1e9, 1),
    )


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _float32_rate() -> float:
    matrix = np.random.default_rng(0).standard_normal((_MATRIX, _MATRIX)).astype(np.float32)
    return float(2 * _MATRIX**3 / _best_seconds(lambda: matrix @ matrix))


def _int8_rate() -> float:
    """Operations per second of `MatMulNBits`, 8 bit, blocks of 32, activations rounded to int8."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = allowed_cpus()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(_product(), options, providers=["CPUExecutionProvider"])
    rows: NDArray[np.float32] = np.random.default_rng(0).standard_normal((_ROWS, _MATRIX)).astype(np.float32)
    return float(2 * _ROWS * _MATRIX**2 / _best_seconds(lambda: session.run(None, {"rows": rows})))


def _product() -> bytes:
    """A graph of one such product, with random weights."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    blocks = _MATRIX // _BLOCK
    weights = numpy_helper.from_array(rng.integers(0, 256, (_MATRIX, blocks, _BLOCK), dtype=np.uint8), "weights")
    scales = numpy_helper.from_array(rng.random((_MATRIX, blocks), dtype=np.float32), "scales")
    node = helper.make_node(
        "MatMulNBits", ["rows", "weights", "scales"], ["product"], domain="com.microsoft",
        K=_MATRIX, N=_MATRIX, bits=8, block_size=_BLOCK, accuracy_level=4,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, _MATRIX]) for name in ("rows", "product")]
    graph = helper.make_graph([node], "product", values[:1], values[1:], initializer=[weights, scales])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return serialized
