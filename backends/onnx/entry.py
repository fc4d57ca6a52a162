"""What is known of the ONNX Runtime backend before onnxruntime is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from edge_pc.backends.entry import BackendEntry
from edge_pc.checks import THREADS, check_choice, check_number
from edge_pc.errors import OptionError
from edge_pc.system.pages import can_map

if TYPE_CHECKING:
    from pathlib import Path

    from edge_pc.backends.onnx.backend import OnnxBackend
    from edge_pc.models.description import Description

Assembly = Literal["auto", "map", "copy"]
KVStorage = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """How the ONNX Runtime backend runs.

    Attributes:
        threads: compute threads; None: the CPUs this process may use.
        provider: execution provider (`cpu`, `cuda`, …).
        assembly: `map` file pages into the arena, `copy` them, or `auto`: whichever is faster for each span.
        kv_storage: dtype of stored KV states: `float32`, or `float16` at half the size and slower to load.
        verbose: let the library log to stderr.

    Raises:
        OptionError: a value is not known, or this system cannot do it.
    """

    threads: int | None = None
    provider: str = "cpu"
    assembly: Assembly = "auto"
    kv_storage: KVStorage = "float32"
    verbose: bool = False

    def __post_init__(self) -> None:
        check_number("threads", self.threads, THREADS)
        check_choice("assembly", self.assembly, get_args(Assembly))
        check_choice("kv_storage", self.kv_storage, get_args(KVStorage))
        if self.assembly == "map" and not can_map():
            raise OptionError("this system cannot map files over memory", hint="use assembly 'auto' or 'copy'")


def _open(model: Path, options: OnnxOptions) -> OnnxBackend:
    from edge_pc.backends.onnx.backend import OnnxBackend

    return OnnxBackend(model, options)


def _describe(model: Path) -> Description:
    from edge_pc.models.description import describe

    return describe(model)


def _probe() -> dict[str, str]:
    """Run one small matrix product: loading alone does not reach the kernels."""
    import numpy as np
    import onnx
    import onnxruntime

    matrix = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64, 64]) for name in "ABC"]
    node = onnx.helper.make_node("MatMul", ["A", "B"], ["C"])
    graph = onnx.helper.make_graph([node], "probe", matrix[:2], matrix[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ones = np.ones((64, 64), dtype=np.float32)
    (product,) = session.run(None, {"A": ones, "B": ones})
    if not np.array_equal(product, ones * 64):
        raise ArithmeticError("ONNX Runtime computed a wrong matrix product")
    providers = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    return {"version": onnxruntime.__version__, "providers": ", ".join(providers)}


ENTRY = BackendEntry(
    name="onnx",
    title="ONNX Runtime",
    model_kind="onnx",
    package="onnxruntime",
    import_name="onnxruntime",
    extra=None,
    options=OnnxOptions,
    open=_open,
    describe=_describe,
    probe=_probe,
    baseline="edge_pc.backends.onnx.baseline",
)
