"""Builds the ONNX graph of a llama-family model straight from its weights, without torch.

What makes it fit for prompt modules: explicit `position_ids`; past and present KV bound to one shared buffer (the
arena); logits of the last token only. The graph masks by slot; `attention_bias` hides cells on top of that, which gives
causality by position for a token before cached cells. It is used in the graph only when `biased` is 1, because
adding it costs about a tenth of a forward.

Inputs (batch B, new tokens N, arena capacity C, present cells T):
    input_ids       int64 [B, N]
    position_ids    int64 [B, N]
    seqlens_k       int32 [B]: present cells after this call, minus one
    total_sequence_length  int32 []: T, the largest number of present cells after this call
    biased          bool []: whether `attention_bias` counts
    attention_bias  float32 [1, 1, N, T] (any small shape when not biased)
    past_key_values.{layer}.key / .value   float32 [B, kv_heads, C, head_dim], keys after rotary embedding
Outputs:
    logits          float32 [B, vocab]
    query.{layer}   float32 [B, N, heads × head_dim], after rotary embedding, of some layers: they tell a caller which
                    cells the tokens attend to
    present.{layer}.key / .value           as the past, bound to the same memory
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_pc.export.quantize import quantize
from edge_pc.export.weights import LlamaConfig, LlamaWeights
from edge_pc.progress import OnProgress, Progress, ignore

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"

OPSET = 21
IR_VERSION = 10
BLOCK = 32  # 64 is 8 % faster and slightly coarser
QUERY_STEP = 3  # of the later half of the layers, every third tells as much as all (docs/results)
HEAD_BITS = 8  # embedding and output head stay at 8 bit: at 4 bit they cost the most accuracy for the fewest bytes
PAGE = 4096


class _DataFile:
    """Initializers in the external data file, each on its own page so that it can be mapped."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file = path.open("wb")

    def add(self, name: str, array: NDArray[Any]) -> onnx.TensorProto:
        self._file.write(b"\0" * (-self._file.tell() % PAGE))
        offset = self._file.tell()
        data = np.ascontiguousarray(array)
        data.tofile(self._file)
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(data.dtype),
            dims=data.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (("location", self._name), ("offset", offset), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def close(self) -> None:
        self._file.close()


class _Graph:
    """Collects nodes and initializers; every method adds one operation and returns the name of its result."""

    def __init__(self, config: LlamaConfig, data: _DataFile, bits: int) -> None:
        self.config = config
        self.bits = bits
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._data = data

    def node(
        self, op: str, inputs: list[str], name: str, *more_outputs: str, domain: str = "", **attributes: Any
    ) -> str:
        outputs = [name, *more_outputs]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))
        return name

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A small initializer, kept in the model file itself."""
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, array: NDArray[Any]) -> str:
        self.initializers.append(self._data.add(name, array))
        return name

    def quantized(self, name: str, matrix: NDArray[np.float32], bits: int) -> list[str]:
        """The three initializers of a block-quantized matrix: packed values, scales, zero points."""
        packed = quantize(matrix, bits, BLOCK)
        return [
            self.weight(f"{name}.packed", packed.packed),
            self.weight(f"{name}.scales", packed.scales),
            self.weight(f"{name}.zero_points", packed.zero_points),
        ]

    def linear(self, x: str, name: str, matrix: NDArray[np.float32], bits: int | None = None) -> str:
        """x · matrixᵀ, in 32 bit or block-quantized with 8-bit activations."""
        bits = bits or self.bits
        if bits == 32:
            return self.node("MatMul", [x, self.weight(f"{name}.weight", matrix.T)], name)
        return self.quantized_linear(x, name, self.quantized(name, matrix, bits), matrix.shape, bits)

    def quantized_linear(self, x: str, name: str, quantized: list[str], shape: tuple[int, ...], bits: int) -> str:
        out_features, in_features = shape
        return self.node(
            "MatMulNBits", [x, *quantized], name, domain="com.microsoft",
            K=in_features, N=out_features, bits=bits, block_size=BLOCK, accuracy_level=4,
        )  # fmt: skip

    def rms_norm(self, x: str, name: str, weight: NDArray[np.float32]) -> str:
        return self.node(
            "SimplifiedLayerNormalization", [x, self.weight(f"{name}.weight", weight)], name,
            axis=-1, epsilon=self.config.norm_epsilon, stash_type=1,
        )  # fmt: skip

    def rotary(self, x: str, name: str, heads: int) -> str:
        """Rotates a packed [B, N, heads × head_dim] tensor by the explicit positions."""
        return self.node(
            "RotaryEmbedding", [x, "position_ids", "cos_cache", "sin_cache"], name, domain="com.microsoft",
            interleaved=int(self.config.position.interleaved), num_heads=heads,
        )  # fmt: skip


def build(weights: LlamaWeights, folder: Path, bits: int, progress: OnProgress = ignore) -> None:
    """Write `model.onnx` and `model.onnx.data` into `folder`.

    Args:
        weights: the model, read lazily: only one layer's weights are held in memory.
        folder: an existing folder.
        bits: of the weights: 8 or 4 (block-quantized, asymmetric), or 32.
        progress: in layers.

    Raises:
        ModelError: a tensor is missing or has a wrong shape.
    """
    config = weights.config
    data = _DataFile(folder / DATA_FILE)
    try:
        graph = _Graph(config, data, bits)
        _rotary_caches(graph)
        x, head = _embedding(graph, weights)
        for layer in range(config.layers):
            progress(Progress(layer, config.layers, "layers"))
            x = _layer(graph, weights, layer, x)
        _logits(graph, weights, x, head)
    finally:
        data.close()
    progress(Progress(config.layers, config.layers, "layers"))
    onnx.save_model(_model(graph), folder / MODEL_FILE)


def _rotary_caches(graph: _Graph) -> None:
    """Cosines and sines `[max_positions, dims / 2]` of every angle."""
    config = graph.config
    frequencies = np.array(config.position.frequencies, dtype=np.float64)
    for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        cache = np.empty((config.max_positions, len(frequencies)), dtype=np.float32)
        for start in range(0, len(cache), PAGE):  # in 64 bit all at once, they would take several times the memory
            rows = cache[start : start + PAGE]
            rows[:] = function(np.outer(np.arange(start, start + len(rows), dtype=np.float64), frequencies))
        graph.weight(name, cache)


def _embedding(graph: _Graph, weights: LlamaWeights) -> tuple[str, list[str]]:
    """Embeds `input_ids`; returns the embedded tokens and, of a tied quantized embedding, its initializers."""
    embedding = weights.tensor("embed")
    if graph.bits == 32:
        table = [graph.weight("embed.weight", embedding)]
        return graph.node("Gather", [table[0], "input_ids"], "embed"), table
    table = graph.quantized("embed", embedding, HEAD_BITS)
    vocab, hidden = embedding.shape
    blocks = -(-hidden // BLOCK)
    shapes = ((vocab, blocks * BLOCK), (vocab, blocks), (vocab, blocks))
    rows = []
    for initializer, shape in zip(table, shapes, strict=True):
        rows_shape = graph.constant(f"{initializer}.shape", np.array(shape))
        matrix = graph.node("Reshape", [initializer, rows_shape], f"{initializer}.rows")
        rows.append(graph.node("Gather", [matrix, "input_ids"], f"{initializer}.tokens"))
    x = graph.node("DequantizeLinear", rows, "embed", axis=2, block_size=BLOCK)
    if blocks * BLOCK != hidden:  # the last block is padded
        bounds = [
            graph.constant(f"embed.{part}", np.array([n])) for part, n in (("from", 0), ("to", hidden), ("of", 2))
        ]
        x = graph.node("Slice", [x, *bounds], "embed.unpadded")
    return x, table


def _layer(graph: _Graph, weights: LlamaWeights, layer: int, x: str) -> str:
    name = f"layers.{layer}"

    def tensor(part: str) -> NDArray[np.float32]:
        return weights.tensor(f"{name}.{part}")

    normed = graph.rms_norm(x, f"{name}.attn_norm", tensor("attn_norm"))
    attended = _attention(graph, layer, *(graph.linear(normed, f"{name}.{p}", tensor(p)) for p in ("q", "k", "v")))
    x = graph.node("Add", [x, graph.linear(attended, f"{name}.o", tensor("o"))], f"{name}.attn_sum")
    normed = graph.rms_norm(x, f"{name}.mlp_norm", tensor("mlp_norm"))
    gate = graph.linear(normed, f"{name}.gate", tensor("gate"))
    silu = graph.node("QuickGelu", [gate], f"{name}.silu", domain="com.microsoft", alpha=1.0)  # x · sigmoid(x)
    gated = graph.node("Mul", [silu, graph.linear(normed, f"{name}.up", tensor("up"))], f"{name}.gated")
    return graph.node("Add", [x, graph.linear(gated, f"{name}.down", tensor("down"))], f"{name}.sum")


def _attention(graph: _Graph, layer: int, query: str, key: str, value: str) -> str:
    """Attention over the arena, with `attention_bias` in one branch and without it in the other."""
    config = graph.config
    name = f"layers.{layer}.attention"
    rotated = [
        graph.rotary(query, f"query.{layer}", config.heads),
        graph.rotary(key, f"layers.{layer}.k_rotary", config.kv_heads),
    ]
    inputs = [
        *rotated, value, f"past_key_values.{layer}.key", f"past_key_values.{layer}.value",
        "seqlens_k", "total_sequence_length",
    ]  # fmt: skip

    def branch(kind: str, extra: list[str]) -> onnx.GraphProto:
        outputs = [f"{name}.{kind}.{part}" for part in ("out", "key", "value")]
        node = helper.make_node(
            "GroupQueryAttention", [*inputs, *extra], outputs, name=f"{name}.{kind}", domain="com.microsoft",
            num_heads=config.heads, kv_num_heads=config.kv_heads,
        )  # fmt: skip
        values = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for output in outputs]
        return helper.make_graph([node], f"{name}.{kind}", [], values)

    return graph.node(
        "If", ["biased"], name, f"present.{layer}.key", f"present.{layer}.value",
        then_branch=branch("biased", ["", "", "", "attention_bias"]), else_branch=branch("plain", []),
    )  # fmt: skip


def _logits(graph: _Graph, weights: LlamaWeights, x: str, embedding: list[str]) -> None:
    """Logits of the last token; a tied head shares the embedding's initializers."""
    config = graph.config
    last = graph.node("Gather", [x, graph.constant("last_index", np.array(-1))], "last", axis=1)
    last = graph.rms_norm(last, "norm", weights.tensor("norm"))
    shape = (config.vocab_size, config.hidden_size)
    if not config.tied_embeddings:
        graph.linear(last, "logits", weights.tensor("lm_head"), bits=32 if graph.bits == 32 else HEAD_BITS)
    elif graph.bits == 32:
        graph.node("Gemm", [last, embedding[0]], "logits", transB=1)
    else:
        graph.quantized_linear(last, "logits", embedding, shape, HEAD_BITS)


