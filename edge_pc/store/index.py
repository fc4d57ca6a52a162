"""The SQLite index beside the states files: what is in them, when they were used, and that they were checked.

Invariant: the index is a cache of the files. Nothing is lost with it, so every method is best effort: an index that is
missing, broken, of another version or locked is replaced or left alone, and the method gives its default. The one
thing it is trusted for is a row's `identity`: the file that had it was checked to the last byte.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from edge_pc.store.info import EntryInfo
from edge_pc.store.row import INSERT, RENEW, SCHEMA, SELECT, Row

T = TypeVar("T")

_log = logging.getLogger("edge_pc.store")

INDEX_FILE = "index.sqlite3"
_VERSION = 1
# Of the files that SQLite may have.
_SUFFIXES = ("", "-wal", "-shm", "-journal")
# Another process's transactions take a few ms; whoever holds the index longer must not hold up an answer.
_BUSY_SECONDS = 0.2
_ATTEMPTS = 3
# SQLite does not wait by itself while another process creates the index.
_PAUSE_SECONDS = 0.03
# sqlite3 raises UnicodeError itself where SQLite's message cites broken text.
_FAILURES = (sqlite3.Error, OSError, UnicodeError)
# In messages of SQLite: a lock, the disk or a permission is at fault, not the index.
_NOT_ITS_FAULT = ("locked", "busy", "unable to open", "readonly", "I/O", "full", "interrupted")
# After a failure the index is left alone for this long.
_BACKOFF_SECONDS = 5.0
# Uses are collected in memory and written together, this often at most.
_FLUSH_SECONDS = 10.0


class Index:
    """The index in the folder `root`, opened when it is first needed and created when `root` exists. Thread-safe.

    Args:
        root: the store's folder.
        path_of: gives the file of a key.
    """

    def __init__(self, root: Path, path_of: Callable[[str], str]) -> None:
        self.path = root / INDEX_FILE
        self._path_of = path_of
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._writable = False
        self._retry_at = 0.0
        self._uses: dict[str, tuple[int, float]] = {}
        self._flushed_at = time.monotonic()

    def row(self, key: str) -> Row | None:
        """What is noted of an entry; None: nothing, or there is no index to ask."""

        def work(connection: sqlite3.Connection) -> Row | None:
            row = connection.execute(f"{SELECT} WHERE key = ?", (key,)).fetchone()
            return None if row is None else Row.of(row, self._path_of)

        return self._run(work, None)

    def adopt(self, info: EntryInfo) -> None:
        """Add an entry whose file was found but not checked, unless it has been added meanwhile."""
        values = Row(info, "").values()
        self._run(lambda connection: connection.execute(f"{INSERT} ON CONFLICT (key) DO NOTHING", values), None, True)

    def put(self, info: EntryInfo, identity: str) -> None:
        """Add an entry or renew it, after all bytes of the file `identity` were checked. Hits and last use are kept."""
        values = Row(info, identity).values()
        self._run(lambda connection: connection.execute(f"{INSERT} {RENEW}", values), None, True)

    def remove(self, keys: Iterable[str]) -> None:
        rows = [(key,) for key in keys]
        with self._lock:
            for (key,) in rows:
                self._uses.pop(key, None)
        if rows:
            self._run(lambda connection: connection.executemany("DELETE FROM entries WHERE key = ?", rows), None, True)

    def entries(self) -> dict[str, EntryInfo] | None:
        """Every entry by its key, or None when there is no index to ask."""
        self.flush()

        def work(connection: sqlite3.Connection) -> dict[str, EntryInfo]:
            rows = [Row.of(row, self._path_of) for row in connection.execute(SELECT).fetchall()]
            return {row.info.key: row.info for row in rows}

        return self._run(work, None)

    def heal(self) -> bool:
        """Check all of the index; a broken one is deleted, and made again when it is needed. Whether it was broken."""

        def work(connection: sqlite3.Connection) -> bool:
            return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])

        intact = self._run(work, True)
        if not intact:
            with self._lock:
                self._disconnect()
                self._delete()
        return not intact

    def record_use(self, key: str) -> None:
        """Count a hit. It reaches the disk later: with many others, or when the index is closed."""
        now = time.time()
        with self._lock:
            self._uses[key] = (self._uses.get(key, (0, 0.0))[0] + 1, now)
            due = time.monotonic() - self._flushed_at >= _FLUSH_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        """Write the uses collected so far. Those that cannot be written now are kept for the next time."""
        with self._lock:
            self._flushed_at = time.monotonic()
            if not self._uses:
                return
            uses = [(hits, last_used, key) for key, (hits, last_used) in self._uses.items()]

            def work(connection: sqlite3.Connection) -> bool:
                connection.executemany(
                    "UPDATE entries SET hits = hits + ?, last_used = max(last_used, ?) WHERE key = ?", uses
                )
                return True

            if self._run(work, False, writes=True):
                self._uses.clear()

    def close(self) -> None:
        """Write what is pending and close. The index may be used again afterwards."""
        with self._lock:
            self.flush()
            self._disconnect()

    def _run(self, work: Callable[[sqlite3.Connection], T], default: T, writes: bool = False) -> T:
        """The result of `work` in a transaction, or `default` if the index cannot be used now."""
        with self._lock:
            if time.monotonic() < self._retry_at or not self.path.parent.is_dir():
                return default
            for _ in range(_ATTEMPTS):
                try:
                    connection = self._connect()
                    if writes and not self._writable:
                        return default
                    with connection:
                        return work(connection)
                except _FAILURES as exc:  # noqa: PERF203 - the loop is there to try again
                    _log.debug("index %s: %s", self.path, exc)
                    self._disconnect()
                    if _is_broken(exc):
                        self._delete()
                    elif _is_locked(exc):
                        time.sleep(_PAUSE_SECONDS)
            self._retry_at = time.monotonic() + _BACKOFF_SECONDS
            return default

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection, self._writable = self._open(), True
            except (sqlite3.OperationalError, OSError) as exc:
                if _is_locked(exc):
                    raise
                # Perhaps a read-only disk. What other processes may be writing at this moment is not seen then.
                self._connection, self._writable = _checked(_open(self.path, "mode=ro&immutable=1")), False
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self._clear_the_way()
        if not self.path.exists():
            # SQLite gives its other files the same mode.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = _open(self.path, "mode=rw")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if _number(connection, "PRAGMA user_version") == 0:
                    connection.execute(SCHEMA)
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            connection.close()
            raise
        return _checked(connection)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _clear_the_way(self) -> None:
        """Move away what is no file where SQLite needs one: a container's runtime makes a folder of a missing file."""
        for path in self._paths():
            if path.exists() and not path.is_file():
                _log.info("%s is not a file; it has been moved away", path)
                with suppress(OSError):
                    path.rename(path.with_name(f"{path.name}.{secrets.token_hex(8)}.moved"))

    def _delete(self) -> None:
        _log.info("the index %s is broken or of another version: it is made again from the files", self.path)
        for path in self._paths():
            with suppress(OSError):
                path.unlink()

    def _paths(self) -> list[Path]:
        return [self.path.with_name(self.path.name + suffix) for suffix in _SUFFIXES]


def _open(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?{options}", timeout=_BUSY_SECONDS, uri=True, check_same_thread=False)


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, if it is to an index of this version; it is closed otherwise."""
    try:
        version = _number(connection, "PRAGMA user_version")
        if version != _VERSION:
            raise sqlite3.DatabaseError(f"version {version}, expected {_VERSION}")
        connection.execute(f"{SELECT} LIMIT 0")
    except BaseException:
        connection.close()
        raise
    return connection


def _number(connection: sqlite3.Connection, query: str) -> int:
    row = connection.execute(query).fetchone()
    if row is None or not isinstance(row[0], int):
        raise sqlite3.DatabaseError(f"no number for: {query}")
    return row[0]


def _is_locked(exc: Exception) -> bool:
    return isinstance(exc, sqlite3.OperationalError) and "locked" in str(exc)


def _is_broken(exc: Exception) -> bool:
    """Whether the index is at fault and has to be made again."""
    if isinstance(exc, sqlite3.OperationalError):
        return not any(words in str(exc) for words in _NOT_ITS_FAULT)
    return isinstance(exc, sqlite3.DatabaseError | UnicodeError)
