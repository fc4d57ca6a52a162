"""One worker at a time for each key, among the threads of this process and among processes; and one writer at a time
where a limit holds.

Nothing wrong comes of doing without: the states of a key are the same whoever computes them, and a limit is exceeded by
what others write at the same moment. So where no lock file can be made (a read-only store), or another process holds
one for too long, the caller goes on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edge_pc.system.files import make_private_folder

_log = logging.getLogger("edge_pc.store")

LOCK_FOLDER = "locks"
_SUFFIX = ".lock"
# A wait shorter than this is not worth a word.
_SILENT_SECONDS = 2.0
# Far longer than any module takes to encode: the holder is stopped or hangs.
_MAX_SECONDS = 600.0


@dataclass(slots=True)
class _KeyLock:
    threads: threading.RLock
    processes: FileLock
    users: int = 0


class KeyLocks:
    """Locks by key; their files are in the folder `root / "locks"` and go when a lock is released."""

    def __init__(self, root: Path) -> None:
        self._folder = root / LOCK_FOLDER
        self._mutex = threading.Lock()
        self._locks: dict[str, _KeyLock] = {}

    @contextmanager
    def hold(self, key: str, holder: str = "encodes the same module") -> Iterator[None]:
        """Wait until no other thread or process holds `key`, and hold it. A thread may do so again inside.

        Args:
            key: of an entry, or another name for a file.
            holder: what its holder does, shown to people who wait.
        """
        path = self._folder / (key + _SUFFIX)
        with self._mutex:
            if key not in self._locks:
                self._locks[key] = _KeyLock(threading.RLock(), FileLock(path, mode=0o600, thread_local=False))
            lock = self._locks[key]
            lock.users += 1
        try:
            with lock.threads:
                acquired = self._acquire(lock.processes, holder)
                try:
                    yield
                finally:
                    if acquired:
                        _release(lock.processes, path)
        finally:
            with self._mutex:
                lock.users -= 1
                if not lock.users:
                    del self._locks[key]

    def delete_abandoned(self) -> None:
        """Delete the lock files that killed processes left."""
        with suppress(OSError):
            for path in self._folder.glob("*" + _SUFFIX):
                with self._mutex:
                    held = path.name.removesuffix(_SUFFIX) in self._locks
                if not held:
                    lock = FileLock(path, mode=0o600, thread_local=False)
                    with suppress(OSError):
                        lock.acquire(timeout=0)
                        _release(lock, path)

    def _acquire(self, lock: FileLock, holder: str) -> bool:
        try:
            make_private_folder(self._folder)
            try:
                lock.acquire(timeout=_SILENT_SECONDS)
            except Timeout:
                _log.info("waiting for another process that %s", holder)
                lock.acquire(timeout=_MAX_SECONDS)
        except Timeout:
            _log.warning("another process has held a lock for %.0f s; going on without it", _MAX_SECONDS)
            return False
        except (OSError, NotImplementedError) as exc:
            _log.debug("no lock file in %s: %s", self._folder, exc)
            return False
        return True


def _release(lock: FileLock, path: Path) -> None:
    """Release once, and delete the file with the last hold: whoever comes next looks into the store first."""
    if lock.lock_counter == 1 and os.name != "nt":
        with suppress(OSError):
            path.unlink()
    lock.release()