def _model(graph: _Graph) -> onnx.ModelProto:
    config = graph.config
    info = helper.make_tensor_value_info
    cache: list[str | int | None] = ["batch", config.kv_heads, "capacity", config.head_dim]
    parts = [f"{layer}.{part}" for layer in range(config.layers) for part in ("key", "value")]
    inputs = [
        info("input_ids", TensorProto.INT64, ["batch", "new"]),
        info("position_ids", TensorProto.INT64, ["batch", "new"]),
        info("seqlens_k", TensorProto.INT32, ["batch"]),
        info("total_sequence_length", TensorProto.INT32, []),
        info("biased", TensorProto.BOOL, []),
        info("attention_bias", TensorProto.FLOAT, [1, 1, "bias_rows", "bias_columns"]),
        *(info(f"past_key_values.{part}", TensorProto.FLOAT, cache) for part in parts),
    ]
    outputs = [
        info("logits", TensorProto.FLOAT, ["batch", config.vocab_size]),
        *(
            info(f"query.{layer}", TensorProto.FLOAT, ["batch", "new", config.heads * config.head_dim])
            for layer in range(config.layers // 2, config.layers, QUERY_STEP)
        ),
        *(info(f"present.{part}", TensorProto.FLOAT, cache) for part in parts),
    ]
    return helper.make_model(
        helper.make_graph(graph.nodes, f"edge_pc.{config.architecture}", inputs, outputs, graph.initializers),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        ir_version=IR_VERSION,
        producer_name="edge-pc",
    )
