"""What is known of a model: the content of `edge_pc.json`, which the export writes and every backend reads.

The file records a hash of every file beside it. A model's fingerprint follows from what those files hold *now*, so that
states of a model are not found any more once its files were changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_pc.errors import ModelError
from edge_pc.models import positions
from edge_pc.models.fields import Field, check_fields, read_json, shown, whole
from edge_pc.models.hashes import content_hash, remembered_hashes
from edge_pc.models.positions import MAX_HEAD_DIM, MAX_POSITIONS, PositionEncoding
from edge_pc.models.registry import SPEC_FILE, export_command

SPEC_FORMAT = 3

MAX_LAYERS, MAX_HEADS, MAX_SIZE, MAX_VOCABULARY = 512, 4096, 2**20, 2**24

_log = logging.getLogger("edge_pc")

_FIELDS = {
    "architecture": Field(str, high=100),
    "layers": whole(1, MAX_LAYERS),
    "heads": whole(1, MAX_HEADS),
    "kv_heads": whole(1, MAX_HEADS),
    "head_dim": whole(1, MAX_HEAD_DIM),
    "hidden_size": whole(1, MAX_SIZE),
    "vocab_size": whole(1, MAX_VOCABULARY),
    "max_positions": whole(1, MAX_POSITIONS),
    "position": Field(dict),
    "quantization": Field(str, high=100),
    "bos_id": whole(0, MAX_VOCABULARY, None),
    "eos_ids": Field(list, 0, MAX_VOCABULARY, items=int),
    "special_tokens": Field(dict, default={}),
    "exporter": Field(str, high=100, default=""),
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, each the same in every layer.

    Attributes:
        architecture: `llama`, …
        layers, heads, kv_heads, head_dim, hidden_size, vocab_size: sizes.
        max_positions: positions the model was made for, in tokens.
        position: how it encodes positions.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    position: PositionEncoding

    def sizes(self) -> dict[str, Any]:
        """These fields by name, whatever else a subclass has."""
        return {size.name: getattr(self, size.name) for size in dataclasses.fields(ModelSizes)}


@dataclass(frozen=True, slots=True)
class ModelSpec(ModelSizes):
    """Sizes and identity of a model.

    Attributes:
        quantization: of the weights as they are run (`q8_block32`, `float32`, `Q4_1`, …).
        fingerprint: hash over the weights, the tokenizer and every other parameter; the model's identity in store keys.
        bos_id: the token that must stand at position 0, or None when the model wants none.
        eos_ids: tokens that end an answer.
        special_tokens: what chat templates may ask for: `bos_token`, `eos_token`, … → the token's text.
        exporter: what wrote this (`edge-pc 0.1.0`), empty when read from a GGUF directly.
    """

    quantization: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str] = field(default_factory=dict)
    exporter: str = ""
    fingerprint: str = ""

    def save(self, folder: Path) -> None:
        """Write `edge_pc.json` into `folder`, with the hashes of all files that are there by now."""
        names = sorted(path.name for path in folder.iterdir() if path.name != SPEC_FILE)
        hashes = {name: content_hash(folder / name) for name in names}
        data = {"format": SPEC_FORMAT, **self._to_json(), "files": hashes}
        (folder / SPEC_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ModelSpec:
        """Read `edge_pc.json` from `folder`; files that were changed since are warned of.

        Raises:
            ModelError: the file is missing, not JSON, of another format, or a field holds what it cannot.
        """
        spec, changed = read_spec(folder)
        if changed:
            _log.warning(
                "%s: changed since the export: %s. States stored before are not used; to make the export again: %s",
                folder,
                ", ".join(changed),
                export_command(folder),
            )
        return spec

    def _to_json(self) -> dict[str, Any]:
        data = {**asdict(self), "position": positions.to_json(self.position)}
        del data["fingerprint"]
        return data

    def _fingerprint(self, hashes: dict[str, str]) -> str:
        """Of the model as it runs: the spec, and every byte of graph, weights, tokenizer and template."""
        identity = {**self._to_json(), "exporter": "", "files": hashes}
        return f"sha256:{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()}"


def read_spec(folder: Path) -> tuple[ModelSpec, list[str]]:
    """The spec of the model in `folder`, and the names of its files that are no longer as `edge_pc.json` says.

    Raises:
        ModelError: the file is missing, not JSON, of another format, or a field holds what it cannot.
    """
    path = folder / SPEC_FILE
    try:
        data = read_json(path)
    except FileNotFoundError as exc:
        raise ModelError(
            f"{folder} is not an exported model: {SPEC_FILE} is missing",
            hint=f"make one with: {export_command(folder)}",
        ) from exc
    if data.get("format") != SPEC_FORMAT:
        raise ModelError(
            f"{path} has format {shown(data.get('format'))}, expected {SPEC_FORMAT}: another version of edge-pc made "
            "this export",
            hint=f"export the model again: {export_command(folder)}",
        )
    fields = check_fields(data, _FIELDS, path)
    for name, text in fields["special_tokens"].items():
        check_fields({name: text}, {name: Field(str, high=1000)}, path)
    fields["position"] = positions.from_json(fields["position"], path)
    fields["eos_ids"] = tuple(fields["eos_ids"])
    spec = ModelSpec(**fields)
    written: dict[str, Any] = check_fields(data, {"files": Field(dict)}, path)["files"]
    found = _hashes_now(folder, list(written))
    changed = [name for name in written if found.get(name) != written[name]]
    return replace(spec, fingerprint=spec._fingerprint(found)), changed


def _hashes_now(folder: Path, names: list[str]) -> dict[str, str]:
    """Name → hash of those of the files that are there."""
    there = [name for name in names if (folder / Path(name).name).is_file()]
    try:
        return dict(zip(there, remembered_hashes([folder / Path(name).name for name in there]), strict=True))
    except OSError as exc:
        raise ModelError(f"{exc.filename or folder} cannot be read: {exc.strerror}") from exc
