"""What a store holds, and how it is made smaller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edge_pc.errors import StatesError, StoreError
from edge_pc.store.entry import open_entry, read_entry
from edge_pc.store.eviction import eviction_order
from edge_pc.store.faults import check_limit, check_space, check_writable
from edge_pc.store.files import StatesFiles
from edge_pc.store.index import Index
from edge_pc.store.info import EntryInfo
from edge_pc.store.opened import Miss, OpenedEntries
from edge_pc.system.sizes import format_size


@dataclass(frozen=True, slots=True)
class Survey:
    """The entries of a store; `broken` has the keys and identities of files that are none."""

    entries: list[EntryInfo]
    broken: dict[str, str]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed.

    Attributes:
        entries: that are gone.
        nbytes: freed, abandoned and broken files included.
        kept: entries that should have gone, and could not be deleted.
    """

    entries: tuple[EntryInfo, ...]
    nbytes: int
    kept: tuple[EntryInfo, ...] = ()

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.entries + other.entries, self.nbytes + other.nbytes, self.kept + other.kept)


class Inventory:
    """The entries of one store.

    Args:
        path: the store's folder, for messages.
        max_bytes: the limit of the files' total size; None: no limit.
        policy: which entries go first (`EVICTION_POLICIES`).
    """

    def __init__(
        self, path: Path, files: StatesFiles, index: Index, opened: OpenedEntries, max_bytes: int | None, policy: str
    ) -> None:
        self._path = path
        self._files = files
        self._index = index
        self._opened = opened
        self._max_bytes = max_bytes
        self._policy = policy

    def survey(self) -> Survey:
        """What is there by the files, with what the index knows of them. The index is brought up to date."""
        # In this order: an entry added meanwhile is found among the files at least.
        rows = self._index.entries() or {}
        keys = set(self._files.keys())
        found = Survey([rows[key] for key in sorted(keys & rows.keys())], {})
        for key in sorted(keys - rows.keys()):
            self._adopt(key, found)
        self._index.remove(rows.keys() - keys)
        return found

    def remove(self, entries: Iterable[EntryInfo]) -> Removed:
        """Delete entries."""
        removed: list[EntryInfo] = []
        kept: list[EntryInfo] = []
        for entry in entries:
            (removed if self._files.delete(entry.key) else kept).append(entry)
        keys = [entry.key for entry in removed]
        self._index.remove(keys)
        self._opened.forget(keys)
        return Removed(tuple(removed), sum(entry.nbytes for entry in removed), tuple(kept))

    def drop_damaged(self, key: str, identity: str, reason: str) -> Miss:
        """Delete a damaged file, this very one: another process may have put a good one in its place.

        The reason is remembered until the key has states again: whoever asks next is to know it, too.
        """
        deleted = self._files.delete(key, identity)
        if deleted:
            self._index.remove([key])
        miss = Miss(reason, damaged=True)
        self._opened.add_miss(key, "" if deleted else identity, miss)
        return miss

    def remove_broken(self, broken: dict[str, str]) -> int:
        """Delete the files that a survey found broken, if they still are those files. Returns the bytes freed."""
        freed = 0
        for key, identity in broken.items():
            size = self._files.size(key)
            if self._files.delete(key, identity):
                freed += size
        return freed

    def evict(self, entries: Iterable[EntryInfo], max_bytes: int) -> Removed:
        """Delete of `entries` what must go so that the rest has at most `max_bytes`; those in use go last."""
        ordered = eviction_order(entries, self._policy, self._opened.in_use())
        excess = sum(entry.nbytes for entry in ordered) - max_bytes
        chosen = []
        for entry in ordered:
            if excess <= 0:
                break
            chosen.append(entry)
            excess -= entry.nbytes
        return self.remove(chosen)

    def check_room(self, needed: int) -> None:
        """Find out whether `needed` bytes of states could be stored now.

        Raises:
            StoreError: the limit does not allow it, the disk has too little space, or nothing can be written there.
        """
        evictable = 0
        if self._max_bytes is not None:
            stored = sum(entry.nbytes for entry in self.survey().entries)
            check_limit(self._path, stored, needed, self._max_bytes)
            evictable = max(0, stored + needed - self._max_bytes)
        check_writable(self._path, needed)
        check_space(self._path, needed - evictable)

    def make_room(self, key: str, needed: int) -> None:
        """Evict entries, so that the limit holds when `needed` bytes are written for `key`.

        Raises:
            StoreError: the limit does not allow it, what should go cannot be deleted, or the disk has too little space.
        """
        if self._max_bytes is not None:
            entries = self.survey().entries
            check_limit(self._path, sum(entry.nbytes for entry in entries), needed, self._max_bytes)
            # An older version of this entry is replaced, so it takes no room.
            removed = self.evict([entry for entry in entries if entry.key != key], self._max_bytes - needed)
            if removed.kept:
                raise StoreError(
                    f"no room for states of {format_size(needed)} in {self._path} (limit "
                    f"{format_size(self._max_bytes)}): files cannot be deleted",
                    hint="raise the limit, or end the programs that use the store",
                )
        check_space(self._path, needed)

    def _adopt(self, key: str, found: Survey) -> None:
        """Add an entry that the index does not know, by what its file says of itself."""
        path, identity = self._files.path(key), self._files.identity(key)
        try:
            with open_entry(path) as (file, status):
                metadata = read_entry(file, status, key, thorough=False)
        except StatesError:
            found.broken[key] = identity
        except OSError:
            pass  # removed meanwhile, or not ours to read
        else:
            info = EntryInfo.of(metadata, status.st_size, Path(path))
            self._index.adopt(info)
            found.entries.append(info)
