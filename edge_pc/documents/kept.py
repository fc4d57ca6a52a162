"""Texts that were converted before, found by the bytes of their file and by the version of what converted them."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edge_pc.system.files import make_private_folder, replacing_file

log = logging.getLogger("edge_pc")

FOLDER = "texts"

_SUFFIX = ".txt"
# Those used last; their files together are seldom larger than one document's states.
_MOST = 1000


class KeptTexts:
    """Texts in the folder of a store. What cannot be read or written there is converted again.

    Args:
        store: the store's folder.
    """

    def __init__(self, store: Path) -> None:
        self._folder = store / FOLDER

    def get(self, data: bytes, version: str, convert: Callable[[bytes], str]) -> str:
        """The text of `data`, converted now if it is not kept.

        Args:
            version: of what converts.
        """
        digest = hashlib.blake2b(version.encode() + b"\0", digest_size=20)
        digest.update(data)
        path = self._folder / (digest.hexdigest() + _SUFFIX)
        text = self._read(path)
        if text is None:
            text = convert(data)
            self._write(path, text)
        return text

    def clear(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, path: Path) -> str | None:
        try:
            checksum, text = path.read_bytes().split(b"\n", 1)
            os.utime(path)
            if checksum == _checksum(text):
                return text.decode()
        except (OSError, ValueError):
            pass
        return None

    def _write(self, path: Path, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        try:
            make_private_folder(self._folder)
            with replacing_file(path, 0o600) as file:
                file.write(_checksum(data) + b"\n" + data)
            self._make_room()
        except OSError as exc:
            log.warning("the text of a converted file is not kept: %s", exc.strerror or exc)

    def _make_room(self) -> None:
        entries = [entry for entry in os.scandir(self._folder) if entry.name.endswith(_SUFFIX)]
        if len(entries) > _MOST:
            for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime)[:-_MOST]:
                with suppress(OSError):
                    os.unlink(entry)


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
