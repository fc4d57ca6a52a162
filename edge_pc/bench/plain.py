"""Frozen dataclasses to plain JSON values and back."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """What JSON can hold: dataclasses become objects without the fields that have their default value.

    Raises:
        TypeError: there is something that JSON has no form for.
        ValueError: a number is infinite or not a number.
    """
    if is_dataclass(value):
        found = {field.name: (field.default, getattr(value, field.name)) for field in fields(value)}
        return {name: to_plain(now) for name, (default, now) in found.items() if default is MISSING or now != default}
    if isinstance(value, dict):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, Path):
        return value.name  # its folders may hold a person's name
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"JSON has no number {value}")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be written into a report")


def from_plain(kind: type[T], value: Any) -> T:
    """An object of `kind` (a dataclass) from what `to_plain` made of it.

    Raises:
        TypeError, AttributeError: the value does not have the fields of `kind`.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _restored(hints.get(name, Any), item) for name, item in value.items()})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _restored(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    arguments = [argument for argument in get_args(kind) if argument is not NoneType]
    if is_dataclass(kind):
        return from_plain(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return tuple(_restored(arguments[0], item) for item in value)
    if get_origin(kind) is dict:
        return {name: _restored(arguments[1], item) for name, item in value.items()}
    if len(arguments) == 1:  # X | None
        return _restored(arguments[0], value)
    return value
