"""Reads llama-family models out of Hugging Face folders: `config.json` and safetensors, sharded or not.

Needs the packages `safetensors` and `ml_dtypes` (bfloat16), which the extra `export` brings.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import MissingDependencyError, ModelError
from edge_pc.export.weights import FloatArray, LlamaConfig, LlamaWeights
from edge_pc.models.spec import RotaryEncoding

SUPPORTED = ("llama", "mistral")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_TOP_TENSORS = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a Hugging Face folder.

    Raises:
        ModelError: the file is missing, or not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ModelError(
            f"{path.parent}: {path.name} is missing", hint="a Hugging Face folder or a GGUF file is expected"
        ) from exc
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}", hint="download it again") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, sorted.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_FILE}: expected an object 'weight_map'")
    files = sorted({folder / Path(str(name)).name for name in weight_map.values()})
    for path in files:
        if not path.is_file():
            raise ModelError(f"{folder}: {path.name} is missing, but {INDEX_FILE} names it", hint="download it again")
    return files


def read_huggingface(folder: Path) -> LlamaWeights:
    """The weights of a llama or mistral model in a Hugging Face folder.

    Raises:
        ModelError: another architecture, a feature that the graph cannot express, or tensors that do not fit.
        MissingDependencyError: `safetensors` or `ml_dtypes` is not installed.
    """
    config = _config(folder)
    stored: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[Any, str]] = {}
    for handle in map(_open, weight_files(folder)):
        for name in handle.keys():  # noqa: SIM118 - not a mapping: it has no __iter__
            canonical = _canonical_name(name)
            if canonical is None or (canonical == "lm_head" and config.tied_embeddings):
                continue
            stored[canonical] = tuple(handle.get_slice(name).get_shape())
            places[canonical] = (handle, name)

    def load(canonical: str) -> NDArray[Any]:
        handle, name = places[canonical]
        try:
            array: NDArray[Any] = handle.get_tensor(name)
        except (TypeError, ValueError, KeyError, AttributeError) as exc:
            raise ModelError(f"{folder}: tensor {name!r} cannot be read: {exc}") from exc
        if array.dtype.name not in FLOAT_DTYPES:
            raise ModelError(f"{folder}: tensor {name!r} is {array.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
        return array

    return LlamaWeights(config, stored, load, folder)


def _open(path: Path) -> Any:
    try:
        import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
        import safetensors
    except ImportError as exc:
        raise MissingDependencyError(
            f"reading a Hugging Face folder needs the package {exc.name}",
            hint='pip install "edge-prompt-cache[export]"',
        ) from exc
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as exc:
        raise ModelError(f"{path} cannot be read, or it is truncated: {exc}", hint="download it again") from exc


def _canonical_name(name: str) -> str | None:
    """The canonical name; None for what old exports store but nothing needs; unknown names are kept as they are."""
    if name.endswith(".rotary_emb.inv_freq"):
        return None
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) >= 5 and parts[:2] == ["model", "layers"] and parts[-1] == "weight":
        inner = ".".join(parts[3:-1])
        if inner in _LAYER_TENSORS:
            return f"layers.{parts[2]}.{_LAYER_TENSORS[inner]}"
    return name


def _config(folder: Path) -> LlamaConfig:
    data = read_json(folder / "config.json")
    _refuse_unsupported(folder, data)

    def require(key: str) -> int:
        value = data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}, expected a whole number")
        return value

    heads, hidden = require("num_attention_heads"), require("hidden_size")
    head_dim = data.get("head_dim") or hidden // max(heads, 1)
    base, scaling = _rope_parameters(data)
    return LlamaConfig(
        architecture=data["model_type"],
        layers=require("num_hidden_layers"),
        heads=heads,
        kv_heads=require("num_key_value_heads") if data.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=require("intermediate_size"),
        vocab_size=require("vocab_size"),
        max_positions=require("max_position_embeddings"),
        norm_epsilon=float(data.get("rms_norm_eps", 1e-6)),
        rotary=RotaryEncoding(base=base, dims=head_dim, interleaved=False, scaling=scaling),
        rope_frequency_factors=_frequency_factors(folder, base, head_dim, scaling),
        tied_embeddings=bool(data.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(folder: Path, data: dict[str, Any]) -> None:
    model_type = data.get("model_type")
    if model_type not in SUPPORTED:
        raise ModelError(f"{folder}: the architecture {model_type!r} is not supported, only {' and '.join(SUPPORTED)}")
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if data.get(key):
            raise ModelError(f"{folder}: {key} = {data[key]!r} is not supported")
    if data.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{folder}: hidden_act = {data['hidden_act']!r} is not supported, only 'silu' is")
    for place in (data, data.get("rope_parameters") or {}):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{folder}: partial_rotary_factor = {place['partial_rotary_factor']} is not supported")
    # A mistral config that does not mention the window means transformers' default, 4096 tokens.
    window = data.get("sliding_window", 4096 if model_type == "mistral" else None)
    if window is not None and window < data.get("max_position_embeddings", math.inf):
        raise ModelError(f"{folder}: attention over a sliding window ({window} tokens) is not supported")


def _rope_parameters(data: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Theta and the scaling rule (empty for none); transformers 5 keeps both in `rope_parameters`."""
    rules = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    base = float(rules.pop("rope_theta", data.get("rope_theta", 10000.0)))
    kind = rules.pop("rope_type", rules.pop("type", "default"))
    rules.pop("type", None)
    return base, {} if kind == "default" else {"type": kind, **rules}


def _frequency_factors(folder: Path, base: float, dims: int, scaling: dict[str, Any]) -> FloatArray | None:
    """What the rotary frequencies are divided by: float32 `[dims / 2]`, or None.

    `llama3` (Llama 3.1): wavelengths longer than `original / low_freq_factor` are stretched by `factor`, those shorter
    than `original / high_freq_factor` are kept, and those between are interpolated in the frequency.
    """
    if not scaling:
        return None
    try:
        factor = float(scaling["factor"])
        if scaling["type"] == "linear":
            return np.full(dims // 2, factor, dtype=np.float32)
        if scaling["type"] == "llama3":
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
            turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * np.pi)
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            return (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise ModelError(f"{folder}: the rotary scaling {scaling} is incomplete or wrong: {exc!r}") from exc
    raise ModelError(f"{folder}: rotary scaling {scaling['type']!r} is not supported, only 'linear' and 'llama3' are")
