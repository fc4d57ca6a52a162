"""Ages as people write and read them: `30d`, `5 min ago`."""

from __future__ import annotations

import re

from edge_pc.errors import OptionError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", re.ASCII | re.IGNORECASE)


def parse_age(text: str) -> float:
    """Seconds of `90s`, `15m`, `12h`, `30d` or `4w`.

    Raises:
        OptionError: it is not an age.
    """
    match = _AGE.fullmatch(text)
    if match is None:
        raise OptionError(f"{text!r} is not an age", hint="write a number followed by s, m, h, d or w, such as 30d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_age(seconds: float) -> str:
    """`just now`, `5 min ago`, `3 h ago`, `12 days ago`."""
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h ago"
    return f"{seconds // 86400:.0f} days ago"
