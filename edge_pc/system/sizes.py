"""Sizes as people write and read them: `2GiB`, `500MB`."""

from __future__ import annotations

import re

from edge_pc.errors import OptionError

# One letter alone means the binary unit, as in `ls` and `du`.
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", re.ASCII)
# Far above any disk, and still a 64-bit integer.
_MAX_BYTES = 2**62


def parse_size(text: str) -> int:
    """The number of bytes that `text` means: `1048576`, `500MB` (powers of 1000), `1.5 GiB` or `2G` (powers of 1024).

    Raises:
        OptionError: it is not a size, or too large to be one.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    # A float has 53 bits: whole numbers are kept exact.
    size = None
    if match and unit is not None:
        size = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    if size is None or size > _MAX_BYTES:
        raise OptionError(f"{text!r} is not a size", hint="write it like 500MB, 2GiB or 1048576")
    return size


def format_size(nbytes: int) -> str:
    """`nbytes` in the unit that keeps it short: `0 B`, `1023 B`, `1.5 KiB`, `180.0 MiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        # 1023.95 would be printed as 1024.0.
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def exact_size(nbytes: int) -> str:
    """`nbytes` as `parse_size` reads it, without rounding: `5MiB`, `2GiB`, `5242881`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{unit}"
    return str(nbytes)
