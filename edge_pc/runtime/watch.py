"""Who waits for an answer: is told how far the work is, and may end it at any time from any thread."""

from __future__ import annotations

import threading

from edge_pc.progress import OnProgress, Progress


class Cancelled(Exception):
    """The work was cancelled."""


class Watch:
    """One piece of work as seen by who waits for it.

    Args:
        progress: told how far it is, in the thread that does the work.
    """

    def __init__(self, progress: OnProgress | None = None) -> None:
        self._progress = progress
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the work at its next check, at most a few hundred tokens from now. Safe to call from any thread."""
        self._cancelled.set()

    def check(self) -> None:
        """Called between steps of the work.

        Raises:
            Cancelled: it is to end.
        """
        if self._cancelled.is_set():
            raise Cancelled

    def report(self, progress: Progress) -> None:
        """Called while what is not stored is computed. Raises as `check`."""
        self.check()
        if self._progress is not None:
            self._progress(progress)

    def computed(self, tokens: int) -> None:
        """Called while a prompt's own text is computed. Raises as `check`."""
        self.check()
