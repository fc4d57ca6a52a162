"""Checks of values that come from a person, one each for every way in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edge_pc.errors import OptionError


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may have; a bool is none.

    Attributes:
        kind: whole numbers (int), or all numbers (float).
        lowest, highest: the least and the greatest of them; None: no limit.
        open: `lowest` itself is not one of them.
        or_none: None is allowed: nothing was given.
    """

    kind: type[int] | type[float]
    lowest: float
    highest: float | None = None
    open: bool = False
    or_none: bool = False

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.or_none
        if isinstance(value, bool) or not isinstance(value, (int, self.kind)):
            return False
        above = value > self.lowest if self.open else value >= self.lowest
        return above and (self.highest is None or value <= self.highest)

    def __str__(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        if self.highest is None:
            return f"{kind} of at least {self.lowest}"
        return f"{kind} {f'above {self.lowest} and at most' if self.open else f'from {self.lowest} to'} {self.highest}"


# More threads than any processor has, and few enough for every system to start.
THREADS = Range(int, 1, 1024, or_none=True)


def check_number(name: str, value: object, allowed: Range) -> None:
    """Refuse what is no number of this range.

    Raises:
        OptionError: with what was expected.
    """
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}, expected {allowed}")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not among those known.

    Raises:
        OptionError: with what is.
    """
    if value not in known:
        raise OptionError(f"{name} is {value!r}, expected one of {', '.join(known)}")
