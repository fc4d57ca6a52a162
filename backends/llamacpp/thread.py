"""A separate thread for the calls of libllama: one for each opened model.

A signal's handler runs in Python's main thread, between any two lines of it, and may raise there: Ctrl-C does. Raised
between a call of libllama and the note of what it did, or within a callback that libllama makes, it would leave the two
in disagreement, or vanish. So every call is made by a thread that handlers never run in. Whoever waits for it may be
interrupted at any point: what was begun is done to its end, and nothing else comes between.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from edge_pc.errors import EngineError, ModelError

T = TypeVar("T")

log = logging.getLogger("edge_pc")

# How often a waiting caller makes sure that the thread is still there.
_LOOK_SECONDS = 5.0

# Not `concurrent.futures`: its locks are taken in Python code, and an interrupt at the wrong point leaves them locked.
_Jobs = SimpleQueue[Callable[[], object] | None]


class NativeThread:
    """Runs work one piece after the other, in the order in which it comes."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._process = os.getpid()
        # A daemon, because an interpreter that ends waits for other threads before it runs `_stop`.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="libllama", daemon=True)
        self._thread.start()
        self._stopping = weakref.finalize(self, _stop, self._jobs, self._thread, self._process)

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start work; call what this returns to wait for its result, or for what it raised.

        Raises:
            ModelError: the thread has been stopped.
            EngineError: this process was forked from the one that has the thread.
        """
        if self._process != os.getpid():
            raise EngineError(
                "this model was opened before the process was forked, and its threads are not here",
                hint='open the model in each process, or start processes by "spawn"',
            )
        if not self._stopping.alive:
            raise _closed()
        reply: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

        def job() -> None:
            try:
                reply.put((True, work()))
            except BaseException as exc:
                reply.put((False, exc))

        self._jobs.put(job)
        return lambda: self._wait(reply)

    def run(self, work: Callable[[], T]) -> T:
        """Do work and wait for it; see `begin`."""
        return self.begin(work)()

    def later(self, work: Callable[[], object]) -> None:
        """Do work some time, unless the thread has been stopped. Never waits: finalizers may call it anywhere."""
        if self._process == os.getpid() and self._stopping.alive:
            self._jobs.put(work)

    def close(self) -> None:
        """Stop when all that was begun is done, and wait for that; a second time nothing happens."""
        self._stopping()

    def _wait(self, reply: SimpleQueue[tuple[bool, Any]]) -> Any:
        while True:
            try:
                done, result = reply.get(timeout=_LOOK_SECONDS)
                break
            except Empty:
                if not self._thread.is_alive():
                    raise _closed() from None
        if done:
            return result
        try:
            raise result
        finally:
            del result  # it knows this frame by its traceback, and would be kept alive by it


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # of work that nobody waits for
            log.exception("libllama's cache cannot be tidied")
        del job  # what it holds on to is not wanted while the next one is awaited


def _stop(jobs: _Jobs, thread: threading.Thread, process: int) -> None:
    if process == os.getpid():
        jobs.put(None)
        if thread is not threading.current_thread():
            thread.join()


def _closed() -> ModelError:
    return ModelError("the model is closed", hint="use the engine only until it is closed")
