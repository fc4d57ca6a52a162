"""What a GGUF file says of itself: spec, tokenizer and chat template, kept under the home for a quick start.

Reading a vocabulary out of a GGUF file takes a moment in Python, so it is done once for each file's content, and kept
as an exported model's folder would hold it. A description is only kept of a file that passed all checks.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_pc._version import __version__
from edge_pc.errors import ModelError
from edge_pc.export.source import text_from_gguf
from edge_pc.models.chat_template import TEMPLATE_FILE
from edge_pc.models.description import Description
from edge_pc.models.description import describe as describe_folder
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.gguf_model import check_gguf, model_sizes
from edge_pc.models.hashes import remembered_hashes
from edge_pc.models.spec import ModelSpec, read_spec
from edge_pc.models.tokenizer import TOKENIZER_FILE
from edge_pc.system.files import make_private_folder, replacing_folder
from edge_pc.system.home import home

# Architectures whose attention falls off with the distance (ALiBi) in llama.cpp, though their files do not say so.
_ALIBI = frozenset({"bloom", "refact"})
_ALIBI_AT_LAYERS = ("baichuan", 40)  # only the larger one of the two models of this name


@dataclass(frozen=True, slots=True, eq=False)
class CheckedFile:
    """A GGUF file that libllama can be trusted with.

    Attributes:
        fingerprint: hash of its content.
        file: what was read; None when a description of this content is kept, which is whole.
    """

    fingerprint: str
    file: GGUFFile | None

    def describe(self) -> Description:
        """What it says of itself.

        Raises:
            ModelError: something in it is not supported.
        """
        kept = _kept(self.fingerprint)
        if self.file is None:
            return _described(kept, self.fingerprint)
        with TemporaryDirectory(prefix="edge-pc-") as temporary:
            made = Path(temporary) / "model"
            made.mkdir()
            _write(self.file, made)
            # A home that cannot be written only makes the next start slow.
            with suppress(OSError):
                _keep(made, kept)
            return _described(made, self.fingerprint)


def check(path: Path) -> CheckedFile:
    """Hash a GGUF file, and check its structure unless a file of this content passed before.

    Raises:
        ModelError: it is missing or broken.
    """
    fingerprint = fingerprint_of(path)
    return CheckedFile(fingerprint, None if _is_whole(_kept(fingerprint)) else check_gguf(path))


def describe(path: Path) -> Description:
    """Describe a GGUF file.

    Raises:
        ModelError: it is missing or broken, or something in it is not supported.
    """
    return check(path).describe()


def fingerprint_of(path: Path) -> str:
    """Hash of a file's content.

    Raises:
        ModelError: there is no such file.
    """
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        [fingerprint] = remembered_hashes([path])
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc
    return fingerprint


def _kept(fingerprint: str) -> Path:
    return home() / "gguf" / f"{fingerprint.partition(':')[2]}-{__version__}"


def _is_whole(kept: Path) -> bool:
    """Whether a description is there, and every file in it is as it was written."""
    with suppress(ModelError):
        _, changed = read_spec(kept)
        return not changed
    return False


def _described(folder: Path, fingerprint: str) -> Description:
    found = describe_folder(folder)
    return replace(found, spec=replace(found.spec, fingerprint=fingerprint))


def _write(file: GGUFFile, folder: Path) -> None:
    sizes = model_sizes(file)
    _check_rotary(file, sizes.architecture, sizes.layers)
    text = text_from_gguf(file)
    text.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
    if text.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(text.chat_template, encoding="utf-8", newline="")
    ModelSpec(
        **sizes.sizes(),
        quantization=_quantization(file),
        bos_id=text.bos_id,
        eos_ids=text.eos_ids,
        special_tokens=text.special_tokens,
    ).save(folder)


def _check_rotary(file: GGUFFile, architecture: str, layers: int) -> None:
    """Refuse models whose positions are not encoded by rotation: libllama measures distances by the labels of cells,
    which are changed here so that a prompt may have gaps.

    Raises:
        ModelError: with the reason.
    """
    if (
        file.get(f"{architecture}.attention.max_alibi_bias", 0)
        or architecture in _ALIBI
        or (architecture, layers) == _ALIBI_AT_LAYERS
    ):
        reason = "its attention falls off with the distance (ALiBi), and gaps between modules would change distances"
    elif "position_embd.weight" in file.tensors:
        reason = "it has learned positions instead of rotary ones"
    else:
        return
    raise ModelError(f"{file.path}: this model cannot reuse the states of modules: {reason}", hint="use another model")


def _quantization(file: GGUFFile) -> str:
    """The file's type as llama.cpp names it (`Q4_1`); of most of its tensors, if the file does not say."""
    from gguf import LlamaFileType

    with suppress(ValueError):
        return LlamaFileType(file.get("general.file_type", -1)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    kinds = [tensor.quantization.name for tensor in file.tensors.values()]
    return max(set(kinds), key=kinds.count, default="unknown")


def _keep(made: Path, kept: Path) -> None:
    make_private_folder(kept.parent)
    with replacing_folder(kept) as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
