"""Checks data from strangers against a table before anything is done with it: one `Field` for each name."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_pc.errors import ModelError

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
# Configuration files have kilobytes; a vocabulary, which may stand in a tokenizer's settings, has some megabytes.
_MAX_JSON_BYTES = 64 << 20

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


@dataclass(frozen=True, slots=True)
class Field:
    """What one field may hold.

    Attributes:
        kind: `int`, `float` (whole numbers count), `str`, `bool`, `dict` or `list`.
        low, high: the range of a number, of each number of a list, of the characters of a text; both are allowed.
        default: what a field that is missing, or null, stands for; `...`: the field must be there.
        items: of a list: the kind of all its items.
    """

    kind: type
    low: float = -math.inf
    high: float = math.inf
    default: Any = ...
    items: type | None = None

    @property
    def expected(self) -> str:
        text = _WORDS[self.kind]
        if self.items is not None:
            text += f" whose items are each {_WORDS[self.items]}"
        if self.kind is not str and self.high < math.inf:
            text += f" from {self.low:g} to {self.high:.10g}"
        return text + (f" of at most {self.high} characters" if self.kind is str and self.high < math.inf else "")

    def holds(self, value: Any) -> bool:
        """Whether the field may hold `value`."""
        if self.kind is list:
            return isinstance(value, list) and (self.items is None or all(self._fits(self.items, v) for v in value))
        return self._fits(self.kind, value)

    def _fits(self, kind: type, value: Any) -> bool:
        if kind in (int, float):
            is_number = type(value) is int or (kind is float and type(value) is float)
            # Nothing is in a range for NaN. A whole number may be too large for a float.
            return is_number and self.low <= value <= self.high and (kind is int or abs(value) < 2**1023)
        if kind is str:
            return isinstance(value, str) and len(value) <= self.high and _is_text(value)
        return type(value) is kind


def whole(low: int, high: int, default: Any = ...) -> Field:
    """A whole number from `low` to `high`."""
    return Field(int, low, high, default)


def number(low: float, high: float, default: Any = ...) -> Field:
    """A number from `low` to `high`, both finite."""
    return Field(float, low, high, default)


def check_fields(
    data: Mapping[str, Any], table: Mapping[str, Field], place: Path | str, prefix: str = ""
) -> dict[str, Any]:
    """The fields of `table` out of `data`; what else `data` holds is left out.

    Args:
        data: name → value, as a file has them.
        table: name → what it may hold.
        place: the file, for errors.
        prefix: what stands before every name in `data`.

    Returns:
        Name → value for every name in `table`; fields of kind `float` are floats.

    Raises:
        ModelError: a field is missing or holds something else; names the field, its value, and what was expected.
    """
    found = {}
    for name, field in table.items():
        value = data.get(prefix + name)
        if value is None:
            if field.default is ...:
                raise ModelError(f"{place}: {prefix}{name} is missing, expected {field.expected}")
            found[name] = field.default
        elif not field.holds(value):
            raise ModelError(f"{place}: {prefix}{name} is {shown(value)}, expected {field.expected}")
        else:
            found[name] = float(value) if field.kind is float else value
    return found


def shown(value: Any) -> str:
    """A value as an error shows it: short, whatever it is."""
    return _short.repr(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: it cannot be read, is far too large, or holds no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes, expected at most {_MAX_JSON_BYTES}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}", hint="download it or make it again") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds {shown(data)}, expected a JSON object")
    return data


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can spell halves of characters."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
