"""Reaches into the graph of a libllama context while it is computed: its positions, its mask, its weights of attention.

libllama asks a callback about each node before it computes it, and shows the nodes that were asked for afterwards. The
inputs of a node can be read off its tensor (`ggml_tensor` in ggml.h), and written: what it then computes is up to us.

A callback costs about a thousand calls of Python a run: 1 to 2 % of a decoded token of SmolLM2-135M, and far more where
another Python thread holds the interpreter. So only the workbench has one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray
from edge_pc.errors import EngineError, ModelError

_FLOAT32, _INT32 = 0, 26  # ggml's numbers of the types
_POSITIONS, _MASK, _WEIGHTS = b"inp_pos", b"attn_inp_kq_mask", b"kq_soft_max-%d"
_SOURCES = 3  # that a node which takes positions or a mask has at most


class _Tensor(ctypes.Structure):
    """The public `ggml_tensor`."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


@dataclass(slots=True, eq=False)
class _Run:
    """What a run is to have instead of libllama's own, and what is to be seen of it.

    Attributes:
        inputs: by name, those that were not given yet.
        watched: names of the nodes that were not seen yet.
        weights: float32 `[cells]`, added up over those that were.
    """

    inputs: dict[bytes, NDArray[Any]]
    watched: list[bytes]
    weights: NDArray[np.float32]
    error: Exception | None = None


class Hook:
    """For one context, and one run of it after the other.

    Args:
        library: the bindings.

    Attributes:
        callback: what the context is to be made with.
    """

    def __init__(self, library: ModuleType) -> None:
        self._run: _Run | None = None
        self.callback = library.ggml_backend_sched_eval_callback(self._called)

    def prepare(self, position_ids: IntArray, visible: NDArray[np.bool_], layers: Sequence[int] = ()) -> None:
        """Let the next run compute tokens at `position_ids`.

        Args:
            position_ids: int32 `[n]`.
            visible: `[n, places]`: whether each token sees the cell in each place, from the first one on, the run's
                own n cells last.
            layers: whose weights of attention are wanted, ascending. Nothing is computed after the last of these.
        """
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        weights = np.zeros(visible.shape[1] - len(position_ids), dtype=np.float32)
        self._run = _Run({_POSITIONS: position_ids, _MASK: mask}, [_WEIGHTS % layer for layer in layers], weights)

    def finish(self) -> NDArray[np.float32]:
        """End a run; returns float32 `[places - n]`: the share of the attention to the cells before the run that each
        of them has, averaged over tokens and heads, and added up over layers.

        Raises:
            ModelError: the graph is not as expected; nothing of the run must be used.
        """
        run, self._run = self._run, None
        if run is None:
            raise EngineError("no run was prepared")
        missing = [name.decode() for name in (*run.inputs, *run.watched)]
        if run.error is not None or missing:
            reason = run.error or f"it has no {', '.join(missing)}"
            raise ModelError(
                f"libllama's graph is not as expected: {reason}",
                hint="install the llama-cpp-python that edge-pc was tested with",
            )
        return run.weights

    def _called(self, address: int, asked: bool, _: object) -> bool:
        run = self._run
        if run is None:
            return False
        try:
            tensor = _Tensor.from_address(address)
            if not asked:
                return _see(run, tensor)
            if run.inputs:
                _give_inputs(run, tensor)
            return tensor.name in run.watched
        except Exception as exc:  # nobody above this frame would see it
            run.error = run.error or exc
            return False


def _give_inputs(run: _Run, tensor: _Tensor) -> None:
    for source in tensor.src[:_SOURCES]:
        if source and source.contents.name in run.inputs:
            _write(source.contents, run.inputs.pop(source.contents.name))


def _write(tensor: _Tensor, content: NDArray[Any]) -> None:
    """Write positions, or a mask; libllama's has places beyond those that are in use."""
    kind = _INT32 if content.dtype == np.int32 else _FLOAT32
    target = _view(tensor, kind, content.dtype)
    if target.shape[-2] != (1 if content.ndim == 1 else len(content)) or target.shape[-1] < content.shape[-1]:
        raise ValueError(f"{tensor.name.decode()} has shape {target.shape}, expected room for {content.shape}")
    target[..., content.shape[-1] :] = -np.inf if content.ndim == 2 else 0
    target[..., : content.shape[-1]] = content


def _see(run: _Run, tensor: _Tensor) -> bool:
    """Take a layer's weights; whether the rest of the graph is wanted."""
    weights = _view(tensor, _FLOAT32, np.dtype(np.float32))[..., : len(run.weights)].reshape(-1, len(run.weights))
    sums = np.maximum(weights.sum(axis=1), np.finfo(np.float32).tiny)
    run.weights += (1 / sums / len(sums)) @ weights
    run.watched.remove(tensor.name)
    return bool(run.watched)


def _view(tensor: _Tensor, kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A tensor's numbers, its dimensions in numpy's order; they lie in the memory of the CPU, without gaps."""
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    expected = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.itemsize for axis in range(4))
    if tensor.type != kind or strides != expected or not tensor.data:
        raise ValueError(f"{tensor.name.decode()} is of type {tensor.type} with strides {strides}, expected {expected}")
    memory = (ctypes.c_uint8 * (expected[0] * shape[0])).from_address(tensor.data)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)
