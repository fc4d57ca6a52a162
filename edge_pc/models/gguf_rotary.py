"""By which angles llama.cpp rotates the keys of the model in a GGUF file, where that is known for sure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_pc.errors import ModelError
from edge_pc.models.fields import shown
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.positions import OpaqueEncoding, RotaryEncoding

# Architectures that rotate all keys of all layers alike, from the first dimension on → whether pairs are neighbours.
# Others leave layers out, have another base in some, or rotate only a part that stands elsewhere.
_INTERLEAVED = {
    **dict.fromkeys(("llama", "internlm2", "minicpm", "xverse"), True),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "phi2", "phi3"), False),
    **dict.fromkeys(("stablelm", "starcoder2", "gptneox"), False),
}
# What a file may say of rotation and still be understood here; `attn_factor` scales keys, which a rotation keeps.
_KNOWN = frozenset(
    {"dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor", "scaling.finetuned"}
    | {"scaling.original_context_length", "scaling.attn_factor"}
)
_FACTORS = "rope_freqs.weight"
_WITH_FACTORS = frozenset({"llama", "minicpm"})


def position_of(file: GGUFFile, architecture: str, dims: int) -> RotaryEncoding | OpaqueEncoding:
    """How a model whose heads have `dims` rotated dimensions encodes positions.

    Raises:
        ModelError: the file's own factors do not fit the heads, or make frequencies that cannot be.
    """
    reason = _unknown(file, architecture)
    if reason:
        return OpaqueEncoding(reason)
    prefix = f"{architecture}.rope."
    base = float(file.get(f"{prefix}freq_base", 10000.0))
    with np.errstate(over="ignore"):  # what is too large is refused
        frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims) / _linear_factor(file, prefix)
        frequencies /= _own_factors(file, dims // 2)
    try:
        return RotaryEncoding(tuple(frequencies.tolist()), _INTERLEAVED[architecture])
    except ModelError as exc:
        raise ModelError(f"{file.path}: {exc}") from exc


def _unknown(file: GGUFFile, architecture: str) -> str:
    """Why the angles are not known; empty when they are."""
    if architecture not in _INTERLEAVED:
        return f"how models of the architecture {shown(architecture)} rotate their keys is not known"
    prefix = f"{architecture}.rope."
    kind = file.get(f"{prefix}scaling.type", "linear")
    if kind not in ("none", "linear"):
        return f"the rotary scaling {shown(kind)} is not known"
    others = sorted(key for key in file.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN)
    if others:
        return f"what {shown(others[0])} means for the rotation is not known"
    known = {_FACTORS} if architecture in _WITH_FACTORS else set()
    tables = sorted(name for name in file.tensors if "rope" in name and name not in known)
    if tables:  # such as those of LongRoPE, which chooses between two by the size of the context
        return f"how the tensor {shown(tables[0])} is used for the rotation is not known"
    return ""


def _linear_factor(file: GGUFFile, prefix: str) -> float:
    if file.get(f"{prefix}scaling.type") == "none":
        return 1.0
    # llama.cpp's type, when only a factor is given, is linear.
    # The older name counts only where the newer one is missing; zero means that there is no scaling.
    return float(file.get(f"{prefix}scaling.factor", file.get(f"{prefix}scale_linear", 0)) or 1.0)


def _own_factors(file: GGUFFile, pairs: int) -> NDArray[np.float64]:
    """What the file divides each frequency by."""
    if _FACTORS not in file.tensors:
        return np.ones(pairs)
    factors = file.load(_FACTORS).astype(np.float64)
    if factors.shape != (pairs,):
        raise ModelError(f"{file.path}: tensor {_FACTORS!r} has shape {list(factors.shape)}, expected {[pairs]}")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"{file.path}: tensor {_FACTORS!r} holds factors that are not finite and above zero")
    return factors
