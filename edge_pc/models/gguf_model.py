"""What a GGUF file says of the model in it, checked so far that neither an export nor libllama can come to grief by it.

libllama trusts some of what stands in a file: it ends the process over a count that is too large, a token that is there
twice or a type that it has no kernel for, and reads beyond an array that is shorter than the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from edge_pc.errors import ModelError
from edge_pc.models.chat_template import MAX_TEMPLATE
from edge_pc.models.fields import Field, check_fields, number, shown, whole
from edge_pc.models.gguf_file import FLOAT32, INT32, GGUFFile
from edge_pc.models.gguf_rotary import position_of
from edge_pc.models.positions import MAX_HEAD_DIM, MAX_POSITIONS
from edge_pc.models.spec import MAX_HEADS, MAX_LAYERS, MAX_SIZE, MAX_VOCABULARY, ModelSizes

_EXPERTS = whole(0, 512)
_EPSILON = number(0, 1)

# Metadata below the architecture's name. Where layers differ, a list has a value for each.
_SIZES = {
    "block_count": whole(1, MAX_LAYERS),
    "context_length": whole(1, MAX_POSITIONS),
    "embedding_length": whole(1, MAX_SIZE),
    "feed_forward_length": whole(0, MAX_SIZE),
    "attention.head_count": whole(0, MAX_HEADS),
    "attention.head_count_kv": whole(0, MAX_HEADS),
    "attention.key_length": whole(0, MAX_HEAD_DIM),
    "attention.value_length": whole(0, MAX_HEAD_DIM),
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.group_norm_epsilon": _EPSILON,
    "attention.max_alibi_bias": number(0, 1024),
    "rope.dimension_count": whole(0, MAX_HEAD_DIM),
    "rope.freq_base": number(1e-3, 1e15),
    "rope.scaling.type": Field(str, high=100),
    "rope.scaling.factor": number(0, 1e6),
    "rope.scale_linear": number(0, 1e6),
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "expert_group_count": _EXPERTS,
    "expert_group_used_count": _EXPERTS,
    "nextn_predict_layers": whole(0, MAX_LAYERS),
}
_TEMPLATE = {"chat_template": Field(str, high=MAX_TEMPLATE, default=None)}
_NO_TOKEN = 2**32 - 1  # how files spell that there is none
_TOKEN_ID = whole(0, _NO_TOKEN, None)
_TOKENIZER = {
    "model": Field(str, high=100),
    "pre": Field(str, high=100, default=None),
    "tokens": Field(list, items=str),
    "token_type": Field(list, items=int, default=None),
    "scores": Field(list, items=float, default=None),
    "merges": Field(list, items=str, default=None),
    "add_bos_token": Field(bool, default=None),
    "add_space_prefix": Field(bool, default=True),
    "bos_token_id": _TOKEN_ID,
    "eos_token_id": _TOKEN_ID,
    "eot_token_id": _TOKEN_ID,
    "unknown_token_id": _TOKEN_ID,
    "padding_token_id": _TOKEN_ID,
}
_ALIGNMENT = 32  # of libllama's buffers, which tensors of a mapped file become
_WEIGHTLESS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


def check_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file after a check of its whole structure, its sizes, its vocabulary and its tensors' types.

    Raises:
        ModelError: something in it is not as it must be; names what, what it holds, and what was expected.
    """
    file = GGUFFile(path)
    pieces = file.get("split.count", 0)
    if pieces not in (0, 1):
        raise ModelError(
            f"{path} is one of {shown(pieces)} pieces of a split model, expected a whole one",
            hint="join them with llama.cpp's llama-gguf-split --merge",
        )
    _check_sizes(file, _architecture(file))
    _check_vocabulary(file, tokenizer_fields(file))
    _check_types(file)
    return file


def tokenizer_fields(file: GGUFFile) -> dict[str, Any]:
    """What the file says of its tokenizer: the names in `_TOKENIZER`, and `chat_template`; ids that mean none are None.

    Raises:
        ModelError: a field is missing or holds something else.
    """
    found = check_fields(file.metadata, _TOKENIZER, file.path, "tokenizer.ggml.")
    found |= check_fields(file.metadata, _TEMPLATE, file.path, "tokenizer.")
    vocabulary = len(found["tokens"])
    for name in (name for name, field in _TOKENIZER.items() if field is _TOKEN_ID):
        if found[name] == _NO_TOKEN:
            found[name] = None
        elif found[name] is not None and found[name] >= vocabulary:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.{name} is {found[name]}, expected one of the {vocabulary} tokens' ids"
            )
    return found


