"""What a GGUF file says of itself, what is kept of it, and models that are refused by what they say."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import mutations
import numpy as np
import pytest
import tiny
from mutations import FLOAT32, UINT32

from edge_pc.backends.llamacpp import describe as describing
from edge_pc.backends.llamacpp.describe import check, describe, fingerprint_of
from edge_pc.errors import ModelError
from edge_pc.models.positions import OpaqueEncoding, RotaryEncoding
from edge_pc.models.rotation import rotate


def test_spec(tiny_gguf: Path) -> None:
    spec = describe(tiny_gguf).spec
    model = tiny.TinyModel()
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert spec.vocab_size == len(tiny.vocabulary()[0])
    assert spec.max_positions == model.max_positions
    assert isinstance(spec.position, RotaryEncoding)
    assert spec.position.interleaved
    np.testing.assert_allclose(spec.position.frequencies, tiny.frequencies(model), rtol=1e-12)
    assert spec.special_tokens["eos_token"] == tiny.EOS
    assert spec.fingerprint == fingerprint_of(tiny_gguf)


def test_it_is_kept_for_the_next_start(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = describe(tiny_gguf)
    monkeypatch.setattr(describing, "check_gguf", lambda path: pytest.fail("the file was read again"))
    again = describe(tiny_gguf)
    assert again.spec == first.spec
    assert again.chat_template.source == first.chat_template.source == tiny.CHAT_TEMPLATE
    assert again.tokenizer.encode("the module") == first.tokenizer.encode("the module")


@pytest.mark.parametrize("name", ["edge_pc.json", "tokenizer.json", "chat_template.jinja"])
def test_a_damaged_description_is_made_anew(name: str, tiny_gguf: Path, home: Path) -> None:
    first = describe(tiny_gguf)
    [kept] = (home / "gguf").glob(f"*/{name}")
    kept.write_text("{")
    for _ in range(2):
        again = describe(tiny_gguf)
        assert again.spec == first.spec
        assert again.chat_template.source == tiny.CHAT_TEMPLATE
        assert again.tokenizer.encode("the module") == first.tokenizer.encode("the module")


def test_a_home_that_cannot_be_written(tiny_gguf: Path, home: Path) -> None:
    (home / "gguf").write_text("a file is in the way")
    assert describe(tiny_gguf).spec.layers == 2


def test_other_weights_have_another_fingerprint(tiny_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(content := tiny_gguf.read_bytes())
    assert fingerprint_of(copy) == fingerprint_of(tiny_gguf), "the name does not matter"
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fingerprint_of(copy) != fingerprint_of(tiny_gguf)


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    for name, content in {"empty": b"", "text": b"not a model"}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=rf"{name}\.gguf is not a GGUF file that can be read"):
            check(path)
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError, match="no such file"):
            describe(path)


def test_layers_that_differ(tiny_gguf: Path, tmp_path: Path) -> None:
    parts = mutations.parts_of(tiny_gguf)
    parts.set("llama.attention.head_count_kv", mutations.ARRAY, (UINT32, [2, 4]))
    (tmp_path / "a.gguf").write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match="head_count_kv differs from layer to layer"):
        describe(tmp_path / "a.gguf")


@pytest.mark.parametrize("dims", [15, 18])
def test_heads_that_cannot_be_rotated(dims: int, tiny_gguf: Path, tmp_path: Path) -> None:
    parts = mutations.parts_of(tiny_gguf)
    parts.set("llama.rope.dimension_count", UINT32, dims)
    (tmp_path / "a.gguf").write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match=f"rope.dimension_count is {dims}, expected an even number up to 16"):
        describe(tmp_path / "a.gguf")


# Rotary frequencies


def scaled_gguf(path: Path, fields: dict[str, float | str], factors: Any = None) -> Path:
    """A tiny model whose file says `fields` of its rotation, and holds factors."""

    def change(found: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in fields.items():
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.FLOAT32
            found[f"llama.rope.{name}"] = (value, [kind])
        if factors is not None:
            tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)

    return tiny.change_gguf(tiny.write_gguf(path.with_suffix(".plain")), path, change)


@pytest.mark.parametrize(
    ("fields", "factors", "divisor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, None, 4.0),
        ({"scaling.factor": 4.0}, None, 4.0),
        ({"scale_linear": 4.0}, None, 4.0),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, None, 2.0),
        ({"scaling.factor": 0.0, "scale_linear": 4.0}, None, 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None, 1.0),
        ({}, np.linspace(1, 8, 8), np.linspace(1, 8, 8)),
        ({"scaling.factor": 4.0}, np.linspace(1, 8, 8), 4 * np.linspace(1, 8, 8)),
        ({"scaling.factor": 4.0, "scaling.attn_factor": 0.5}, None, 4.0),
    ],
)
def test_frequencies_are_those_of_libllama(
    fields: dict[str, float | str], factors: Any, divisor: Any, tmp_path: Path
) -> None:
    path = scaled_gguf(tmp_path / "model.gguf", fields, factors)
    position = describe(path).spec.position
    assert isinstance(position, RotaryEncoding)
    np.testing.assert_allclose(position.frequencies, np.array(tiny.frequencies(tiny.TinyModel())) / divisor, rtol=1e-6)
    if find_spec("llama_cpp") is None:
        return
    here, there = keys_at(path, 0), keys_at(path, SHIFT)
    assert np.abs(here - there).max() > 0.1
    np.testing.assert_allclose(rotate(here, position, SHIFT), there, atol=0.02)


SHIFT = 60


def keys_at(path: Path, start: int) -> Any:
    """What libllama computes of 20 tokens at positions from `start` on: `[layers, heads, tokens, head_dim]`."""
    from llamacpp_tools import TEXT, blobs_of, opened

    from edge_pc.backends.base import Plan

    positions = np.arange(start, start + 20, dtype=np.int32)
    with opened(path) as backend, closing(backend.new_context(22)) as context:
        array = context.encode(Plan((), TEXT[:20], positions), np.arange(20, dtype=np.int32))
        blobs, spec = blobs_of(backend), backend.spec
    keys = blobs.keys(blobs.check(array, positions), 20)
    return keys.reshape(spec.layers, 20, spec.kv_heads, spec.head_dim).swapaxes(1, 2).astype(np.float32)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, "the rotary scaling 'yarn' is not known"),
        ({"scaling.yarn_ext_factor": 1.0}, "what 'llama.rope.scaling.yarn_ext_factor' means"),
        ({"freq_base_swa": 1e4}, "what 'llama.rope.freq_base_swa' means"),
    ],
)
def test_rotations_that_are_not_known(fields: dict[str, float | str], reason: str, tmp_path: Path) -> None:
    position = describe(scaled_gguf(tmp_path / "model.gguf", fields)).spec.position
    assert isinstance(position, OpaqueEncoding)
    assert reason in position.fixed


@pytest.mark.parametrize(
    ("architecture", "factors", "known"),
    [("qwen2", False, True), ("qwen2", True, False), ("minicpm", True, True), ("gemma3", False, False)],
)
def test_rotations_by_architecture(architecture: str, factors: bool, known: bool, tmp_path: Path) -> None:
    parts = mutations.parts_of(scaled_gguf(tmp_path / "a.gguf", {}, np.ones(8) if factors else None))
    parts.fields = [(key.replace(b"llama.", f"{architecture}.".encode()), *rest) for key, *rest in parts.fields]
    parts.set("general.architecture", mutations.STRING, architecture.encode())
    (tmp_path / "b.gguf").write_bytes(parts.to_bytes())
    position = describe(tmp_path / "b.gguf").spec.position
    assert isinstance(position, RotaryEncoding) == known
    if isinstance(position, RotaryEncoding):
        assert position.interleaved == (architecture == "minicpm")
    else:
        assert architecture in position.fixed or "'rope_freqs.weight'" in position.fixed


@pytest.mark.parametrize(
    ("fields", "factors", "message"),
    [
        ({"scaling.factor": 1e-20}, None, "frequencies are not all from 1e-30 to 1e\\+06"),
        ({}, [0.0] * 8, "factors that are not finite and above zero"),
        ({}, [1.0] * 7, r"has shape \[7\], expected \[8\]"),
    ],
)
def test_rotations_that_cannot_be(fields: dict[str, float | str], factors: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.gguf: .*{message}"):
        describe(scaled_gguf(tmp_path / "model.gguf", fields, factors))


# Positions that are not encoded by rotation


def write_positions(path: Path, architecture: str, alibi: float | None) -> Path:
    """A tiny model of an architecture without rotary positions: MPT (ALiBi) or GPT-2 (learned)."""
    model, rng = tiny.TinyModel(kv_heads=4), np.random.default_rng(0)
    hidden, inner = model.hidden_size, model.intermediate_size
    tokens, merges = tiny.vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(model.heads)
    writer.add_layer_norm_eps(1e-5)
    if alibi is not None:
        writer.add_max_alibi_bias(alibi)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_merges(list(merges))
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "output_norm.weight": (hidden,),
        "output_norm.bias": (hidden,),
    }
    if alibi is None:
        shapes["position_embd.weight"] = (model.max_positions, hidden)
    for layer in range(model.layers):
        parts = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_qkv": (3 * hidden, hidden)}
        parts |= {"attn_output": (hidden, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        for part, shape in parts.items():
            shapes[f"blk.{layer}.{part}.weight"] = shape
            shapes[f"blk.{layer}.{part}.bias"] = shape[:1]
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "alibi", "reason"),
    [("mpt", 8.0, r"falls off with the distance \(ALiBi\)"), ("gpt2", None, "learned positions instead of rotary")],
)
def test_models_without_rotary_positions(architecture: str, alibi: float | None, reason: str, tmp_path: Path) -> None:
    path = write_positions(tmp_path / "model.gguf", architecture, alibi)
    with pytest.raises(ModelError, match=f"cannot reuse the states of modules: .*{reason}"):
        describe(path)
    if find_spec("llama_cpp") is None:
        return
    from edge_pc.backends.llamacpp.library import load_library, model_params

    library = load_library()
    model = library.llama_model_load_from_file(str(path).encode(), model_params(library))
    assert model, "it is a model that libllama serves"
    assert library.llama_model_rope_type(model) == library.LLAMA_ROPE_TYPE_NONE
    library.llama_model_free(model)


def test_alibi_that_only_llama_cpp_knows_of(tiny_gguf: Path, tmp_path: Path) -> None:
    for architecture, layers in (("bloom", 2), ("refact", 2), ("baichuan", 40)):
        parts = mutations.parts_of(tiny_gguf)
        parts.fields = [
            (key.replace(b"llama.", f"{architecture}.".encode()), kind, value) for key, kind, value in parts.fields
        ]
        parts.set("general.architecture", mutations.STRING, architecture.encode())
        parts.set(f"{architecture}.block_count", UINT32, layers)
        (tmp_path / "model.gguf").write_bytes(parts.to_bytes())
        with pytest.raises(ModelError, match="ALiBi"):
            describe(tmp_path / "model.gguf")


def test_alibi_of_a_model_that_has_none_elsewhere(tiny_gguf: Path, tmp_path: Path) -> None:
    parts = mutations.parts_of(tiny_gguf)
    parts.set("llama.attention.max_alibi_bias", FLOAT32, 8.0)
    (tmp_path / "model.gguf").write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match="ALiBi"):
        describe(tmp_path / "model.gguf")
