"""How far some work is, said the same way by everything that takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far some work is.

    Attributes:
        done: how much is done, in the work's own unit (tokens, bytes, files).
        total: how much there is; 0: not known.
        text: what is being worked on.
    """

    done: int
    total: int
    text: str


OnProgress = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """An `OnProgress` that shows nothing."""