def model_sizes(file: GGUFFile) -> ModelSizes:
    """The sizes of a model whose layers are all alike and whose positions are encoded by rotation.

    Raises:
        ModelError: one is missing, zero or differs from layer to layer; keys and values are of different sizes.
    """
    architecture = _architecture(file)

    def size(key: str, default: int | None = None) -> int:
        name = f"{architecture}.{key}"
        value = file.get(name, default)
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {name} differs from layer to layer, which is not supported")
        if value is None or value < 1:
            raise ModelError(f"{file.path}: {name} is {'missing' if value is None else value}, expected at least 1")
        return int(value)

    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden // heads)
    if size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different sizes are not supported")
    dims = size("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise ModelError(
            f"{file.path}: {architecture}.rope.dimension_count is {dims}, expected an even number up to {head_dim}"
        )
    return ModelSizes(
        architecture=architecture,
        layers=size("block_count"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden_size=hidden,
        max_positions=size("context_length"),
        vocab_size=len(file.get("tokenizer.ggml.tokens")),
        position=position_of(file, architecture, dims),
    )


def _architecture(file: GGUFFile) -> str:
    [architecture] = check_fields(file.metadata, {"general.architecture": Field(str, high=100)}, file.path).values()
    return str(architecture)


def _check_sizes(file: GGUFFile, architecture: str) -> None:
    for suffix, field in _SIZES.items():
        name = f"{architecture}.{suffix}"
        value = file.get(name)
        values = value if isinstance(value, list) else [value]
        for item in values if value is not None else []:
            check_fields({name: item}, {name: field}, file.path)
    for name, value in file.metadata.items():
        if name.startswith(f"{architecture}.") and isinstance(value, float):
            check_fields({name: value}, {name: Field(float)}, file.path)
    extra, layers = (_most(file, f"{architecture}.{name}") for name in ("nextn_predict_layers", "block_count"))
    if extra and extra >= layers:
        raise ModelError(f"{file.path}: {architecture}.nextn_predict_layers is {extra}, expected less than {layers}")
    _check_experts(file, architecture)


def _check_experts(file: GGUFFile, architecture: str) -> None:
    names = ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
    experts, used, groups, groups_used = (_most(file, f"{architecture}.{name}") for name in names)
    consistent = 0 < used <= experts and groups < experts if experts else used == groups == 0
    if not consistent or (groups > 1 and (experts % groups or not 0 < groups_used < groups)):
        raise ModelError(
            f"{file.path}: {used} of {experts} experts, and {groups_used} of {groups} groups of them, are used at a "
            "time, which cannot be"
        )


def _most(file: GGUFFile, key: str) -> int:
    """The largest value under `key` of any layer; 0 when there is none."""
    value = file.get(key, 0)
    return max(value, default=0) if isinstance(value, list) else int(value)


def _check_vocabulary(file: GGUFFile, fields: dict[str, Any]) -> None:
    tokens = fields["tokens"]
    if not 1 <= len(tokens) <= MAX_VOCABULARY:
        raise ModelError(f"{file.path}: the vocabulary has {len(tokens)} tokens, expected 1 to {MAX_VOCABULARY}")
    [(token, count)] = Counter(token for token in tokens if token).most_common(1) or [("", 1)]
    if count > 1:
        raise ModelError(f"{file.path}: token {shown(token)} is in the vocabulary {count} times")
    for name, kind in (("token_type", INT32), ("scores", FLOAT32)):
        if fields[name] is None:
            continue
        if len(fields[name]) != len(tokens):
            raise ModelError(
                f"{file.path}: tokenizer.ggml.{name} has {len(fields[name])} items, expected one for each of the "
                f"{len(tokens)} tokens"
            )
        if file.kinds[f"tokenizer.ggml.{name}"] != kind:
            raise ModelError(f"{file.path}: tokenizer.ggml.{name} has numbers of another kind than the format says")


def _check_types(file: GGUFFile) -> None:
    for name, tensor in file.tensors.items():
        kind = tensor.quantization.name
        if kind in _WEIGHTLESS or (len(tensor.shape) == 1 and kind != "F32"):
            expected = "F32" if len(tensor.shape) == 1 else "a type for weights"
            raise ModelError(f"{file.path}: tensor {shown(name)} has the type {kind}, expected {expected}")
        if tensor.offset % _ALIGNMENT:
            raise ModelError(
                f"{file.path}: tensor {shown(name)} starts at byte {tensor.offset}, expected a multiple of {_ALIGNMENT}"
            )
