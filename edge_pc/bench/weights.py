"""How many weights a model multiplies with for each token, and how many bytes they take: for the model of TTFT."""

from __future__ import annotations

from pathlib import Path

from edge_pc.backends.onnx.forward import MODEL_FILE


def weight_bytes(path: Path) -> int:
    """Bytes of a GGUF file, or of an exported folder's graph and weights."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob(f"{MODEL_FILE}*"))


def matmul_parameters(path: Path) -> int:
    """Weights of all layers' matrices, which every token is multiplied with.

    The matrix that gives logits is left out: it is used for one token of a prompt.
    """
    return _of_gguf(path) if path.is_file() else _of_graph(path / MODEL_FILE)


def _of_gguf(path: Path) -> int:
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_elements) for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) > 1)


def _of_graph(path: Path) -> int:
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    outputs = {output.name for output in graph.output}
    total = 0
    for node in graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if outputs.intersection(node.output):
            continue
        if node.op_type == "MatMulNBits":
            total += attributes["K"] * attributes["N"]
        elif node.op_type in ("MatMul", "Gemm") and len(shapes.get(node.input[1], ())) == 2:
            rows, columns = shapes[node.input[1]]
            total += rows * columns
    return total
