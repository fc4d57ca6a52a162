"""States files on disk: `<root>/<first two characters of the key>/<key>.npy`.

Invariant: a name that ends in `.npy` is only ever given to a whole file, by a rename after its bytes are on disk, and
a file is never written again afterwards. So a process killed at any moment leaves whole entries and temporary files,
and whoever has mapped an entry keeps its data while the entry is removed or encoded anew.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from edge_pc.store.entry import identity_of, wait_for_clock_tick
from edge_pc.store.format import is_key

# Windows does without: there, a file that is open elsewhere cannot be deleted anyway.
if sys.platform != "win32":
    import fcntl

_SUFFIX = ".npy"
_TEMPORARY_SUFFIX = ".tmp"
# Large sequential writes; several, so that an interrupt is served in between.
_WRITE_BYTES = 16 * 1024 * 1024
# Where locks tell nothing (another machine on a shared disk), a temporary file this old is abandoned.
_ABANDONED_SECONDS = 24 * 3600.0


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
            OSError: it cannot be written; nothing is left behind then.
        """
        path = self.path(key)
        folder = os.path.dirname(path)
        make_private_folder(Path(folder))
        temporary, file = _new_temporary(folder, key)
        with file:
            try:
                for part in parts:
                    _write_all(file, memoryview(part))
                os.fsync(file.fileno())
                if sys.platform == "win32":  # which cannot rename an open file
                    file.close()
                os.replace(temporary, path)
            except BaseException:
                file.close()
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            _sync_folder(folder)
            if sys.platform == "win32":
                file = FileIO(path)
            # Whoever changes the file from now on gives it another time stamp than the one that is noted next.
            wait_for_clock_tick(os.fstat(file.fileno()))
            with file:
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

    def abandoned(self, *, delete: bool = False) -> list[tuple[Path, int]]:
        """The temporary files that no process writes any more, because it was killed, and their sizes in bytes.

        With `delete`, they are deleted, and those that could not be are left out.
        """
        found = []
        for folder in self._folders():
            for entry in _scan(folder.path):
                if entry.name.endswith(_TEMPORARY_SUFFIX):
                    with suppress(OSError), _claim(entry) as claimed:
                        if claimed:
                            size = entry.stat().st_size
                            if delete:
                                os.unlink(entry.path)
                            found.append((Path(entry.path), size))
        return found

    def _folders(self) -> list[os.DirEntry[str]]:
        return [entry for entry in _scan(self._root) if len(entry.name) <= 2 and is_key(entry.name)]


def make_private_folder(folder: Path) -> None:
    """Create `folder` and its missing parents with mode 0700 whatever the umask; folders that exist stay as they are.

    Raises:
        OSError: it cannot be created, or something else stands there.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folder(folder.parent)
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if folder.is_dir():  # another process was faster
            return
        raise
    folder.chmod(0o700)
    _sync_folder(str(folder.parent))


def _new_temporary(folder: str, key: str) -> tuple[str, FileIO]:
    """A new file, locked as long as its writer lives, and private; read-only for everyone who opens it later."""
    # Windows neither replaces nor deletes read-only files.
    mode = 0o600 if sys.platform == "win32" else 0o400
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        path = os.path.join(folder, f"{key}.{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}")
        file = FileIO(os.open(path, flags, mode), "r+b")
        try:
            if sys.platform == "win32":
                return path, file
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(file.fileno(), mode)  # a umask may have taken the owner's right to read
            # Someone who cleans up may have come between creation and lock.
            if os.fstat(file.fileno()).st_nlink:
                return path, file
        except BaseException:
            file.close()
            with suppress(OSError):
                os.unlink(path)
            raise
        file.close()


@contextmanager
def _claim(entry: os.DirEntry[str]) -> Iterator[bool]:
    """Whether no process writes the temporary file; inside the block none can go on to."""
    if sys.platform == "win32":
        yield True
        return
    with open(entry.path, "rb", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            claimed = True
        except OSError:
            claimed = time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS
        yield claimed


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data[:_WRITE_BYTES]) :]


def _sync_folder(folder: str) -> None:
    """Bring a new name to the disk, where the system can; a file's own data is synced by its writer."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """What stands in `folder`; nothing when it is missing or cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []
