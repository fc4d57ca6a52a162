"""A tiny random llama-type model, made in a moment: a GGUF file that llama.cpp opens too, and a Hugging Face folder.

Both hold the same model. Weights are scaled so that attention matters and logits are peaked: a cell that is missing,
doubled or at a wrong position changes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.export.weights import LlamaConfig
from edge_pc.models.positions import RotaryEncoding

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKEN = "<tool>"
BOS, EOS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Words that become one token each, by merging letter after letter; the last ones tell rules for cutting text apart.
_WORDS = ("Ġthe", "Ġand", "Ġof", "Ġto", "Ġin", "Ġis", "system", "user", "assistant", "Ġmodule", "ing", "ĠĠĠĠ")
_WORDS += ("1234", "Ġ1", "ĊĊ", "!!Ċ", "'LL", "aB")


@dataclass(frozen=True)
class TinyModel:
    """Sizes of a tiny model; `rope_scaling` as Hugging Face spells it."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    max_positions: int = 1024
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    tied_embeddings: bool = True
    seed: int = 0


def config(model: TinyModel) -> LlamaConfig:
    return LlamaConfig(
        architecture="llama",
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=len(vocabulary()[0]),
        max_positions=model.max_positions,
        norm_epsilon=1e-5,
        position=RotaryEncoding(frequencies(model), interleaved=False),
        tied_embeddings=model.tied_embeddings,
    )


def frequencies(model: TinyModel) -> tuple[float, ...]:
    """Radians a position of each pair of dimensions, without scaling."""
    return tuple(model.rope_base ** (-pair / model.head_dim) for pair in range(0, model.head_dim, 2))


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges of a byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*CONTROL_TOKENS, USER_DEFINED_TOKEN, *sorted(ByteLevel.alphabet())]
    merges = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return tuple(tokens), tuple(merges)


def tensors(model: TinyModel) -> dict[str, NDArray[np.float32]]:
    """Random weights under their canonical names; queries and keys in Hugging Face's order."""
    rng = np.random.default_rng(model.seed)
    gains = {"embed": 0.45, "lm_head": 0.45, "q": 1.3, "k": 1.3, "v": 1.5, "o": 1.5}
    made = {}
    for name, shape in config(model).shapes().items():
        part = name.rsplit(".", 1)[-1]
        if len(shape) == 1:
            values = 1 + 0.1 * rng.standard_normal(shape)
        elif part in ("embed", "lm_head"):
            values = gains[part] * rng.standard_normal(shape)
        else:
            values = gains.get(part, 1.0) * rng.standard_normal(shape) / np.sqrt(shape[1])
        made[name] = values.astype(np.float32)
    return made


def interleave(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from halves (Hugging Face) to neighbouring pairs (GGUF)."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def gguf_name(canonical: str) -> str:
    top = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}
    parts = {"attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    parts |= {"mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    if canonical in top:
        return f"{top[canonical]}.weight"
    _, layer, part = canonical.split(".")
    return f"blk.{layer}.{parts[part]}.weight"


def hf_name(canonical: str) -> str:
    top = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    parts |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
    parts |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    if canonical in top:
        return f"{top[canonical]}.weight"
    _, layer, part = canonical.split(".")
    return f"model.layers.{layer}.{parts[part]}.weight"


def write_gguf(path: Path, model: TinyModel = TinyModel(), *, pre: str = "smollm") -> Path:
    """The model as a GGUF file."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(model.layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    if model.rope_scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_scaling["factor"])
    _add_tokenizer(writer, pre)
    for name, array in tensors(model).items():
        if name.endswith((".q", ".k")):
            array = interleave(array, model.heads if name.endswith(".q") else model.kv_heads)
        writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def change_gguf(source: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Copy a GGUF file with other metadata or tensors: `change` edits (key → (value, types)) and (name → array)."""
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {
        key: (field.contents(), field.types) for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(fields, tensors)
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture")[0])
    for key, (value, types) in fields.items():
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: Any, pre: str) -> None:
    from gguf import TokenType

    tokens, merges = vocabulary()
    kinds = dict.fromkeys(CONTROL_TOKENS, TokenType.CONTROL) | {USER_DEFINED_TOKEN: TokenType.USER_DEFINED}
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(EOS))
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_hf(folder: Path, model: TinyModel = TinyModel(), *, dtype: str = "float32") -> Path:
    """The model as a Hugging Face folder, weights in `dtype`."""
    import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {hf_name(name): array.astype(np.dtype(dtype)) for name, array in tensors(model).items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    _hf_tokenizer().save(str(folder / "tokenizer.json"))
    tokens, _ = vocabulary()
    _write_json(folder / "config.json", _hf_config(model))
    _write_json(folder / "generation_config.json", {"eos_token_id": [tokens.index(EOS), 0]})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": {"__type": "AddedToken", "content": EOS},
        "chat_template": CHAT_TEMPLATE,
        "add_bos_token": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return folder


def _hf_config(model: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": model.rope_base,
        "rope_scaling": model.rope_scaling or None,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": len(vocabulary()[0]),
    }


def _hf_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(USER_DEFINED_TOKEN, special=False, normalized=False)])
    return tokenizer


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
