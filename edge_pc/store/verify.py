"""A full check of a store: every byte of every file, and the index against the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge_pc.errors import StatesError
from edge_pc.store.entry import load_entry
from edge_pc.store.files import StatesFiles
from edge_pc.store.index import Index
from edge_pc.store.info import EntryInfo

# Called with the bytes checked so far and the bytes of all entries.
VerifyProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong in the store.

    Attributes:
        key: of the entry, empty for a file that is none.
        path: the file.
        problem: what is wrong.
        action: what was done about it; empty if nothing.
    """

    key: str
    path: Path
    problem: str
    action: str = ""


def verify_store(
    files: StatesFiles, index: Index, *, repair: bool, progress: VerifyProgress | None = None
) -> list[Finding]:
    """Check everything. With `repair`, what is broken is deleted (it will be encoded again) and the index corrected."""
    findings, done = [], 0
    broken = index.heal()
    if broken:
        findings.append(Finding("", index.path, "the index is broken", "it is made again from the files"))
    rows = None if broken else index.entries(files.path)
    sizes = {key: files.size(key) for key in sorted(files.keys())}
    for key, size in sizes.items():
        finding = _verify_entry(files, index, key, None if rows is None else rows.get(key), rows is not None, repair)
        if finding is not None:
            findings.append(finding)
        done += size
        if progress is not None:
            progress(done, sum(sizes.values()))
    for key in sorted((rows or {}).keys() - sizes.keys()):
        if repair:
            index.remove([key])
        action = "removed from the index" if repair else ""
        findings.append(Finding(key, Path(files.path(key)), "in the index, but the file is missing", action))
    for path, _ in files.abandoned(delete=repair):
        findings.append(Finding("", path, "left behind by a killed process", "deleted" if repair else ""))
    return findings


def _verify_entry(
    files: StatesFiles, index: Index, key: str, row: EntryInfo | None, has_index: bool, repair: bool
) -> Finding | None:
    path = Path(files.path(key))
    identity = files.identity(key)
    try:
        entry = load_entry(str(path), key, trusted=None)
    except FileNotFoundError:
        return None  # removed since the names were listed
    except OSError as exc:
        return Finding(key, path, f"cannot be read: {exc.strerror}")
    except StatesError as exc:
        return Finding(key, path, exc.message, _delete(files, index, key, identity) if repair else "")
    info = EntryInfo.of(entry.metadata, entry.size, path)
    problem = ""
    if row is None and has_index:
        problem = "not in the index"
    elif row is not None and replace(row, last_used=info.last_used, hits=info.hits) != info:
        problem = "the index says otherwise than the file"
    if repair or not problem:
        index.put(info, entry.identity)  # spares the next process a check of its own
    return Finding(key, path, problem, "index corrected" if repair else "") if problem else None


def _delete(files: StatesFiles, index: Index, key: str, identity: str) -> str:
    if not files.delete(key, identity):
        return "could not be deleted"
    index.remove([key])
    return "deleted"
