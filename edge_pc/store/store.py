"""The store: KV states by key, on disk, shared by processes."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import IntArray, KVLayout, KVStates
from edge_pc.errors import OptionError, StatesError, StoreError
from edge_pc.progress import OnProgress, ignore
from edge_pc.store.background import BackgroundChecks
from edge_pc.store.entry import load_entry, map_array
from edge_pc.store.eviction import DEFAULT_POLICY, policy_named
from edge_pc.store.faults import cannot_write, free_bytes
from edge_pc.store.files import StatesFiles
from edge_pc.store.format import (
    DESCRIPTORS,
    HEADER_BYTES,
    Metadata,
    array_checksum,
    frozen_ids,
    is_key,
    pack_header,
    pack_trailer,
)
from edge_pc.store.index import Index
from edge_pc.store.info import EntryInfo, Totals
from edge_pc.store.inventory import Inventory, Removed
from edge_pc.store.locks import KeyLocks
from edge_pc.store.opened import Miss, OpenedEntries, StoredStates
from edge_pc.store.saved import SavedSession, SavedSessions
from edge_pc.store.verify import Finding, verify_store
from edge_pc.system.home import SESSIONS
from edge_pc.system.identity import identity_of

# Of the lock on writing; no key looks like this.
_WRITERS = "writers-"

# Cells of a conversation are stored before its file: for so long they may belong to one that is being saved.
_BEING_SAVED_SECONDS = 3600.0


class StateStore:
    """KV states of prompt modules in one folder. Safe to use from several threads and several processes.

    Args:
        root: the folder. It is created when something is written; that it is missing or read-only is no error before.
        max_bytes: `put` keeps the files' total size at or below this; None: no limit. A limit below what is stored
            already removes nothing: `put` refuses, until `gc` was asked to make room.
        policy: which entries go first then (`EVICTION_POLICIES`).

    Attributes:
        sessions: the saved conversations; their cells are entries.

    Raises:
        OptionError: `max_bytes` is negative or `policy` unknown.
    """

    def __init__(self, root: Path, *, max_bytes: int | None = None, policy: str = DEFAULT_POLICY) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise OptionError(f"the limit of the store is {max_bytes} bytes", hint="give a size such as 2GiB")
        policy_named(policy)
        self.path = Path(os.path.abspath(root))
        self.max_bytes = max_bytes
        self.sessions = SavedSessions(self.path)
        self._files = StatesFiles(self.path)
        self._index = Index(self.path, self._files.path)
        self._locks = KeyLocks(self.path)
        self._opened = OpenedEntries()
        self._inventory = Inventory(self.path, self._files, self._index, self._opened, max_bytes, policy)
        self._checks = BackgroundChecks(self._files, self._inventory.drop_damaged)
        # A store that nobody closes still keeps its last uses.
        weakref.finalize(self, self._index.close)
        weakref.finalize(self, self._checks.stop, wait=False)

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, key: str, layout: KVLayout, token_ids: IntArray, position_ids: IntArray) -> KVStates | Miss:
        """The stored states of `key`, or why there are none that can be used.

        Whatever is on the disk, states are only returned when their file was checked to the last byte (once; again when
        its time stamps or size changed) and holds exactly these token and position ids in this layout. A file that is
        not what it should be is deleted. The entry is in use, and evicted last, as long as somebody holds the states.

        Args:
            key: the store key, `[a-z0-9]+`.
            layout: the backend's.
            token_ids, position_ids: int32 `[tokens]`.
        """
        found = self._open(key)
        if isinstance(found, Miss):
            return found
        mismatch = found.mismatch(layout, token_ids, position_ids)
        if mismatch is None:
            self._index.record_use(key)
        return mismatch or found

    def put(
        self,
        key: str,
        layout: KVLayout,
        array: NDArray[Any],
        token_ids: IntArray,
        position_ids: IntArray,
        *,
        model: str,
        schema: str,
        module: str,
    ) -> KVStates:
        """Write states, and return them mapped from their file. May be called in its own thread.

        Args:
            key: the store key, `[a-z0-9]+`.
            layout: the backend's.
            array: shape `layout.array_shape(position_ids)`, dtype `layout.dtype`.
            token_ids, position_ids: int32 `[tokens]`; positions ascend strictly.
            model, schema, module: where the states come from, for listings.

        Raises:
            StoreError: they cannot be written: full disk, read-only folder, larger than the limit, … No part of a file
                is left then.
            StatesError: array, ids and layout do not fit together.
        """
        shape, expected = array.shape, layout.array_shape(position_ids)
        if shape != expected or array.dtype != np.dtype(layout.dtype) or layout.dtype not in DESCRIPTORS:
            raise StatesError(f"states of {shape} {array.dtype}, expected {expected} {layout.dtype}")
        array = np.ascontiguousarray(array, dtype=DESCRIPTORS[layout.dtype])
        metadata = Metadata(
            key=key,
            layout=layout.name,
            dtype=layout.dtype,
            shape=shape,
            token_ids=frozen_ids("token ids", token_ids),
            position_ids=frozen_ids("position ids", position_ids),
            model=model,
            schema=schema,
            module=module,
            created=round(time.time(), 3),
            checksum=array_checksum(array),
        )
        parts = (pack_header(metadata.dtype, shape), array.data.cast("B"), pack_trailer(metadata))
        needed = sum(len(part) for part in parts)
        with self._one_writer():
            self._inventory.make_room(key, needed)
            try:
                return self._write(metadata, parts, needed)
            except OSError as exc:
                raise cannot_write(exc, Path(self._files.path(key)), needed) from exc

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Hold `key`, so that one thread of one process encodes it; the others wait, and find it in the store then."""
        return self._locks.hold(_checked_key(key))

    def check_room(self, nbytes: int) -> None:
        """Find out, before they are computed, whether states of `nbytes` in all could be stored now.

        Raises:
            StoreError: they could not: the limit does not allow it, the disk has too little space or is read-only, …
        """
        if nbytes:
            self._inventory.check_room(nbytes)

    def start_checks(self) -> None:
        """Begin to read, in the background, the files that lookups trusted by their time stamps; returns at once.

        Call it when an answer has begun. A file whose bytes have changed anyway is deleted, and a warning says
        so: what was answered with it may be wrong.
        """
        self._checks.start()

    def entries(self) -> list[EntryInfo]:
        """What is stored, oldest first."""
        return sorted(self._inventory.survey().entries, key=lambda entry: (entry.created, entry.key))

    def totals(self) -> Totals:
        entries = self._inventory.survey().entries
        return Totals(
            path=self.path,
            entries=len(entries),
            tokens=sum(entry.tokens for entry in entries),
            nbytes=sum(entry.nbytes for entry in entries),
            hits=sum(entry.hits for entry in entries),
            max_bytes=self.max_bytes,
            free_bytes=free_bytes(self.path),
        )

    def verify(self, progress: OnProgress = ignore, *, repair: bool = False) -> list[Finding]:
        """Read every byte of every file and compare the index. Nothing found: an empty list.

        Args:
            progress: called after each file with the bytes checked so far and the bytes of all files.
            repair: delete what is broken (it will be encoded again) and correct the index.
        """
        return verify_store(self._files, self._index, repair=repair, progress=progress)

    def remove(self, keys: Iterable[str]) -> Removed:
        """Remove entries. Processes that have them mapped keep their data; what cannot be deleted is left out."""
        wanted = set(keys)
        return self._inventory.remove(entry for entry in self._inventory.survey().entries if entry.key in wanted)

    def save_session(self, session: SavedSession) -> None:
        """Keep a conversation whose cells are stored, in place of another of its name.

        Raises:
            OptionError, StoreError: as `SavedSessions.write`.
        """
        replaced = self._keys_of([session.name])
        self.sessions.write(session)
        self.remove(replaced - self._keys_of(self.sessions.names()))

    def remove_sessions(self, names: Iterable[str]) -> Removed:
        """Remove saved conversations, and those of their cells that no other one needs."""
        names = list(names)
        keys = self._keys_of(names)
        for name in names:
            self.sessions.remove(name)
        return self.remove(keys - self._keys_of(self.sessions.names()))

    def gc(self, *, max_bytes: int | None = None, older_than: float | None = None) -> Removed:
        """Remove what killed processes left, broken files, cells of no saved conversation, and entries by age and size.

        Args:
            max_bytes: remove entries until the rest fits; None: the store's own limit, if it has one.
            older_than: remove entries that were not used for this many seconds.
        """
        freed = self._files.remove_abandoned()
        self._locks.delete_abandoned()
        found = self._inventory.survey()
        freed += self._inventory.remove_broken(found.broken)
        oldest = 0.0 if older_than is None else time.time() - older_than
        left = self._left_of_sessions(found.entries)
        old = self._inventory.remove(e for e in found.entries if e.last_used < oldest or e.key in left)
        limit = self.max_bytes if max_bytes is None else max_bytes
        evicted = Removed((), 0)
        if limit is not None:
            gone = {entry.key for entry in old.entries}
            evicted = self._inventory.evict([entry for entry in found.entries if entry.key not in gone], limit)
        kept = {entry.key: entry for entry in (*old.kept, *evicted.kept)}
        return Removed(old.entries + evicted.entries, freed + old.nbytes + evicted.nbytes, tuple(kept.values()))

    def close(self) -> None:
        """Stop the background checks and write what the index still has in memory. States handed out stay valid."""
        self._checks.stop()
        self._opened.clear()
        self._index.close()

    def _keys_of(self, names: Iterable[str]) -> set[str]:
        """The keys that saved conversations need."""
        wanted = set(names)
        return {key for session in self.sessions.readable() if session.name in wanted for key in session.keys}

    def _left_of_sessions(self, entries: Iterable[EntryInfo]) -> set[str]:
        """The keys of cells of conversations that are not saved, or not any more."""
        needed, newest = self._keys_of(self.sessions.names()), time.time() - _BEING_SAVED_SECONDS
        return {e.key for e in entries if e.schema == SESSIONS and e.key not in needed and e.created < newest}

    def _one_writer(self) -> AbstractContextManager[object]:
        """Hold the right to write. Where there is a limit, one write at a time: two would use the same room."""
        if self.max_bytes is None:
            return nullcontext()
        return self._locks.hold(_WRITERS, holder="writes states")

    def _write(self, metadata: Metadata, parts: Sequence[bytes | memoryview], nbytes: int) -> KVStates:
        """Write an entry and note it in the index.

        Raises:
            OSError: it cannot be written.
        """
        key, path = metadata.key, self._files.path(metadata.key)
        with self._files.write(key, parts) as file:
            array = map_array(file, metadata)
            status = os.fstat(file.fileno())
        states = _states(metadata, array, path, identity_of(status))
        if not status.st_nlink:  # another process has removed or replaced it meanwhile
            return states
        self._index.put(EntryInfo.of(metadata, nbytes, Path(path)), states.identity)
        return self._opened.add(key, states)

    def _open(self, key: str) -> StoredStates | Miss:
        """What stands under `key`, from memory if the file is the one that was opened before."""
        path = self._files.path(_checked_key(key))
        try:
            identity = identity_of(os.stat(path))
            return self._opened.get(key, identity) or self._open_file(key, path, identity)
        except FileNotFoundError:
            damaged = self._opened.get(key, "")
            if damaged is None:
                self._opened.forget([key])
            return damaged or Miss("not in the store")
        except OSError as exc:
            return Miss(f"{path} cannot be read: {exc.strerror}")

    def _open_file(self, key: str, path: str, identity: str) -> StoredStates | Miss:
        """Open and map the file of `key`, after a check of all its bytes if it is not the file checked last."""
        row = self._index.row(key)
        try:
            entry = load_entry(path, key, None if row is None else row.identity)
        except StatesError as exc:
            size, noted = self._files.size(key), 0 if row is None else row.info.nbytes
            reason = f"file truncated: {size} of {noted} bytes" if size < noted else exc.message
            return self._inventory.drop_damaged(key, identity, reason)
        if entry.checked:
            self._index.put(EntryInfo.of(entry.metadata, entry.size, Path(path)), entry.identity)
        else:
            self._checks.add(key, entry.identity, f"{entry.metadata.module} of {entry.metadata.schema}")
        return self._opened.add(key, _states(entry.metadata, entry.array, path, entry.identity))


def _states(metadata: Metadata, array: NDArray[Any], path: str, identity: str) -> StoredStates:
    return StoredStates(
        metadata.key,
        array,
        metadata.token_ids,
        metadata.position_ids,
        Path(path),
        HEADER_BYTES,
        identity,
        metadata.layout,
    )


def _checked_key(key: str) -> str:
    """Keys become file names, so nothing but a key may pass."""
    if not is_key(key):
        raise StoreError(f"{key!r} is not a store key", hint="a key has 1 to 128 characters of a-z and 0-9")
    return key
