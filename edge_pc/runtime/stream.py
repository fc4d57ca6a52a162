"""An answer while it is being made."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from types import TracebackType

from edge_pc.runtime.answer import Answer
from edge_pc.runtime.stats import Result
from edge_pc.runtime.watch import Watch


class Stream:
    """Iterate for the answer's text in whole characters; `result` is there after the end.

    Closing it early, or leaving its `with` block, stops the work and leaves the engine clean. Iterate in one thread;
    `cancel` and `close` may be called from any.
    """

    def __init__(self, pieces: Generator[str, None, None], answer: Answer, watch: Watch) -> None:
        self._pieces = pieces
        self._answer = answer
        self._watch = watch
        self._working = threading.Lock()
        self._worker = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._working:
            self._worker = threading.get_ident()
            try:
                return next(self._pieces)
            finally:
                self._worker = 0

    @property
    def is_worked_on_here(self) -> bool:
        """Whether this very thread is computing the next piece, as in a progress callback."""
        return self._worker == threading.get_ident()

    @property
    def result(self) -> Result:
        """The answer. If the stream was cancelled or closed early, the text so far.

        Raises:
            RuntimeError: the first token is not there yet.
        """
        return self._answer.result()

    def cancel(self) -> None:
        """End the answer soon: at the next token, or while modules are encoded within a few hundred tokens.

        The iteration then ends as at any answer's end, with `result.stop == "cancelled"`.
        """
        self._watch.cancel()

    def close(self) -> None:
        """Cancel, and free what the answer holds; if another thread is working on it, it does so a little later."""
        self.cancel()
        if self._working.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._working.release()

    def close_and_wait(self) -> None:
        """As `close`; returns when everything is freed."""
        self.cancel()
        with self._working:
            self._finish()

    def _finish(self) -> None:
        self._pieces.close()
        self._answer.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
