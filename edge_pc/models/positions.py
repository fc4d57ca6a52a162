"""How a model tells tokens at different positions apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from edge_pc.errors import ModelError
from edge_pc.models.fields import Field, check_fields, number, shown, whole

MAX_HEAD_DIM = 1024
MAX_POSITIONS = 2**31 - 1
MIN_FREQUENCY, MAX_FREQUENCY = 1e-30, 1e6


@dataclass(frozen=True, slots=True)
class RotaryEncoding:
    """Queries and keys are rotated by an angle that grows with the position, in every layer by the same; keys are
    stored rotated.

    Attributes:
        frequencies: radians a position, of each pair of rotated dimensions, all scaling included. Pairs are of the
            first `dims` dimensions of each head; those after them are not rotated.
        interleaved: pairs are neighbours (GGUF llama weights) rather than halves (Hugging Face weights).

    Raises:
        ModelError: a frequency is not above zero, or far too small or large.
    """

    frequencies: tuple[float, ...]
    interleaved: bool

    kind: ClassVar[str] = "rotary"
    fixed: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not all(MIN_FREQUENCY <= frequency <= MAX_FREQUENCY for frequency in self.frequencies):
            raise ModelError(f"the rotary frequencies are not all from {MIN_FREQUENCY:g} to {MAX_FREQUENCY:g}")

    @property
    def dims(self) -> int:
        """Rotated dimensions of each head."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class OpaqueEncoding:
    """Keys hold their positions in a way that is not known here.

    Attributes:
        fixed: why cells cannot be placed at other positions than their own.
    """

    fixed: str

    kind: ClassVar[str] = "opaque"


@dataclass(frozen=True, slots=True)
class AlibiEncoding:
    """Scores fall with the distance, in each head by its own slope; keys hold no position.

    Attributes:
        max_bias: with the number of heads it gives all slopes: those of h heads (a power of two) are
            2^(-max_bias · i / h) for i from 1 to h.
    """

    max_bias: float

    kind: ClassVar[str] = "alibi"
    fixed: ClassVar[str] = ""


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
    fixed: ClassVar[str] = "each position has a learned vector of its own, which keys and values hold"


# Each has `fixed`: why cells cannot be placed at other positions than their own; empty when they can.
PositionEncoding = RotaryEncoding | AlibiEncoding | LearnedEncoding | OpaqueEncoding

_ENCODINGS: dict[str, tuple[type[PositionEncoding], dict[str, Field]]] = {
    RotaryEncoding.kind: (
        RotaryEncoding,
        {"frequencies": Field(list, MIN_FREQUENCY, MAX_FREQUENCY, items=float), "interleaved": Field(bool)},
    ),
    AlibiEncoding.kind: (AlibiEncoding, {"max_bias": number(0, 1024)}),
    LearnedEncoding.kind: (
        LearnedEncoding,
        {"positions": whole(1, MAX_POSITIONS), "offset": whole(0, MAX_POSITIONS)},
    ),
    OpaqueEncoding.kind: (OpaqueEncoding, {"fixed": Field(str, high=1000)}),
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
    fields = check_fields({f"position.{name}": value for name, value in data.items()}, table, place, "position.")
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in fields.items()}
    return encoding(**values)
