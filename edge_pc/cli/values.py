"""What the values of options and arguments may be: text, paths, numbers of a range."""

from __future__ import annotations

import os

import click

from edge_pc.checks import Range


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise click.BadParameter(f"character {exc.start + 1} is not UTF-8; convert it to UTF-8") from exc
    return text


def _expanded(path: str) -> str:
    return os.path.expanduser(path)


# Text that a model can be given: a terminal of another encoding may give bytes that are none.
TEXT = click.types.FuncParamType(_utf8)
# A path; shells leave the ~ of --option=~/x, and that of a variable in a file, to us.
PATH = click.types.FuncParamType(_expanded)


def number(allowed: Range) -> click.IntRange | click.FloatRange:
    """The type of an option whose values are numbers of this range."""
    lowest, highest = allowed.lowest, allowed.highest
    if allowed.kind is float:
        return click.FloatRange(lowest, highest, min_open=allowed.open)
    return click.IntRange(int(lowest), None if highest is None else int(highest), min_open=allowed.open)
