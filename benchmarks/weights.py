"""How many weights a model multiplies with for each token, and how many bytes they take: for the model of TTFT."""

from __future__ import annotations

from pathlib import Path

from edge_pc.backends.onnx.forward import MODEL_FILE


def weights(model: Path) -> tuple[int, int]:
    """(bytes of a model's weights, numbers in the matrices that every token is multiplied with).

    The matrix that gives logits is left out: it is used for one token of a prompt.

    Args:
        model: a GGUF file, or an exported folder.
    """
    return _of_gguf(model) if model.is_file() else _of_graph(model)


def _of_gguf(model: Path) -> tuple[int, int]:
    import gguf

    tensors = gguf.GGUFReader(model).tensors
    layers = [tensor for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) > 1]
    return model.stat().st_size, sum(int(tensor.n_elements) for tensor in layers)


def _of_graph(model: Path) -> tuple[int, int]:
    import onnx

    graph = onnx.load(str(model / MODEL_FILE), load_external_data=False).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    outputs = {output.name for output in graph.output}
    numbers = 0
    for node in graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "MatMulNBits" and not outputs.intersection(node.output):
            numbers += attributes["K"] * attributes["N"]
        elif node.op_type in ("MatMul", "Gemm") and len(shape := shapes.get(node.input[1], ())) == 2:
            numbers += 0 if outputs.intersection(node.output) else shape[0] * shape[1]
    return sum(file.stat().st_size for file in model.glob(f"{MODEL_FILE}*")), numbers
