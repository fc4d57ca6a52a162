"""How a model tells tokens at different positions apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from edge_pc.errors import ModelError
from edge_pc.models.fields import Field, check_fields, number, shown, whole

MAX_HEAD_DIM = 1024
MAX_POSITIONS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RotaryEncoding:
    """Queries and keys are rotated by an angle that grows with the position; keys are stored rotated.

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

    kind: ClassVar[str] = "rotary"


@dataclass(frozen=True, slots=True)
class AlibiEncoding:
    """Scores fall with the distance, in each head by its own slope; keys hold no position.

    Attributes:
        max_bias: with the number of heads it gives all slopes: those of h heads (a power of two) are
            2^(-max_bias · i / h) for i from 1 to h.
    """

    max_bias: float

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True, slots=True)
class LearnedEncoding:
    """Each position has its own vector that is added to the token's.

    Attributes:
        positions: how many vectors there are, those before `offset` not counted.
        offset: the row of position 0 in the model's table.
    """

    positions: int
    offset: int = 0

    kind: ClassVar[str] = "learned"


PositionEncoding = RotaryEncoding | AlibiEncoding | LearnedEncoding

_ENCODINGS: dict[str, tuple[type[PositionEncoding], dict[str, Field]]] = {
    RotaryEncoding.kind: (
        RotaryEncoding,
        {
            "base": number(1e-3, 1e15),
            "dims": whole(1, MAX_HEAD_DIM),
            "interleaved": Field(bool),
            "scaling": Field(dict),
        },
    ),
    AlibiEncoding.kind: (AlibiEncoding, {"max_bias": number(0, 1024)}),
    LearnedEncoding.kind: (
        LearnedEncoding,
        {"positions": whole(1, MAX_POSITIONS), "offset": whole(0, MAX_POSITIONS)},
    ),
}


def to_json(position: PositionEncoding) -> dict[str, Any]:
    """The encoding as JSON has it: its fields, and `kind`."""
    return {"kind": position.kind, **asdict(position)}


def from_json(data: dict[str, Any], place: Path) -> PositionEncoding:
    """The encoding that `to_json` wrote.

    Raises:
        ModelError: the kind is unknown, or a field holds something that it cannot.
    """
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _ENCODINGS:
        raise ModelError(f"{place}: the position encoding is {shown(kind)}, expected one of {', '.join(_ENCODINGS)}")
    encoding, table = _ENCODINGS[kind]
    fields = {f"position.{name}": value for name, value in data.items()}
    return encoding(**check_fields(fields, table, place, "position."))
