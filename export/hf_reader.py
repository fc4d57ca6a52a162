"""Reads the weights of llama-family models out of Hugging Face folders: safetensors, sharded or not.

Needs the packages `safetensors` and `ml_dtypes` (bfloat16), which the extra `export` brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edge_pc.errors import MissingDependencyError, ModelError
from edge_pc.export.hf_config import read_config
from edge_pc.export.weights import LlamaWeights
from edge_pc.models.fields import Field, check_fields, read_json

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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, sorted.

    Raises:
        ModelError: there are none, or the index names one that is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    index = folder / INDEX_FILE
    weight_map: dict[str, Any] = check_fields(read_json(index), {"weight_map": Field(dict)}, index)["weight_map"]
    check_fields(weight_map, dict.fromkeys(weight_map, Field(str, high=255)), index)
    files = sorted({folder / Path(name).name for name in weight_map.values()})
    if not files:
        raise ModelError(f"{index}: weight_map is empty")
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
    config = read_config(folder)
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
