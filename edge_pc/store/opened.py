"""Entries that this process has opened: asking for one again costs no more than a look at its file's time stamps.

Invariant: the states handed out for an entry are one object as long as anybody holds it. When nobody does, the entry is
no longer in use; the last few stay mapped for the next prompt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, eq=False)  # no slots: a weak reference must be able to point to them
class StoredStates(KVStates):
    """States mapped from a file of the store.

    Attributes:
        identity: of the file (`identity_of`).
        layout: the name of the stored layout.
    """

    identity: str = ""
    layout: str = ""

    def mismatch(self, layout: KVLayout, token_ids: IntArray, position_ids: IntArray) -> Miss | None:
        """Why these are not the states of these tokens, as far from each other as these positions, in this layout;
        None: they are.

        A key that two contents share would otherwise give fluent wrong answers.
        """
        if len(self.token_ids) != len(token_ids):
            return Miss(f"{len(self.token_ids)} tokens are stored, expected {len(token_ids)}")
        if not np.array_equal(self.token_ids, token_ids):
            return Miss("other token ids are stored")
        if not np.array_equal(np.diff(self.position_ids), np.diff(position_ids)):
            return Miss("other position ids are stored")
        found, shape = self.array, layout.array_shape(self.position_ids)
        if self.layout != layout.name or found.shape != shape or found.dtype != np.dtype(layout.dtype):
            stored = f"stored as {self.layout} {found.dtype} {found.shape}"
            return Miss(f"{stored}, expected {layout.name} {layout.dtype} {shape}")
        return None


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
            return found if isinstance(found, Miss) else self._hand_out(key, found)

    def add(self, key: str, states: StoredStates) -> StoredStates:
        """Remember states that were mapped, and hand them out."""
        with self._lock:
            self._remember(key, states.identity, states)
            return self._hand_out(key, states)

    def add_miss(self, key: str, identity: str, miss: Miss) -> None:
        """Remember that the file with this identity was damaged.

        Args:
            identity: empty for a file that has been deleted.
        """
        with self._lock:
            self._remember(key, identity, miss)

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

    def _remember(self, key: str, identity: str, found: StoredStates | Miss) -> None:
        self._handed_out.pop(key, None)
        self._recent[key] = (identity, found)
        self._recent.move_to_end(key)
        if len(self._recent) > _MAX_IDLE:
            self._recent.popitem(last=False)

    def _hand_out(self, key: str, kept: StoredStates) -> StoredStates:
        states = self._handed_out[key] = replace(kept)
        return states
