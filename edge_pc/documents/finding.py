"""Which files are meant by what a person names: a file, a folder, a pattern."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from edge_pc.errors import OptionError

log = logging.getLogger("edge_pc")

_URL = re.compile(r"[a-z][a-z0-9+.-]*:/+[^/\s]", re.I)
_WINDOWS_DRIVE = re.compile(r"[a-z]:[/\\]", re.I)

# Folders of tools, which hold nothing that a person wrote; hidden ones (.git, .venv) are left out by their names.
_TOOLS = {"__pycache__", "node_modules", "CVS"}
# It marks a Python environment.
_ENVIRONMENT = "pyvenv.cfg"


def find_files(source: str | Path) -> tuple[list[Path], bool]:
    """The files that `source` means, and whether it names one file itself, not several by a folder or a pattern.

    Hidden files and folders of tools are in no folder and match no pattern, unless the pattern says so.

    Raises:
        OptionError: it is a URL, or a folder or pattern without files.
    """
    name = str(source)
    if _URL.match(name) and not _WINDOWS_DRIVE.match(name):
        raise OptionError(
            f"{name}: this is a URL, and edge-pc uses no network", hint="save the page, and name its file"
        )
    path = Path(os.path.expanduser(source))
    try:
        if path.is_dir():
            return _some(list(_below(path)), f"{name}: there are no files in this folder"), False
        if path.exists() or not glob.has_magic(name):
            return [path], True
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    except (OSError, ValueError):  # the reader says what is wrong with the name
        return [path], True
    files = [file for match in found for file in (_below(match) if match.is_dir() else [match])]
    return _some(files, f"{name}: no file matches this pattern"), False


def _some(files: list[Path], otherwise: str) -> list[Path]:
    if not files:
        raise OptionError(otherwise, hint="hidden files and folders are left out; name them if they are meant")
    return files


def _below(folder: Path) -> Iterator[Path]:
    """The files in a folder and in those below it, by name; links to folders are not followed."""
    for parent, folders, files in os.walk(folder, onerror=_say_unreadable):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _TOOLS and not Path(parent, name, _ENVIRONMENT).exists()
        )
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _say_unreadable(exc: OSError) -> None:
    log.warning("%s: left out: the folder cannot be read: %s", exc.filename, exc.strerror)
