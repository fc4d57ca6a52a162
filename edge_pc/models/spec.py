"""What is known of a model: the content of `edge_pc.json`, which the export writes and every backend reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_pc.errors import ModelError

SPEC_FILE = "edge_pc.json"
SPEC_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RotaryEncoding:
    """Rotary position encoding.

    Attributes:
        base: theta.
        dims: rotated dimensions of each head.
        interleaved: pairs are neighbours (GGUF llama weights) rather than halves (Hugging Face weights).
        scaling: the scaling rule's own parameters, empty for none.
    """

    base: float
    dims: int
    interleaved: bool
    scaling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and identity of a model.

    Attributes:
        architecture: `llama`, …
        layers, heads, kv_heads, head_dim, hidden_size, vocab_size: sizes.
        max_positions: positions the model was made for, in tokens.
        rotary: its position encoding.
        quantization: of the weights as they are run (`q8_block32`, `float32`, `Q4_1`, …).
        fingerprint: hash over the weights, the tokenizer and every parameter above; the model's identity in store keys.
        bos_id: the token that must stand at position 0, or None when the model wants none.
        eos_ids: tokens that end an answer.
        special_tokens: what chat templates may ask for: `bos_token`, `eos_token`, … → the token's text.
        exporter: what wrote this (`edge-pc 0.1.0`), empty when read from a GGUF directly.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    rotary: RotaryEncoding
    quantization: str
    fingerprint: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str] = field(default_factory=dict)
    exporter: str = ""

    def save(self, folder: Path) -> None:
        """Write `edge_pc.json` into `folder`."""
        text = json.dumps({"format": SPEC_FORMAT, **asdict(self)}, indent=2)
        (folder / SPEC_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ModelSpec:
        """Read `edge_pc.json` from `folder`.

        Raises:
            ModelError: the file is missing, not JSON, of another format, or lacks a field.
        """
        path = folder / SPEC_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise ModelError(
                f"{folder} is not an exported model: {SPEC_FILE} is missing",
                hint="make one with: edge-pc export MODEL -o DIR",
            ) from exc
        except (OSError, ValueError) as exc:
            raise ModelError(f"{path} cannot be read: {exc}", hint="export the model again") from exc
        if not isinstance(data, dict) or data.pop("format", None) != SPEC_FORMAT:
            raise ModelError(f"{path}: expected format {SPEC_FORMAT}", hint="export the model again with this version")
        try:
            rotary = RotaryEncoding(**data.pop("rotary"))
            return cls(rotary=rotary, eos_ids=tuple(data.pop("eos_ids")), **data)
        except (KeyError, TypeError) as exc:
            raise ModelError(f"{path}: a field is missing or unknown: {exc}", hint="export the model again") from exc
