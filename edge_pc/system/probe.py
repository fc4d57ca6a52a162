"""`python -m edge_pc.system.probe NAME` loads a backend's library and computes a little with it.

`doctor` runs it in a child process: a library built for another CPU dies by an illegal instruction, and only that child
dies. Prints one JSON object of facts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable


def probe_onnx() -> dict[str, str]:
    """Run one small matrix product in ONNX Runtime: loading alone does not reach its kernels."""
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


def probe_llamacpp() -> dict[str, str]:
    """Load libllama and let it name what it was built with."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    built_with = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    return {"version": llama_cpp.__version__, "built with": " ".join(built_with.split())}


PROBES: dict[str, Callable[[], dict[str, str]]] = {"onnx": probe_onnx, "llamacpp": probe_llamacpp}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROBES[sys.argv[1]]()) + "\n")
