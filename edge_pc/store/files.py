"""States files on disk: `<root>/<first two characters of the key>/<key>.npy`.

Invariant: a name that ends in `.npy` is only ever given to a whole file, by a rename after its bytes are on disk, and
a file is never written again afterwards. So a process killed at any moment leaves whole entries and temporary files,
and whoever has mapped an entry keeps its data while the entry is removed or encoded again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRandom, FileIO
from pathlib import Path

from edge_pc.store.format import is_key
from edge_pc.system.files import abandoned, make_private_folder, replacing_file
from edge_pc.system.identity import identity_of, wait_for_clock_tick

_SUFFIX = ".npy"
# Read-only for everyone who opens it later; Windows neither replaces nor deletes read-only files.
_MODE = 0o600 if sys.platform == "win32" else 0o400
# Large sequential writes; several, so that an interrupt is served in between.
_WRITE_BYTES = 16 * 1024 * 1024


class StatesFiles:
    """The states files below `root`, which need not exist until something is written."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def path(self, key: str) -> str:
        return f"{self._root}{os.sep}{key[:2]}{os.sep}{key}{_SUFFIX}"

    def keys(self) -> Iterator[str]:
        """The key of every entry by its name; what is in the files is another matter."""
        for folder in self._folders():
            for entry in _scan(folder.path):
                key = entry.name.removesuffix(_SUFFIX)
                if entry.name.endswith(_SUFFIX) and is_key(key) and key[:2] == folder.name:
                    yield key

    def size(self, key: str) -> int:
        """The size of an entry's file in bytes, 0 when it is missing or cannot be looked at."""
        with suppress(OSError):
            return os.stat(self.path(key)).st_size
        return 0

    def identity(self, key: str) -> str:
        """The identity of an entry's file, empty when it is missing or cannot be looked at."""
        with suppress(OSError):
            return identity_of(os.stat(self.path(key)))
        return ""

    @contextmanager
    def write(self, key: str, parts: Sequence[bytes | memoryview]) -> Iterator[FileIO]:
        """Write an entry, in place of an older one of its key, and give its file to map, open for as long as the block.

        The entry is on disk by then. Another process may already have removed it again; the open file stays readable.

        Raises:
            OSError: it cannot be written; nothing is left then.
        """
        path = Path(self.path(key))
        make_private_folder(path.parent)
        with ExitStack() as opened:
            with replacing_file(path, _MODE) as new:
                for part in parts:
                    _write_all(new, memoryview(part))
                new.flush()
                if sys.platform != "win32":
                    file = opened.enter_context(FileIO(os.dup(new.fileno()), "rb"))
            if sys.platform == "win32":  # which cannot rename an open file
                file = opened.enter_context(FileIO(str(path), "rb"))
            # Whoever changes the file from now on gives it another time stamp than the one that is noted next.
            wait_for_clock_tick(os.fstat(file.fileno()))
            yield file

    def delete(self, key: str, identity: str | None = None) -> bool:
        """Delete an entry; with `identity` only while it is that very file. Whether it is gone.

        A failure (read-only disk, a file in use on Windows, a folder in its place) is no error.
        """
        path = self.path(key)
        try:
            if identity is not None and self.identity(key) != identity:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def abandoned(self) -> list[Path]:
        """The temporary files that no process writes any more, because it was killed."""
        return [path for folder in self._folders() for path in abandoned(Path(folder.path))]

    def remove_abandoned(self) -> int:
        """Delete the temporary files that no process writes any more. Returns the bytes freed."""
        freed = 0
        for path in self.abandoned():
            with suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                freed += size
        return freed

    def _folders(self) -> list[os.DirEntry[str]]:
        return [entry for entry in _scan(self._root) if len(entry.name) <= 2 and is_key(entry.name)]


def _write_all(file: BufferedRandom, data: memoryview) -> None:
    for start in range(0, len(data), _WRITE_BYTES):
        file.write(data[start : start + _WRITE_BYTES])


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """What stands in `folder`; nothing when it is missing or cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
