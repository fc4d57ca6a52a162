"""Sizes and ages as people write and read them: `2GiB`, `30d`."""

from __future__ import annotations

import re

from edge_pc.errors import OptionError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `500 MB`, `1.5g` or `1000`. Units without an i are powers of ten, single letters powers of two.

    Raises:
        OptionError: not a size.
    """
    return int(_parse(text, _SIZE_UNITS, "a size", "a number and a unit, such as 2GiB, 500MB or 1000000"))


def parse_age(text: str) -> float:
    """Seconds of `90s`, `15m`, `12h`, `30d` or `4w`.

    Raises:
        OptionError: not an age.
    """
    return _parse(text, _AGE_UNITS, "an age", "a number and s, m, h, d or w, such as 12h or 30d")


def _parse(text: str, units: dict[str, int], kind: str, expected: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise OptionError(f"{text!r} is not {kind}", hint=f"write {expected}")
    return float(match[1]) * units[match[2].lower()]


def format_size(nbytes: float) -> str:
    """`0 B`, `512 B`, `1.5 KiB`, `94 MiB`: at most three digits that matter."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def format_age(seconds: float) -> str:
    """`just now`, `5 min ago`, `3 h ago`, `12 days ago`."""
    for limit, unit, name in ((60, 0, ""), (3600, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days")):
        if seconds < limit:
            return f"{int(seconds // unit)} {name} ago" if unit else "just now"
    raise AssertionError("unreachable: every age is below infinity")
