"""Reads llama-family models out of GGUF files, whatever quantization their tensors have.

Query and key rows of such files are permuted for rotary pairs that are neighbours.
"""

from __future__ import annotations

from edge_pc.errors import ModelError
from edge_pc.export.weights import LlamaConfig, LlamaWeights
from edge_pc.models.fields import check_fields, number, shown, whole
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.gguf_model import model_sizes
from edge_pc.models.positions import RotaryEncoding
from edge_pc.models.spec import MAX_SIZE

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
    "attention.max_alibi_bias": 0.0,
    "attention.scale": None,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
}
_FIELDS = {
    "feed_forward_length": whole(1, MAX_SIZE),
    "attention.layer_norm_rms_epsilon": number(0, 1),
}


def read_gguf(file: GGUFFile) -> LlamaWeights:
    """The weights of a llama model in a GGUF file that was checked (`check_gguf`).

    Raises:
        ModelError: another architecture, a feature that the graph cannot express, or tensors that do not fit.
    """
    architecture = file.get("general.architecture")
    if architecture != SUPPORTED:
        raise ModelError(f"{file.path}: the architecture {shown(architecture)} is not supported, only {SUPPORTED!r} is")
    for key, neutral in _NEUTRAL.items():
        value = file.get(f"{SUPPORTED}.{key}", neutral)
        if value != neutral:
            raise ModelError(f"{file.path}: {SUPPORTED}.{key} = {shown(value)} is not supported")

    names = {canonical: name for name in file.tensors if (canonical := _canonical_name(name)) is not None}
    config = _config(file, tied="lm_head" not in names)
    stored = {canonical: file.tensors[name].shape for canonical, name in names.items()}
    return LlamaWeights(config, stored, lambda canonical: file.load(names[canonical]), file.path)


def _canonical_name(name: str) -> str | None:
    """The canonical name; None for the rotary factors, which are in the frequencies; others stay as they are."""
    if name == "rope_freqs.weight":
        return None
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS and parts[3] == "weight":
        return f"layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}"
    return name


def _config(file: GGUFFile, tied: bool) -> LlamaConfig:
    sizes = model_sizes(file)
    fields = check_fields(file.metadata, _FIELDS, file.path, f"{SUPPORTED}.")
    if not isinstance(sizes.position, RotaryEncoding):
        raise ModelError(f"{file.path} is not supported: {sizes.position.fixed}")
    return LlamaConfig(
        **sizes.sizes(),
        intermediate_size=fields["feed_forward_length"],
        norm_epsilon=fields["attention.layer_norm_rms_epsilon"],
        tied_embeddings=tied,
    )
