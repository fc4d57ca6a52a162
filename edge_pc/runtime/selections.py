"""Selections that prompts made lately, and how often: those that come back are worth an exact version."""

from __future__ import annotations

import threading
from collections import OrderedDict

from edge_pc.compose.laid_out import LaidOut

_KEPT = 32


class Selections:
    """The selections used last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: OrderedDict[str, tuple[LaidOut, int]] = OrderedDict()

    def count(self, prompt: LaidOut) -> None:
        """Note a use. What a prompt adds to its modules makes no other selection."""
        if not prompt.exact:
            return
        key = prompt.exact[-1].key
        with self._lock:
            uses = self._uses.pop(key, (prompt, 0))[1] + 1
            self._uses[key] = (prompt, uses)
            if len(self._uses) > _KEPT:
                self._uses.popitem(last=False)

    def used(self, at_least: int) -> list[LaidOut]:
        """Those with so many uses, the last one first."""
        with self._lock:
            return [prompt for prompt, uses in reversed(self._uses.values()) if uses >= at_least]
