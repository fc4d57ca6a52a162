"""Checks of values that come from a person, one each for every way in."""

from __future__ import annotations

from collections.abc import Collection

from edge_pc.errors import OptionError


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is not among those known.

    Raises:
        OptionError: with what is.
    """
    if value not in known:
        raise OptionError(f"{name} is {value!r}, expected one of {', '.join(known)}")


def check_count(name: str, value: object, at_least: int) -> None:
    """Refuse what is no whole number of at least `at_least`; a bool is none.

    Raises:
        OptionError: with what was expected.
    """
    if type(value) is not int or value < at_least:
        raise OptionError(f"{name} is {value!r}, expected a whole number of at least {at_least}")
