"""Reads `config.json` of a Hugging Face folder into a `LlamaConfig`; every field is checked before any is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_pc.errors import ModelError
from edge_pc.export.weights import LlamaConfig
from edge_pc.models.fields import Field, check_fields, number, read_json, shown, whole
from edge_pc.models.positions import MAX_HEAD_DIM, MAX_POSITIONS, RotaryEncoding
from edge_pc.models.spec import MAX_HEADS, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY

CONFIG_FILE = "config.json"
SUPPORTED = ("llama", "mistral")

_POSITIONS = whole(1, MAX_POSITIONS)
_THETA = number(1e-3, 1e15, None)
_KIND = Field(str, high=100, default=None)
_FRACTION = number(0, 1, 1.0)
_FIELDS = {
    "model_type": Field(str, high=100),
    "hidden_act": Field(str, high=100, default="silu"),
    "num_hidden_layers": whole(1, MAX_LAYERS),
    "num_attention_heads": whole(1, MAX_HEADS),
    "num_key_value_heads": whole(1, MAX_HEADS, None),
    "head_dim": whole(1, MAX_HEAD_DIM, None),
    "hidden_size": whole(1, MAX_SIZE),
    "intermediate_size": whole(1, MAX_SIZE),
    "vocab_size": whole(1, MAX_VOCABULARY),
    "max_position_embeddings": _POSITIONS,
    "rms_norm_eps": number(0, 1, 1e-6),
    "rope_theta": _THETA,
    "rope_scaling": Field(dict, default=None),
    "rope_parameters": Field(dict, default=None),  # where transformers 5 keeps both
    "partial_rotary_factor": _FRACTION,
    "sliding_window": whole(0, MAX_POSITIONS, None),
    "attention_bias": Field(bool, default=False),
    "mlp_bias": Field(bool, default=False),
    "quantization_config": Field(dict, default=None),
    "tie_word_embeddings": Field(bool, default=False),
}
_ROPE_FIELDS = {
    "rope_type": _KIND,
    "type": _KIND,
    "rope_theta": _THETA,
    "partial_rotary_factor": _FRACTION,
}
# Rule for scaling → its own parameters.
_SCALING_FIELDS = {
    "linear": {"factor": number(1e-3, 1e6)},
    "llama3": {
        "factor": number(1e-3, 1e6),
        "low_freq_factor": number(1e-3, 1e6),
        "high_freq_factor": number(1e-3, 1e6),
        "original_max_position_embeddings": _POSITIONS,
    },
}


def read_config(folder: Path) -> LlamaConfig:
    """The config of the llama or mistral model in `folder`.

    Raises:
        ModelError: a field is missing or holds what it cannot; another architecture, or a feature that the graph
            cannot express.
    """
    path = folder / CONFIG_FILE
    try:
        data = read_json(path)
    except FileNotFoundError as exc:
        raise ModelError(
            f"{folder}: {CONFIG_FILE} is missing", hint="a Hugging Face folder or a GGUF file is expected"
        ) from exc
    architecture = data.get("model_type")
    if architecture not in SUPPORTED:
        raise ModelError(
            f"{path}: the architecture {shown(architecture)} is not supported, only {' and '.join(SUPPORTED)}"
        )
    fields = check_fields(data, _FIELDS, path)
    given = fields["rope_parameters"] or fields["rope_scaling"] or {}
    rope = check_fields(given, _ROPE_FIELDS, path)
    _refuse_unsupported(path, fields, rope, "sliding_window" in data)
    heads = fields["num_attention_heads"]
    head_dim = fields["head_dim"] or fields["hidden_size"] // heads
    base = rope["rope_theta"] or fields["rope_theta"] or 10000.0
    scaling = _scaling(path, rope["rope_type"] or rope["type"] or "default", given)
    return LlamaConfig(
        architecture=fields["model_type"],
        layers=fields["num_hidden_layers"],
        heads=heads,
        kv_heads=fields["num_key_value_heads"] or heads,
        head_dim=head_dim,
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        max_positions=fields["max_position_embeddings"],
        norm_epsilon=fields["rms_norm_eps"],
        position=RotaryEncoding(_frequencies(base, head_dim, scaling), interleaved=False),
        tied_embeddings=fields["tie_word_embeddings"],
    )


def _refuse_unsupported(path: Path, fields: dict[str, Any], rope: dict[str, Any], window_given: bool) -> None:
    for key in ("attention_bias", "mlp_bias", "quantization_config"):
        if fields[key]:
            raise ModelError(f"{path}: {key} = {shown(fields[key])} is not supported")
    if fields["hidden_act"] != "silu":
        raise ModelError(f"{path}: hidden_act = {shown(fields['hidden_act'])} is not supported, only 'silu' is")
    for place in (fields, rope):
        if place["partial_rotary_factor"] != 1.0:
            raise ModelError(f"{path}: partial_rotary_factor = {place['partial_rotary_factor']} is not supported")
    window = fields["sliding_window"]
    if fields["model_type"] == "mistral" and not window_given:
        window = 4096  # transformers' default
    if window is not None and window < fields["max_position_embeddings"]:
        raise ModelError(f"{path}: attention over a sliding window ({window} tokens) is not supported")


def _scaling(path: Path, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The rule for scaling and its own parameters; empty for none."""
    if kind == "default":
        return {}
    if kind not in _SCALING_FIELDS:
        raise ModelError(
            f"{path}: rotary scaling {shown(kind)} is not supported, only {' and '.join(map(repr, _SCALING_FIELDS))}"
        )
    own = check_fields(given, _SCALING_FIELDS[kind], path)
    if kind == "llama3" and own["low_freq_factor"] >= own["high_freq_factor"]:
        raise ModelError(
            f"{path}: low_freq_factor is {own['low_freq_factor']}, expected less than high_freq_factor, which is "
            f"{own['high_freq_factor']}"
        )
    return {"type": kind, **own}


def _frequencies(base: float, dims: int, scaling: dict[str, Any]) -> tuple[float, ...]:
    """Radians a position of each pair of dimensions.

    `llama3` (Llama 3.1): wavelengths longer than `original / low_freq_factor` are stretched by `factor`, those shorter
    than `original / high_freq_factor` are kept, and those between are interpolated in the frequency.
    """
    frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if scaling and scaling["type"] == "linear":
        frequencies /= scaling["factor"]
    elif scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies *= (1.0 - kept) / scaling["factor"] + kept
    return tuple(frequencies.tolist())
