"""Reads llama-family models out of GGUF files (package `gguf`), whatever quantization their tensors have.

Query and key rows of such files are permuted for rotary pairs that are neighbours, hence `interleaved=True`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import ModelError
from edge_pc.export.weights import FloatArray, LlamaConfig, LlamaWeights
from edge_pc.models.spec import RotaryEncoding

SUPPORTED = "llama"

_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_TOP_TENSORS = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head"}

# Metadata that changes what a llama model computes, and the value at which it does not.
_NEUTRAL = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": None,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
}


class GGUFFile:
    """An opened GGUF file: metadata and tensors, both read when asked for.

    Raises:
        ModelError: the file is missing, no GGUF, truncated, split over several files, or of foreign byte order.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as exc:
            # The reader has no exception of its own: reads beyond the end surface as any of these.
            raise ModelError(
                f"{path} is not a GGUF file that can be read, or it is truncated ({path.stat().st_size} bytes): {exc}",
                hint="download it again",
            ) from exc
        except OSError as exc:
            raise ModelError(f"{path} cannot be read: {exc}") from exc
        if self._reader.byte_order != "I":
            raise ModelError(f"{path} was written for machines of the other byte order")
        pieces = self.get("split.count", 0)
        if pieces > 1:
            raise ModelError(
                f"{path} is one of {pieces} pieces of a split model, expected a whole one",
                hint="join them with llama.cpp's llama-gguf-split --merge",
            )
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under `key`: a number, string, bool or list; `default` when absent."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        try:
            return field.contents()
        except (ValueError, IndexError) as exc:
            raise ModelError(f"{self.path}: metadata {key!r} cannot be read: {exc}") from exc

    def require(self, key: str) -> Any:
        """The metadata value under `key`.

        Raises:
            ModelError: the key is absent.
        """
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: metadata {key!r} is missing")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in C order, matrices `[out, in]`."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def load(self, name: str) -> FloatArray:
        """A tensor dequantized to float32."""
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            array: NDArray[Any] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as exc:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the quantization {tensor.tensor_type.name}, which cannot be read",
                hint="take a file with another quantization, such as Q8_0, Q4_K_M or F16",
            ) from exc
        return array.astype(np.float32, copy=False).reshape(self.shape(name))


def read_gguf(file: GGUFFile) -> LlamaWeights:
    """The weights of a llama model in a GGUF file.

    Raises:
        ModelError: another architecture, a feature that the graph cannot express, or tensors that do not fit.
    """
    architecture = file.require("general.architecture")
    if architecture != SUPPORTED:
        raise ModelError(f"{file.path}: the architecture {architecture!r} is not supported, only {SUPPORTED!r} is")
    for key, neutral in _NEUTRAL.items():
        value = file.get(f"{SUPPORTED}.{key}", neutral)
        if value != neutral:
            raise ModelError(f"{file.path}: {SUPPORTED}.{key} = {value} is not supported")

    names = {canonical: name for name in file.tensors if (canonical := _canonical_name(name)) is not None}
    config = _config(file, tied="lm_head" not in names)
    stored = {canonical: file.shape(name) for canonical, name in names.items()}
    return LlamaWeights(config, stored, lambda canonical: file.load(names[canonical]), file.path)


def _canonical_name(name: str) -> str | None:
    """The canonical name; None for the rotary factors, which go into the config; unknown names are kept as they are."""
    if name == "rope_freqs.weight":
        return None
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS and parts[3] == "weight":
        return f"layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}"
    return name


def _config(file: GGUFFile, tied: bool) -> LlamaConfig:
    def require(key: str) -> Any:
        return file.require(f"{SUPPORTED}.{key}")

    def get(key: str, default: Any) -> Any:
        return file.get(f"{SUPPORTED}.{key}", default)

    hidden, heads = require("embedding_length"), require("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    for name, value in (("head_count", heads), ("head_count_kv", kv_heads)):
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {SUPPORTED}.attention.{name} differs from layer to layer: not supported")
    head_dim = get("attention.key_length", hidden // max(heads, 1))
    if get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different sizes are not supported")
    scaling, factors = _rope_scaling(file, head_dim)
    return LlamaConfig(
        architecture=SUPPORTED,
        layers=require("block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=require("feed_forward_length"),
        vocab_size=len(file.require("tokenizer.ggml.tokens")),
        max_positions=require("context_length"),
        norm_epsilon=float(require("attention.layer_norm_rms_epsilon")),
        rotary=RotaryEncoding(
            base=float(get("rope.freq_base", 10000.0)),
            dims=get("rope.dimension_count", head_dim),
            interleaved=True,
            scaling=scaling,
        ),
        rope_frequency_factors=factors,
        tied_embeddings=tied,
    )


def _rope_scaling(file: GGUFFile, head_dim: int) -> tuple[dict[str, Any], FloatArray | None]:
    """The rule's own parameters, and the factors by which the rotary frequencies are divided."""
    kind = file.get(f"{SUPPORTED}.rope.scaling.type", "linear")  # llama.cpp's default when only a factor is given
    factor = file.get(f"{SUPPORTED}.rope.scaling.factor", file.get(f"{SUPPORTED}.rope.scale_linear", 0.0)) or 1.0
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported, only 'linear' and rope_freqs are")
    if kind == "none":
        factor = 1.0
    scaling: dict[str, Any] = {"type": "linear", "factor": float(factor)} if factor != 1.0 else {}
    factors = np.full(head_dim // 2, factor, dtype=np.float32)
    if "rope_freqs.weight" in file.tensors:
        own = file.load("rope_freqs.weight")
        if own.shape != factors.shape:
            raise ModelError(
                f"{file.path}: tensor 'rope_freqs.weight' has shape {list(own.shape)}, expected {list(factors.shape)}"
            )
        scaling["frequency_factors"] = own.tolist()
        factors = factors * own
    return scaling, factors if scaling else None
