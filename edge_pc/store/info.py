"""What listings say of an entry, and of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_pc.store.format import Metadata

_OF_METADATA = ("key", "model", "schema", "module", "layout", "dtype", "tokens", "checksum", "created")


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One stored encoding.

    Attributes:
        key: its store key.
        model, schema, module: where the states come from.
        layout, dtype: of its array.
        tokens: cells, without padding.
        nbytes: the size of the file in bytes.
        checksum: of its array.
        created, last_used: seconds since 1970, UTC.
        hits: how often it was found.
        path: its file.
    """

    key: str
    model: str
    schema: str
    module: str
    layout: str
    dtype: str
    tokens: int
    nbytes: int
    checksum: str
    created: float
    last_used: float
    hits: int
    path: Path

    @classmethod
    def of(cls, metadata: Metadata, nbytes: int, path: Path) -> EntryInfo:
        """What a file says of itself; it says nothing of its uses."""
        said = {name: getattr(metadata, name) for name in _OF_METADATA}
        return cls(**said, nbytes=nbytes, last_used=metadata.created, hits=0, path=path)


@dataclass(frozen=True, slots=True)
class Totals:
    """A store in numbers. `free_bytes` is None when the system does not tell; `max_bytes` when there is no limit."""

    path: Path
    entries: int
    tokens: int
    nbytes: int
    hits: int
    max_bytes: int | None
    free_bytes: int | None
