"""Which entries go first when the store is too large."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from edge_pc.errors import OptionError
from edge_pc.store.info import EntryInfo

DEFAULT_POLICY = "least-recently-used"

# Name → sort key: the entry with the smallest goes first. A new policy is one more line.
EVICTION_POLICIES: dict[str, Callable[[EntryInfo], Any]] = {
    DEFAULT_POLICY: lambda entry: (entry.last_used, entry.created),
    "least-frequently-used": lambda entry: (entry.hits, entry.last_used),
    "oldest": lambda entry: entry.created,
    "largest": lambda entry: -entry.nbytes,
}


def policy_named(name: str) -> Callable[[EntryInfo], Any]:
    """Raises OptionError when there is no such policy."""
    if name not in EVICTION_POLICIES:
        raise OptionError(f"unknown eviction policy {name!r}", hint=f"one of: {', '.join(EVICTION_POLICIES)}")
    return EVICTION_POLICIES[name]


def eviction_order(entries: Iterable[EntryInfo], policy: str, in_use: Collection[str]) -> list[EntryInfo]:
    """`entries`, those to go first at the start; keys `in_use` come after all others."""
    rank = policy_named(policy)
    return sorted(entries, key=lambda entry: (entry.key in in_use, rank(entry)))
