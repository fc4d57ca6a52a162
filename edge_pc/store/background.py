"""Files that were mapped on trust are read to the last byte afterwards, when an answer has begun.

A lookup trusts a file that was checked before and whose time stamps have not changed. A bit that flips on the medium
changes no time stamp. To read every byte first would make each first answer of a process wait. So it is done in the
background, once for each file in a process; what is found damaged is reported, dropped, and encoded again.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from edge_pc.errors import StatesError
from edge_pc.store.entry import open_entry
from edge_pc.store.files import StatesFiles
from edge_pc.store.format import check_array, read_metadata
from edge_pc.system.identity import identity_of

_log = logging.getLogger("edge_pc.store")

# After each block the thread rests for this many times as long as the block took: the answer has the machine.
_REST = 3.0
# The lowest priority of the ordinary ones. Not the system's idle class: where other programs take all CPUs, a thread of
# that class may stand still while it holds the interpreter's lock, and the answer with it.
_NICENESS = 19
# What closing the store waits for at most: the block that is being read.
_STOP_SECONDS = 1.0


class _Stopped(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Trusted:
    """A file that was mapped without a check of its array, and how people know what is in it."""

    key: str
    identity: str
    name: str


class BackgroundChecks:
    """Checks of one store's files in a separate thread. Thread-safe.

    Args:
        files: of the store.
        drop: called with key, identity and reason for a file that is damaged.
    """

    def __init__(self, files: StatesFiles, drop: Callable[[str, str, str], object]) -> None:
        self._files = files
        self._drop = drop
        self._lock = threading.Lock()
        self._waiting: list[_Trusted] = []
        self._known: set[tuple[str, str]] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, key: str, identity: str, name: str) -> None:
        """Have a file checked, unless it was in this process before.

        Args:
            name: of what is in it, shown to people.
        """
        with self._lock:
            if (key, identity) not in self._known:
                self._known.add((key, identity))
                self._waiting.append(_Trusted(key, identity, name))

    def start(self) -> None:
        """Begin, or go on; returns at once."""
        with self._lock:
            if self._waiting and (self._thread is None or not self._thread.is_alive()):
                self._stop = threading.Event()
                # A daemon: the end of the process does not wait for it.
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="edge-pc-store-checks", daemon=True
                )
                self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Break off. What was not checked is, when `start` is called again."""
        with self._lock:
            self._stop.set()
            thread, self._thread = self._thread, None
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        _lower_priority()
        while (trusted := self._take(stop)) is not None:
            try:
                self._check(trusted, stop)
            except _Stopped:  # noqa: PERF203 - it ends the loop
                with self._lock:
                    self._waiting.append(trusted)
                return

    def _take(self, stop: threading.Event) -> _Trusted | None:
        """Any of those that wait: a process that ends early must not leave the same ones unchecked each time."""
        with self._lock:
            if not self._waiting or stop.is_set():
                if self._thread is threading.current_thread():
                    self._thread = None  # under the lock: what is added from now on needs another thread
                return None
            return self._waiting.pop(random.randrange(len(self._waiting)))

    def _check(self, trusted: _Trusted, stop: threading.Event) -> None:
        began = time.monotonic()

        def rest() -> None:
            nonlocal began
            if stop.wait((time.monotonic() - began) * _REST):
                raise _Stopped
            began = time.monotonic()

        # That it cannot be opened, or is another file by now, is for the next lookup to see.
        with suppress(OSError, StatesError), open_entry(self._files.path(trusted.key)) as (file, status):
            if identity_of(status) == trusted.identity:
                try:
                    check_array(file, read_metadata(file, status.st_size), rest)
                except StatesError as exc:
                    self._drop(trusted.key, trusted.identity, exc.message)
                    _log.warning(
                        "%s: its stored states have changed on the disk (%s); what was answered with them may be "
                        "wrong. They are dropped, and computed again for the next prompt",
                        trusted.name,
                        exc.message,
                    )


def _lower_priority() -> None:
    """Leave the CPU, and with it the disk, to everyone else. Elsewhere than on Linux this would be for all threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
