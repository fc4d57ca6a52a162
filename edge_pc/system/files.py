"""Files and folders that take their place whole: made under a temporary name beside it, synced, then renamed.

Invariant: under its own name stands what was there before or all of what is new, whatever happens to the writer. A
writer that fails leaves nothing. One that is killed leaves a temporary name; it held a lock on that, so the next
writer of the same path, or whoever asks for `abandoned`, knows that nobody writes it any more.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path

# Windows does without: there, a file that is open elsewhere cannot be deleted anyway.
if sys.platform != "win32":
    import fcntl

_SUFFIX = ".tmp"
# Where locks tell nothing (Windows, another machine on a shared disk), what is this old is abandoned.
_ABANDONED_SECONDS = 24 * 3600.0
# How often another process may put a folder there between our two renames.
_SWAP_ATTEMPTS = 5


@contextmanager
def replacing_file(path: Path, mode: int | None = None) -> Iterator[BufferedRandom]:
    """A new file, empty and open for reading and writing, that takes the place of `path` when the block ends well.

    Its own name is `file.name` until then.

    Args:
        path: in a folder that exists.
        mode: of the file, whatever the umask; None: as the umask has it.

    Raises:
        OSError: it cannot be written; what stood at `path` is still there then.
    """
    remove_abandoned(path)
    file = _new_file(path, mode)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":  # which cannot rename an open file
                file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):  # what is still in the buffer does not matter
                file.close()
            _delete(file.name)
            raise
        sync_folder(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder, empty, that takes the place of the folder `path` when the block ends well.

    Args:
        path: in a folder that exists; a folder of this name is removed then, with all that is in it.

    Raises:
        OSError: it cannot be written, or a file stands at `path`; what stood there is still there then.
    """
    remove_abandoned(path)
    with _new_folder(path) as temporary:
        yield temporary
        for item in temporary.rglob("*"):
            if item.is_dir():
                sync_folder(item)
            else:
                with item.open("rb+") as file:
                    os.fsync(file.fileno())
        sync_folder(temporary)
        _swap(temporary, path)
    sync_folder(path.parent)


def abandoned(folder: Path) -> Iterator[Path]:
    """The temporary names in `folder` that nobody writes any more, because their writer was killed."""
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.name.endswith(_SUFFIX) and _is_abandoned(path):
                yield path


def remove_abandoned(path: Path) -> None:
    """Delete what killed writers of `path` left beside it."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
    for left in abandoned(path.parent):
        if ours.fullmatch(left.name):
            _delete(left)


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
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring new names to the disk, where the system can; a file's own data is synced by its writer."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")


def _new_file(path: Path, mode: int | None) -> BufferedRandom:
    """A new file beside `path`, locked as long as its writer lives."""

    def open_new(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL, 0o666 if mode is None else mode)

    while True:
        temporary = _temporary_name(path)
        file = open(temporary, "w+b", opener=open_new)  # noqa: SIM115 - the caller closes it
        try:
            if sys.platform == "win32":
                return file
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # the umask may have taken the owner's right to read
            # Someone who cleans up may have come between creation and lock.
            if os.fstat(file.fileno()).st_nlink:
                return file
        except BaseException:
            file.close()
            _delete(temporary)
            raise
        file.close()


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, locked like a new file; it is deleted unless the block renames it."""
    while True:
        temporary = _temporary_name(path)
        temporary.mkdir()
        try:
            with _locked_folder(temporary):
                if temporary.exists():  # someone who cleans up may have come between creation and lock
                    yield temporary
                    return
        finally:
            _delete(temporary)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # cleaned up already
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    with suppress(OSError):
        if sys.platform != "win32":
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except OSError:
                pass
            finally:
                os.close(descriptor)
        return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
    return False


def _swap(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`. A folder that is there moves aside first, and back if the rename fails."""
    for _ in range(_SWAP_ATTEMPTS):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        aside = _temporary_name(path)
        with suppress(FileNotFoundError):
            path.rename(aside)
        try:
            new.rename(path)
        except OSError:
            if not path.exists():
                with suppress(FileNotFoundError):
                    aside.rename(path)
                raise
            # Another process put its own there in between: that is the older one now.
        else:
            return
        finally:
            _delete(aside)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))


def _delete(path: str | Path) -> None:
    """Delete a file or a folder; a failure is no error."""
    with suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
