"""How long an engine may be used, and the work that its closing ends and waits for."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from edge_pc.errors import EngineError
from edge_pc.runtime.stream import Stream
from edge_pc.runtime.watch import Cancelled, Watch


class Closable(Protocol):
    """A session, as far as its end goes."""

    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=Closable)


class Lifetime:
    """From the opening of an engine to its closing, in the process that opened it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open = True
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._sessions: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._watches: set[Watch] = set()
        self._idle = threading.Condition()

    def require_open(self) -> None:
        """Raises:
        EngineError: the engine is closed, or was opened by another process.
        """
        if self._process != os.getpid():
            raise EngineError(
                "this engine was opened before the process was forked, and its threads are not here",
                hint='open an engine in each process, or start processes by "spawn"',
            )
        if not self._open:
            raise _closed()

    def add(self, stream: Stream) -> Stream:
        """The same stream, which the end will close."""
        self._streams.add(stream)
        return stream

    def keep(self, session: Kept) -> Kept:
        """The same session, which the end will close once all work has ended."""
        self._sessions.add(session)
        return session

    @contextmanager
    def work(self, watch: Watch) -> Iterator[Watch]:
        """Work that the end cancels and waits for.

        Raises:
            EngineError: as `require_open`; or the end came meanwhile.
        """
        with self._idle:  # else the end could come between the two
            self.require_open()
            self._watches.add(watch)
        try:
            yield watch
        except Cancelled as exc:
            raise _closed() from exc
        finally:
            with self._idle:
                self._watches.discard(watch)
                self._idle.notify_all()

    def end(self) -> bool:
        """End all work and wait for it; whether there was anything to end: not a second time, nor after a fork.

        Raises:
            EngineError: it is called by the work itself, in a progress callback.
        """
        if not self._open or self._process != os.getpid():
            return False
        if any(stream.is_worked_on_here for stream in self._streams):
            raise EngineError("an engine cannot be closed from a progress callback", hint="cancel the stream instead")
        self._open = False
        for stream in list(self._streams):
            stream.close_and_wait()
        with self._idle:
            for watch in self._watches:
                watch.cancel()
            self._idle.wait_for(lambda: not self._watches)
        for session in list(self._sessions):
            session.close()
        return True


def _closed() -> EngineError:
    return EngineError("the engine is closed", hint="open another one")
