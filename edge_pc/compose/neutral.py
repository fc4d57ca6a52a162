"""Neutral text: what a module is encoded after where other modules may stand before it.

A module that was encoded with nothing before it takes itself for the beginning of the text, and its states differ most
from those that it would have in a prompt. Any text of the same kind in its place takes away most of that difference,
though nothing of it is there later. One short document is enough: a longer text comes hardly closer, and each of its
tokens is computed once for every module.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def neutral_text() -> str:
    """A short document of our own, with a heading, about nothing that anybody asks."""
    return files("edge_pc.compose").joinpath("neutral.txt").read_text(encoding="utf-8")
