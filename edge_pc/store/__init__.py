"""KV states of prompt modules on disk: one self-describing file an encoding, and a SQLite index beside them.

`docs/store-format.md` specifies the files. Nothing in here unpickles, evaluates, or loads a name from a file.
"""

from edge_pc.store.eviction import EVICTION_POLICIES
from edge_pc.store.format import array_checksum, file_bytes
from edge_pc.store.info import EntryInfo
from edge_pc.store.inventory import Removed
from edge_pc.store.opened import Miss
from edge_pc.store.saved import SavedSession
from edge_pc.store.store import StateStore

__all__ = [
    "EVICTION_POLICIES",
    "EntryInfo",
    "Miss",
    "Removed",
    "SavedSession",
    "StateStore",
    "array_checksum",
    "file_bytes",
]
