"""`export`: what it makes, what it refuses, and that it never leaves half a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from tiny import TinyModel, change_gguf

import edge_pc.export
from edge_pc.errors import MissingDependencyError, ModelError, OptionError
from edge_pc.export import export
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.progress import Progress

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FILES = {"model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja", "edge_pc.json"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def change_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.fixture
def hf(tiny_hf: Path, tmp_path: Path) -> Path:
    """A Hugging Face folder that a test may change."""
    return Path(shutil.copytree(tiny_hf, tmp_path / "hf"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


def check_nothing_left(out: Path) -> None:
    assert not out.parent.exists() or not list(out.parent.iterdir())


# What it makes


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_gguf_and_hugging_face_folder_of_one_model(bits: Any, tiny_gguf: Path, tiny_hf: Path, tmp_path: Path) -> None:
    import onnxruntime

    for source in (tiny_gguf, tiny_hf):
        folder = export(source, tmp_path / source.name, bits=bits)
        assert names(folder) == FILES
        onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    one, other = (ModelSpec.load(tmp_path / source.name) for source in (tiny_gguf, tiny_hf))
    assert one.position.interleaved
    assert not other.position.interleaved
    assert one.quantization == {4: "q4_block32", 8: "q8_block32", 32: "float32"}[bits]
    sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size", "max_positions", "bos_id")
    assert [getattr(one, name) for name in sizes] == [getattr(other, name) for name in sizes]
    assert one.eos_ids == (2,)
    assert other.eos_ids == (0, 2)  # generation_config.json names both
    assert one.special_tokens["bos_token"] == other.special_tokens["bos_token"] == tiny.BOS
    assert (tmp_path / tiny_gguf.name / "chat_template.jinja").read_text() == tiny.CHAT_TEMPLATE
    text = "the user and 123 éè 😀\n<tool> <|im_end|>"
    tokenizers = [Tokenizer.load(tmp_path / source.name) for source in (tiny_gguf, tiny_hf)]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)


def test_progress_reaches_every_stage(tiny_gguf: Path, out: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    export(tiny_gguf, out, progress=lambda p: seen.update({p.text: (p.done, p.total)}))
    assert seen == {"read": (1, 1), "layers": (2, 2), "fingerprint": (1, 1)}


def test_the_fingerprint_depends_on_all_that_states_depend_on(tiny_gguf: Path, tmp_path: Path) -> None:
    def fingerprint(source: Path, bits: Any = 32) -> str:
        return ModelSpec.load(export(source, tmp_path / "model", bits=bits)).fingerprint

    def other(name: str, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
        return fingerprint(change_gguf(tiny_gguf, tmp_path / f"{name}.gguf", change))

    def one_weight(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_down.weight"][0, 0] += 0.5

    def one_merge(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields["tokenizer.ggml.merges"][0].pop()

    def template(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields["tokenizer.chat_template"] = (tiny.CHAT_TEMPLATE + " ", fields["tokenizer.chat_template"][1])

    def rope_base(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields["llama.rope.freq_base"] = (20000.0, fields["llama.rope.freq_base"][1])

    own = fingerprint(tiny_gguf)
    renamed = shutil.copy(tiny_gguf, tmp_path / "renamed.gguf")
    assert fingerprint(Path(renamed)) == own == other("same", lambda *_: None)
    changes = (one_weight, one_merge, template, rope_base)
    others = [other(change.__name__, change) for change in changes] + [fingerprint(tiny_gguf, 8)]
    assert len({own, *others}) == 1 + len(others)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_gguf_tensors_are_read(kind: str, tmp_path: Path) -> None:
    from edge_pc.export.gguf_reader import read_gguf
    from edge_pc.models.gguf_file import GGUFFile

    model = TinyModel()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    plain = gguf.GGUFReader(tiny.write_gguf(tmp_path / "plain.gguf", model))
    for key, field in plain.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    quantization = gguf.GGMLQuantizationType[kind]
    for tensor in plain.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = read_gguf(GGUFFile(tmp_path / "q.gguf"))
    expected = tiny.interleave(tiny.tensors(model)["layers.1.q"], model.heads)
    step = {"Q8_0": 0.01, "Q4_1": 0.08, "F16": 1e-3, "BF16": 1e-2}[kind]
    np.testing.assert_allclose(weights.tensor("layers.1.q"), expected, atol=step)


def test_bfloat16_and_sharded_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from edge_pc.export.hf_reader import read_huggingface

    folder = tiny.write_hf(tmp_path / "hf", dtype="bfloat16")
    arrays = load_file(folder / "model.safetensors")
    keys = list(arrays)
    shards = {"model-00001-of-00002.safetensors": keys[:7], "model-00002-of-00002.safetensors": keys[7:]}
    for shard, keys in shards.items():
        save_file({key: arrays[key] for key in keys}, folder / shard)
    (folder / "model.safetensors").unlink()
    weight_map = {key: shard for shard, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = read_huggingface(folder)
    for name, expected in tiny.tensors(TinyModel()).items():
        np.testing.assert_allclose(weights.tensor(name), expected, rtol=2**-8)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_huggingface(folder)


def test_linear_scaling_and_factors_of_a_gguf(tiny_gguf: Path, tmp_path: Path) -> None:
    from edge_pc.export.gguf_reader import read_gguf
    from edge_pc.models.gguf_file import GGUFFile

    def found(path: Path) -> tuple[float, ...]:
        return read_gguf(GGUFFile(path)).config.position.frequencies

    plain = np.array(tiny.frequencies(TinyModel()))
    scaled = tiny.write_gguf(tmp_path / "a.gguf", TinyModel(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    np.testing.assert_allclose(found(scaled), plain / 4, rtol=1e-12)
    own = np.linspace(1, 8, 8, dtype=np.float32)
    changed = change_gguf(scaled, tmp_path / "b.gguf", lambda _, tensors: tensors.update({"rope_freqs.weight": own}))
    np.testing.assert_allclose(found(changed), plain / 4 / own, rtol=1e-12)
    np.testing.assert_allclose(found(tiny_gguf), plain, rtol=1e-12)


def bos_id(source: Path, tmp_path: Path, pre: str, add_bos: bool | None) -> int | None:
    def change(fields: dict[str, Any], _: dict[str, Any]) -> None:
        fields["tokenizer.ggml.pre"] = (pre, fields["tokenizer.ggml.pre"][1])
        given = fields.pop("tokenizer.ggml.add_bos_token")
        if add_bos is not None:
            fields["tokenizer.ggml.add_bos_token"] = (add_bos, given[1])

    changed = change_gguf(source, tmp_path / "changed.gguf", change)
    return ModelSpec.load(export(changed, tmp_path / "model")).bos_id


def test_a_bos_only_where_the_model_wants_one(tiny_gguf: Path, tmp_path: Path) -> None:
    assert bos_id(tiny_gguf, tmp_path, "smollm", None) is None
    assert bos_id(tiny_gguf, tmp_path, "smollm", True) == 1
    assert bos_id(tiny_gguf, tmp_path, "llama-bpe", None) == 1
    assert bos_id(tiny_gguf, tmp_path, "llama-bpe", False) is None


def test_a_bos_of_a_hugging_face_folder(hf: Path, out: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    assert ModelSpec.load(export(hf, out)).bos_id is None
    settings = json.loads((hf / "tokenizer_config.json").read_text())
    (hf / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    assert ModelSpec.load(export(hf, out)).bos_id == 1
    del settings["add_bos_token"]  # then the tokenizer itself tells
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ModelSpec.load(export(hf, out)).bos_id is None
    library = Library.from_file(str(hf / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    library.save(str(hf / "tokenizer.json"))
    assert ModelSpec.load(export(hf, out)).bos_id == 1


# What it replaces, and what it leaves alone


def test_an_exported_model_is_replaced_whole(tiny_gguf: Path, out: Path) -> None:
    export(tiny_gguf, out, bits=32)
    (out / "stale.txt").write_text("of an earlier version")
    export(tiny_gguf, out, bits=8)
    assert names(out) == FILES
    assert ModelSpec.load(out).quantization == "q8_block32"
    assert names(out.parent) == {out.name}


def test_other_folders_and_files_are_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="not an exported model"):
        export(tiny_gguf, tmp_path / "photos")
    with pytest.raises(ModelError, match="is a file"):
        export(tiny_gguf, tmp_path / "file")
    assert names(tmp_path / "photos") == {"cat.jpg"}
    assert names(export(tiny_gguf, tmp_path / "empty")) == FILES


@pytest.mark.parametrize("error", [ModelError("broken"), OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there_before", [False, True])
def test_failing_on_the_way_leaves_nothing(
    error: BaseException, there_before: bool, tiny_gguf: Path, out: Path
) -> None:
    if there_before:
        export(tiny_gguf, out, bits=32)
        before = {path: path.read_bytes() for path in out.iterdir()}

    def fail(progress: Progress) -> None:
        if (progress.text, progress.done) == ("layers", 1):
            raise error

    with pytest.raises(ModelError if isinstance(error, OSError) else type(error)):
        export(tiny_gguf, out, progress=fail)
    if there_before:
        assert names(out.parent) == {out.name}
        assert {path: path.read_bytes() for path in out.iterdir()} == before
    else:
        check_nothing_left(out)


def test_two_exports_to_one_place_at_once(tiny_gguf: Path, out: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: export(tiny_gguf, out), range(2))) == [out, out]
    assert names(out) == FILES
    assert names(out.parent) == {out.name}


def test_the_leftover_of_a_killed_export_is_cleared(tiny_gguf: Path, out: Path) -> None:
    leftover = out.with_name(f".{out.name}.{'0' * 16}.tmp")
    leftover.mkdir(parents=True)
    (leftover / "model.onnx.data").write_bytes(b"half")
    export(tiny_gguf, out)
    assert names(out.parent) == {out.name}
    assert names(out) == FILES


def test_the_old_model_returns_when_the_new_one_cannot_take_its_place(
    tiny_gguf: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tiny_gguf, out, bits=32)
    rename, failures = Path.rename, [OSError(5, "Input/output error")]

    def failing(self: Path, target: Path) -> Path:
        if target.name == out.name and failures:
            raise failures.pop()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ModelError, match="cannot be written"):
        export(tiny_gguf, out, bits=8)
    assert ModelSpec.load(out).quantization == "float32"
    assert names(out.parent) == {out.name}


# Broken and unsupported sources


def test_a_gguf_cut_anywhere_is_refused(tiny_gguf: Path, tmp_path: Path, out: Path) -> None:
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    header = data.index(b"token_embd.weight")
    places = [*range(64), *range(64, header + 2000, 211), *np.linspace(header + 2000, len(data) - 1, 20, dtype=int)]
    for place in places:
        cut.write_bytes(data[:place])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            export(cut, out)
    check_nothing_left(out)


def test_noise_in_the_header_is_never_another_exception(tiny_gguf: Path, tmp_path: Path, out: Path) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    rng = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    for _ in range(60):
        noisy = bytearray(data)
        start = int(rng.integers(0, 9000))
        noisy[start : start + 4] = rng.bytes(4)
        broken.write_bytes(noisy)
        try:
            export(broken, out, bits=32)
        except ModelError:
            check_nothing_left(out)
        else:
            shutil.rmtree(out)


def set_field(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(fields: dict[str, Any], _: dict[str, Any]) -> None:
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        fields[key] = (value, [kinds[type(value)]])

    return change


def set_tensor(name: str, shape: tuple[int, ...], value: float) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({name: np.full(shape, value, np.float32)})


def no_end(fields: dict[str, Any], _: dict[str, Any]) -> None:
    del fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("general.architecture", "mamba"), "'mamba' is not supported, only 'llama'"),
        (set_field("llama.logit_scale", 2.0), r"llama.logit_scale = 2\.0 is not supported"),
        (set_field("llama.expert_count", 8), "0 of 8 experts, .* are used"),
        (set_field("llama.rope.scaling.type", "yarn"), "not supported: the rotary scaling 'yarn' is not known"),
        (set_field("llama.rope.dimension_count", 8), "only 8 of each head's 16 dimensions"),
        (set_field("llama.attention.head_count_kv", 3), "cannot share 3 KV heads"),
        (set_field("llama.block_count", 3), "9 tensors are missing: layers.2.attn_norm"),
        (set_field("llama.block_count", 1), "9 tensors are no part .*: layers.1.attn_norm"),
        (set_field("split.count", 3), "one of 3 pieces"),
        (set_field("tokenizer.ggml.pre", "my-own"), "pre-tokenizer 'my-own' is not supported"),
        (set_field("tokenizer.ggml.model", "bert"), "tokenizer 'bert' is not supported"),
        (lambda fields, _: fields.pop("llama.context_length"), "llama.context_length is missing"),
        (no_end, "no token that ends an answer"),
        (lambda _, tensors: tensors.pop("output_norm.weight"), "tensors are missing: norm"),
        (set_tensor("blk.0.attn_q.bias", (64,), 0.0), "no part .* blk.0.attn_q.bias"),
        (set_tensor("blk.1.ffn_up.weight", (96, 32), 0.0), r"'layers.1.up' has shape \[96, 32\], expected \[96, 64\]"),
        (set_tensor("blk.0.ffn_up.weight", (96, 64), np.nan), "'layers.0.up' holds values that are not finite"),
    ],
)
def test_gguf_files_that_cannot_be_served(
    change: Callable[[dict[str, Any], dict[str, Any]], None], message: str, tiny_gguf: Path, tmp_path: Path, out: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        export(change_gguf(tiny_gguf, tmp_path / "changed.gguf", change), out)
    check_nothing_left(out)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gemma"}, "'gemma' is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 512}, "sliding window"),
        ({"model_type": "mistral", "max_position_embeddings": 32768}, "sliding window"),  # 4096 is the default
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing, expected a number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "low_freq_factor is 1.0, expected less"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing, expected a whole number from 1 to 512"),
        ({"num_hidden_layers": 1e30}, r"num_hidden_layers is 1e\+30, expected a whole number"),
        ({"num_hidden_layers": 2147483647}, "num_hidden_layers is 2147483647, expected a whole number from 1 to 512"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a whole number from 1"),
        ({"head_dim": "x"}, "head_dim is 'x', expected a whole number"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"rms_norm_eps": []}, r"rms_norm_eps is \[\], expected a number from 0 to 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a number"),
        ({"rope_scaling": 1e300}, r"rope_scaling is 1e\+300, expected an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, r"factor is 1e\+300, expected a number"),
        ({"rope_parameters": {"rope_type": []}}, r"rope_type is \[\], expected text"),
        ({"max_position_embeddings": 2147483647}, "max_positions is 2147483647: .* would take 128.0 GiB, expected"),
        ({"max_position_embeddings": 10**400}, r"max_position_embeddings is 1000+\.\.\.0+, expected a whole number"),
        ({"hidden_act": "x" * 100000}, r"hidden_act is 'x+\.\.\.x+', expected text of at most 100 characters"),
        ({"hidden_act": "\ud800"}, r"hidden_act is '\\ud800', expected text"),
        ({"sliding_window": "x"}, "sliding_window is 'x', expected a whole number"),
        (
            {"eos_token_id": [1, "x"]},
            r"eos_token_id is \[1, 'x'\], expected a list whose items are each a whole number",
        ),
        ({"eos_token_id": -1}, r"eos_token_id is \[-1\], expected a list"),
        ({"num_hidden_layers": 3}, "9 tensors are missing"),
        ({"intermediate_size": 128}, r"'layers.0.gate' has shape \[96, 64\], expected \[128, 64\]"),
        ({"vocab_size": 200}, r"'embed' has shape"),
    ],
)
def test_hugging_face_folders_that_cannot_be_served(values: dict[str, Any], message: str, hf: Path, out: Path) -> None:
    with pytest.raises(ModelError, match=message):
        export(change_config(hf, **values), out)
    check_nothing_left(out)


def test_mistral_without_a_window_is_a_llama(hf: Path, out: Path) -> None:
    export(change_config(hf, model_type="mistral", sliding_window=None), out)
    assert ModelSpec.load(out).architecture == "mistral"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_broken_files_of_a_hugging_face_folder(name: str, hf: Path, out: Path) -> None:
    data = (hf / name).read_bytes()
    for length in (0, 7, len(data) // 2, len(data) - 1):
        (hf / name).write_bytes(data[:length])
        with pytest.raises(ModelError, match=name):
            export(hf, out)
    (hf / name).unlink()
    with pytest.raises(ModelError, match=name):
        export(hf, out)
    check_nothing_left(out)


def test_a_folder_that_is_no_model_and_a_path_that_is_not_there(tmp_path: Path, out: Path) -> None:
    (tmp_path / "some").mkdir()
    for source in (tmp_path / "some", tmp_path / "nothing.gguf"):
        with pytest.raises(ModelError, match=source.name):
            export(source, out)


def test_without_safetensors_the_extra_is_named(tiny_hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .edge-prompt-cache\[export\]"):
        export(tiny_hf, out)


def test_bits_are_checked(tiny_gguf: Path, out: Path) -> None:
    with pytest.raises(OptionError, match="bits is 5, expected one of 4, 8, 32"):
        export(tiny_gguf, out, bits=5)  # type: ignore[arg-type]


def test_the_package_is_light() -> None:
    import subprocess
    import sys

    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "import edge_pc.export, edge_pc.models.registry, edge_pc.models.tokenizer, edge_pc.models.chat_template; "
        "print(sorted({'onnx', 'gguf', 'tokenizers', 'jinja2', 'onnxruntime', 'safetensors'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert edge_pc.export.__file__
