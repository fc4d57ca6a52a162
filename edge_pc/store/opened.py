"""Entries that this process has opened: asking for one again costs no more than a look at its file's time stamps.

Invariant: the states handed out for an entry are one object as long as anybody holds it. When nobody does, the entry is
no longer in use; the last few stay mapped for the next prompt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np

from edge_pc.backends.base import IntArray, KVLayout, KVStates

# Entries that stay mapped although nobody uses them. A mapping costs a little memory of the kernel, and keeps a deleted
# file's space taken.
_MAX_IDLE = 64


@dataclass(frozen=True, slots=True)
class Miss:
    """Why states were not found.

    Attributes:
        reason: for people.
        damaged: a file was there and was not what it should be; it has been deleted if that was possible.
    """

    reason: str
    damaged: bool = False


class _Referable:
    """What a weak reference may point to."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class StoredStates(KVStates, _Referable):
    """States mapped from a file of the store.

    Attributes:
        identity: of the file (`identity_of`).
        layout: the name of the stored layout.
    """

    identity: str = ""
    layout: str = ""

    def mismatch(self, layout: KVLayout, token_ids: IntArray, position_ids: IntArray) -> Miss | None:
        """Why these are not the states of these tokens at these positions in this layout; None: they are.

        A key that two contents share would otherwise give fluent wrong answers.
        """
        if len(self.token_ids) != len(token_ids):
            return Miss(f"{len(self.token_ids)} tokens are stored, {len(token_ids)} asked for")
        if not np.array_equal(self.token_ids, token_ids):
            return Miss("other token ids are stored")
        if not np.array_equal(self.position_ids, position_ids):
            return Miss("other position ids are stored")
        found, shape = self.array, layout.array_shape(position_ids)
        if self.layout != layout.name or found.shape != shape or found.dtype != np.dtype(layout.dtype):
            stored = f"stored as {self.layout} {found.dtype} {found.shape}"
            return Miss(f"{stored}, asked for as {layout.name} {layout.dtype} {shape}")
        return None


Found = TypeVar("Found", StoredStates, Miss)


class OpenedEntries:
    """What was found in the entries opened last, by key and the identity of the file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # These objects stay in here: what is handed out is a second one over the same pages, so that it goes with its
        # last user.
        self._recent: OrderedDict[str, tuple[str, StoredStates | Miss]] = OrderedDict()
        self._handed_out: WeakValueDictionary[str, StoredStates] = WeakValueDictionary()

    def get(self, key: str, identity: str) -> StoredStates | Miss | None:
        """What was found in the file with this identity, if it was opened."""
        with self._lock:
            handed_out = self._handed_out.get(key)
            if handed_out is not None and handed_out.identity == identity:
                return handed_out
            opened, found = self._recent.get(key, ("", None))
            if found is None or opened != identity:
                return None
            self._recent.move_to_end(key)
            return self._hand_out(key, found)

    def add(self, key: str, identity: str, found: Found) -> Found:
        """Remember what was found in the file with this identity, and give it as `get` does.

        Args:
            identity: empty for a file that was damaged and has been deleted.
        """
        with self._lock:
            self._recent[key] = (identity, found)
            self._recent.move_to_end(key)
            if len(self._recent) > _MAX_IDLE:
                self._recent.popitem(last=False)
            self._handed_out.pop(key, None)
            return self._hand_out(key, found)

    def in_use(self) -> set[str]:
        """The keys of the entries whose states somebody holds."""
        with self._lock:
            return set(self._handed_out.keys())

    def forget(self, keys: Iterable[str]) -> None:
        """Let go of mappings: a deleted file's space becomes free once no one maps it."""
        with self._lock:
            for key in keys:
                self._recent.pop(key, None)
                self._handed_out.pop(key, None)

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        with self._lock:
            self._recent.clear()

    def _hand_out(self, key: str, found: Found) -> Found:
        if isinstance(found, Miss):
            return found
        states = replace(found)
        self._handed_out[key] = states
        return states
