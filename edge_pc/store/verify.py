"""A full check of a store: every byte of every file, and the index against the files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edge_pc.errors import StatesError
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.store.entry import load_entry
from edge_pc.store.files import StatesFiles
from edge_pc.store.index import Index
from edge_pc.store.info import EntryInfo
from edge_pc.system.sizes import format_size


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


def verify_store(files: StatesFiles, index: Index, *, repair: bool, progress: OnProgress = ignore) -> list[Finding]:
    """Check everything. With `repair`, what is broken is deleted (it will be encoded again) and the index corrected.

    Entries that the index does not know, and rows without a file, are no damage: a process that writes or removes an
    entry is between its two steps, or was killed there. The index is brought up to date.
    """
    findings, done = [], 0
    if index.heal():
        findings.append(Finding("", index.path, "the index is broken", "it is made again from the files"))
    sizes = {key: files.size(key) for key in sorted(files.keys())}
    for key, size in sizes.items():
        finding = _verify_entry(files, index, key, repair)
        if finding is not None:
            findings.append(finding)
        done += size
        progress(Progress(done, sum(sizes.values()), format_size(done)))
    index.remove([key for key in index.entries() or {} if not files.size(key)])
    for path in files.abandoned():
        with suppress(FileNotFoundError):
            if path.stat().st_size:  # else its writer may be about to lock it
                findings.append(Finding("", path, "left by a killed process", "deleted" if repair else ""))
    if repair:
        files.remove_abandoned()
    return findings


def _verify_entry(files: StatesFiles, index: Index, key: str, repair: bool) -> Finding | None:
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
    info, row = EntryInfo.of(entry.metadata, entry.size, path), index.row(key)
    # A row that was noted for another file is only old.
    if row is not None and row.identity == entry.identity:
        if replace(row.info, last_used=info.last_used, hits=info.hits) != info:
            if repair:
                index.put(info, entry.identity)
            action = "index corrected" if repair else ""
            return Finding(key, path, "the index and the file disagree", action)
    elif entry.checked:
        index.put(info, entry.identity)  # spares the next process its own check
    return None


def _delete(files: StatesFiles, index: Index, key: str, identity: str) -> str:
    if not files.delete(key, identity):
        return "could not be deleted"
    index.remove([key])
    return "deleted"
