"""Entries that this process has opened: asking for one again costs no more than a look at its file's time stamps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edge_pc.backends.base import IntArray, KVLayout, KVStates

# Each mapping holds a file descriptor before Python 3.13; macOS gives a process 256 by default.
_MAX_OPENED = 128


@dataclass(frozen=True, slots=True)
class Miss:
    """Why states were not found.

    Attributes:
        reason: for people.
        damaged: a file was there and was not what it should be; it has been deleted if that was possible.
    """

    reason: str
    damaged: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """What was found in a file.

    Attributes:
        identity: of the file (`identity_of`).
        layout: the name of the stored layout, empty for a miss.
        result: its states, or what is wrong with it.
    """

    identity: str
    layout: str
    result: KVStates | Miss

    def matching(self, layout: KVLayout, token_ids: IntArray, position_ids: IntArray) -> KVStates | Miss:
        """The states, if they are those of these tokens at these positions in this layout.

        A key that two contents share would otherwise give fluent wrong answers.
        """
        states = self.result
        if isinstance(states, Miss):
            return states
        if len(states.token_ids) != len(token_ids):
            return Miss(f"{len(states.token_ids)} tokens are stored, {len(token_ids)} asked for")
        if not np.array_equal(states.token_ids, token_ids):
            return Miss("other token ids are stored")
        if not np.array_equal(states.position_ids, position_ids):
            return Miss("other position ids are stored")
        found, shape = states.array, layout.array_shape(position_ids)
        if self.layout != layout.name or found.shape != shape or found.dtype != np.dtype(layout.dtype):
            stored = f"stored as {self.layout} {found.dtype} {found.shape}"
            return Miss(f"{stored}, asked for as {layout.name} {layout.dtype} {shape}")
        return states


class OpenedEntries:
    """The entries opened last, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Opened] = OrderedDict()

    def get(self, key: str, identity: str) -> Opened | None:
        """What was found in the file with this identity, if it was opened."""
        with self._lock:
            opened = self._entries.get(key)
            if opened is None or opened.identity != identity:
                return None
            self._entries.move_to_end(key)
            return opened

    def add(self, key: str, opened: Opened) -> None:
        with self._lock:
            self._entries[key] = opened
            self._entries.move_to_end(key)
            if len(self._entries) > _MAX_OPENED:
                self._entries.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """Let go of mappings: a deleted file's space becomes free once no one maps it."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
