"""What a store holds, and how it is made smaller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edge_pc.errors import StatesError, StoreError
from edge_pc.store.entry import open_entry, read_entry
from edge_pc.store.eviction import eviction_order
from edge_pc.store.files import StatesFiles
from edge_pc.store.index import Index
from edge_pc.store.info import EntryInfo
from edge_pc.store.opened import OpenedEntries
from edge_pc.system.sizes import format_size


@dataclass(frozen=True, slots=True)
class Survey:
    """The entries of a store; `broken` has the keys and identities of files that are none."""

    entries: list[EntryInfo]
    broken: dict[str, str]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: entries, and how many bytes that freed (abandoned and broken files included)."""

    entries: tuple[EntryInfo, ...]
    nbytes: int


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
        # Keys that this process has used: they are evicted only when nothing else is left.
        self.in_use: set[str] = set()

    def survey(self) -> Survey:
        """What is there by the files, with what the index knows of them. The index is brought up to date."""
        # In this order: an entry added meanwhile is found among the files at least.
        rows = self._index.entries(self._files.path) or {}
        keys = set(self._files.keys())
        found = Survey([rows[key] for key in sorted(keys & rows.keys())], {})
        for key in sorted(keys - rows.keys()):
            self._adopt(key, found)
        self._index.remove(rows.keys() - keys)
        return found

    def remove(self, entries: Iterable[EntryInfo]) -> Removed:
        """Delete entries; those that cannot be deleted stay and are left out of the result."""
        removed = tuple(entry for entry in entries if self._files.delete(entry.key))
        keys = [entry.key for entry in removed]
        self._index.remove(keys)
        self._opened.forget(keys)
        return Removed(removed, sum(entry.nbytes for entry in removed))

    def remove_broken(self, broken: dict[str, str]) -> int:
        """Delete the files that a survey found broken, if they still are those files. Returns the bytes freed."""
        freed = 0
        for key, identity in broken.items():
            size = self._files.size(key)
            if self._files.delete(key, identity):
                freed += size
        return freed

    def evict(self, entries: Iterable[EntryInfo], max_bytes: int) -> Removed:
        """Delete of `entries` what must go so that the rest has at most `max_bytes`."""
        ordered = eviction_order(entries, self._policy, self.in_use)
        excess = sum(entry.nbytes for entry in ordered) - max_bytes
        chosen = []
        for entry in ordered:
            if excess <= 0:
                break
            chosen.append(entry)
            excess -= entry.nbytes
        return self.remove(chosen)

    def keep_limit(self) -> None:
        """Make the limit hold: at the start, and after a write, as several processes may have used the same room."""
        if self._max_bytes is not None and not self._fits(0, self._max_bytes):
            self.evict(self.survey().entries, self._max_bytes)

    def make_room(self, key: str, needed: int) -> None:
        """Evict entries, so that the limit holds when `needed` bytes are written for `key`.

        Raises:
            StoreError: they are more than the limit, or what should go cannot be deleted.
        """
        if self._max_bytes is None or self._fits(needed, self._max_bytes):
            return
        limit = format_size(self._max_bytes)
        if needed > self._max_bytes:
            raise StoreError(
                f"states of {format_size(needed)} are larger than the limit of the store, {limit}",
                hint="raise the limit, or split the module",
            )
        # An older version of this entry is replaced, so it takes no room.
        others = [entry for entry in self.survey().entries if entry.key != key]
        removed = self.evict(others, self._max_bytes - needed)
        if sum(entry.nbytes for entry in others) - removed.nbytes + needed > self._max_bytes:
            raise StoreError(
                f"no room for states of {format_size(needed)} in {self._path} (limit {limit}): files cannot be deleted",
                hint="raise the limit, or end the programs that use the store",
            )

    def _fits(self, needed: int, max_bytes: int) -> bool:
        total = self._index.total_bytes()
        return total is not None and total + needed <= max_bytes

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
