"""The rows of the index: their columns, the statements that read and write them, and what a row may hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_pc.store.format import MAX_TIME, is_key
from edge_pc.store.info import EntryInfo

# What of `EntryInfo` is in the table, and its types; the path follows from the key.
_COLUMNS: dict[str, type] = {
    "key": str,
    "model": str,
    "schema": str,
    "module": str,
    "layout": str,
    "dtype": str,
    "tokens": int,
    "nbytes": int,
    "checksum": str,
    "created": float,
    "last_used": float,
    "hits": int,
}
_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}
_TYPED = ", ".join(f"{name} {_SQL_TYPES[kind]} NOT NULL" for name, kind in _COLUMNS.items())
SCHEMA = f"CREATE TABLE IF NOT EXISTS entries ({_TYPED}, identity TEXT NOT NULL, PRIMARY KEY (key)) WITHOUT ROWID"
SELECT = f"SELECT {', '.join(_COLUMNS)}, identity FROM entries"
INSERT = f"INSERT INTO entries ({', '.join(_COLUMNS)}, identity) VALUES ({'?, ' * len(_COLUMNS)}?)"
RENEW = (
    "ON CONFLICT (key) DO UPDATE SET model = excluded.model, schema = excluded.schema, module = excluded.module, "
    "layout = excluded.layout, dtype = excluded.dtype, tokens = excluded.tokens, nbytes = excluded.nbytes, "
    "checksum = excluded.checksum, created = excluded.created, last_used = max(last_used, excluded.last_used), "
    "identity = excluded.identity"
)
_SIZES = ("tokens", "nbytes", "hits")
_TIMES = ("created", "last_used")


@dataclass(frozen=True, slots=True)
class Row:
    """What the index says of an entry, and the identity of the file that this was noted for; empty: not checked."""

    info: EntryInfo
    identity: str

    @classmethod
    def of(cls, row: Sequence[Any], path_of: Callable[[str], str]) -> Row:
        """A row as `SELECT` gives it. SQLite itself takes any value in any column, and a broken page may hold anything.

        Args:
            path_of: gives the file of a key.

        Raises:
            sqlite3.DatabaseError: no writer makes such a row.
        """
        values, identity = dict(zip(_COLUMNS, row, strict=False)), row[-1]
        if not all(isinstance(values[name], kind) for name, kind in _COLUMNS.items()) or not isinstance(identity, str):
            raise sqlite3.DatabaseError("a row has values of the wrong type")
        sizes, times = [values[name] for name in _SIZES], [values[name] for name in _TIMES]
        if not is_key(values["key"]) or min(sizes) < 0 or not all(0 <= each <= MAX_TIME for each in times):
            raise sqlite3.DatabaseError("a row has values out of range")
        return cls(EntryInfo(**values, path=Path(path_of(values["key"]))), identity)

    def values(self) -> tuple[Any, ...]:
        """What `INSERT` takes."""
        return (*(getattr(self.info, name) for name in _COLUMNS), self.identity)
