"""`edge_pc.json`: what it says of a model, and that a model's identity follows its files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_pc import Engine, Sampling
from edge_pc.errors import ModelError
from edge_pc.models import hashes
from edge_pc.models.hashes import content_hash, remembered_hashes
from edge_pc.models.positions import AlibiEncoding, LearnedEncoding, OpaqueEncoding, PositionEncoding, RotaryEncoding
from edge_pc.models.registry import export_folder
from edge_pc.models.spec import ModelSpec, read_spec

ENCODINGS = [
    RotaryEncoding(frequencies=(1.0, 0.1, 1 / 3), interleaved=True),
    AlibiEncoding(max_bias=8.0),
    LearnedEncoding(positions=2048, offset=2),
    OpaqueEncoding("nobody knows"),
]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """An exported model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(folder: Path, **values: Any) -> Path:
    path = folder / "edge_pc.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def flip_a_byte(path: Path, at: int = -100) -> None:
    """Change one byte, and give the file its old time stamp again."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# What it says


@pytest.mark.parametrize("position", ENCODINGS, ids=lambda position: position.kind)
def test_every_position_encoding_comes_back(position: PositionEncoding, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("layers", "heads", "kv_heads", "head_dim", "hidden_size", "vocab_size"), 4)
    spec = ModelSpec("a", **sizes, max_positions=8, position=position, quantization="q", bos_id=None, eos_ids=(1, 2))
    spec.save(tmp_path)
    assert json.loads((tmp_path / "edge_pc.json").read_text())["position"]["kind"] == position.kind
    assert ModelSpec.load(tmp_path).position == position
    assert ModelSpec.load(tmp_path).eos_ids == (1, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"format": 2},
            r"format 2, expected 3: another version.*hint: export the model again: edge-pc export MODEL -o",
        ),
        ({"format": None}, "has format None, expected 3"),
        ({"layers": "2"}, "layers is '2', expected a whole number from 1 to 512"),
        ({"kv_heads": None}, "kv_heads is missing"),
        ({"max_positions": 2**40}, "max_positions is 1099511627776, expected a whole number"),
        ({"eos_ids": [1, "2"]}, "eos_ids is .*, expected a list whose items are each a whole number"),
        ({"special_tokens": {"bos_token": 3}}, "bos_token is 3, expected text"),
        (
            {"position": {"kind": "sinus"}},
            "is 'sinus', expected one of rotary, alibi, learned, opaque",
        ),
        ({"position": {"kind": []}}, r"position encoding is \[\], expected one of"),
        ({"position": {"kind": "alibi", "max_bias": "x"}}, "position.max_bias is 'x', expected a number"),
        ({"position": {"kind": "learned"}}, "position.positions is missing"),
        (
            {"position": {"kind": "rotary", "frequencies": [1, "x"], "interleaved": True}},
            r"position.frequencies is \[1, 'x'\], expected a list whose items are each a number",
        ),
        ({"position": {"kind": "rotary", "frequencies": [0.0], "interleaved": True}}, r"\[0.0\], expected a list"),
        ({"position": {"kind": "opaque", "fixed": 3}}, "position.fixed is 3, expected text"),
        ({"files": []}, r"files is \[\], expected an object"),
    ],
)
def test_what_cannot_be_right_is_refused(values: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ModelError, match=rf"(?s)edge_pc\.json.*{message}"):
        ModelSpec.load(edit(model, **values))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_broken_file(content: bytes, model: Path) -> None:
    (model / "edge_pc.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"edge_pc\.json"):
        ModelSpec.load(model)


def test_an_old_export_of_a_pulled_model_names_its_command(model: Path) -> None:
    for bits in (8, 4, 32):
        folder = export_folder("smollm2", bits)
        shutil.copytree(model, folder)
        with pytest.raises(ModelError, match=f"edge-pc export smollm2 --bits {bits} --force$"):
            ModelSpec.load(edit(folder, format=1))


# Whose identity it is


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_makes_another_model(name: str, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = ModelSpec.load(model)
    assert ModelSpec.load(model) == before
    assert not caplog.records
    whole = (model / name).read_bytes()
    flip_a_byte(model / name)
    after = ModelSpec.load(model)
    assert after.fingerprint != before.fingerprint
    [record] = caplog.records
    assert f"{model}: changed since the export: {name}." in record.getMessage()
    assert f"edge-pc export MODEL -o {model}" in record.getMessage()
    (model / name).write_bytes(whole)
    assert ModelSpec.load(model).fingerprint == before.fingerprint
    (model / name).unlink()
    assert read_spec(model)[1] == [name]
    assert ModelSpec.load(model).fingerprint not in (before.fingerprint, after.fingerprint)


def test_the_fingerprint_follows_what_is_said_but_not_who_says_it(model: Path) -> None:
    before = ModelSpec.load(model).fingerprint
    assert ModelSpec.load(edit(model, exporter="edge-pc 99")).fingerprint == before
    assert ModelSpec.load(edit(model, eos_ids=[1])).fingerprint != before


def test_states_of_a_model_whose_weights_were_changed_are_not_used(model: Path, tmp_path: Path) -> None:
    def cached_tokens() -> int:
        with Engine(model, cache_dir=tmp_path / "states") as engine:
            return engine.ask("the user?", [tmp_path / "notes.md"], Sampling(max_tokens=1)).stats.cached_tokens

    (tmp_path / "notes.md").write_text("the user and the module " * 20)
    assert cached_tokens() == 0
    assert cached_tokens() > 0
    flip_a_byte(model / "model.onnx.data")
    assert cached_tokens() == 0
    assert cached_tokens() > 0


# Hashes that are remembered


def test_a_file_is_read_once_until_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "empty"]
    for path in paths:
        path.write_text("" if path.name == "empty" else path.name)
    found = remembered_hashes(paths)
    assert found == [content_hash(path) for path in paths]
    assert len(set(found)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(hashes, "_hash", lambda name: pytest.fail(f"{name} was read again"))
        assert remembered_hashes(paths) == found
    flip_a_byte(paths[1], at=0)
    with monkeypatch.context() as patch:
        whole = hashes._hash
        patch.setattr(hashes, "_hash", lambda name: whole(name) if name == str(paths[1]) else pytest.fail(name))
        assert remembered_hashes(paths) == [found[0], content_hash(paths[1]), found[2]]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "[" * 100_000])
def test_a_damaged_note_of_hashes_is_made_anew(content: str, home: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    found = remembered_hashes([tmp_path / "a"])
    (home / "hashes.json").write_text(content)
    assert remembered_hashes([tmp_path / "a"]) == found
    assert str(tmp_path / "a") in json.loads((home / "hashes.json").read_text())


def test_the_oldest_hashes_are_forgotten(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_MAX_REMEMBERED", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
        remembered_hashes([tmp_path / name])
    assert list(json.loads((home / "hashes.json").read_text())) == [str(tmp_path / "b"), str(tmp_path / "c")]


def test_a_home_that_cannot_be_written_only_costs_time(home: Path, tmp_path: Path) -> None:
    (home / "hashes.json").mkdir()
    (tmp_path / "a").write_text("a")
    assert remembered_hashes([tmp_path / "a"]) == [content_hash(tmp_path / "a")]
