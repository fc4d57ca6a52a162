"""What a GGUF file says of itself: spec, tokenizer and chat template, kept under the home for a quick start.

Reading a vocabulary out of a GGUF file takes a second in Python, so it is done once for each file's content, and kept
as an exported model's folder would hold it.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_pc._version import __version__
from edge_pc.errors import ModelError
from edge_pc.export.gguf_reader import GGUFFile
from edge_pc.export.source import text_from_gguf
from edge_pc.models.chat_template import TEMPLATE_FILE
from edge_pc.models.description import Description
from edge_pc.models.description import describe as describe_folder
from edge_pc.models.spec import ModelSpec, RotaryEncoding
from edge_pc.models.tokenizer import TOKENIZER_FILE
from edge_pc.system.files import make_private_folder, replacing_file, replacing_folder
from edge_pc.system.home import home

# Files up to this size are hashed whenever they are opened (30 ms for 100 MB); larger ones once, and then known again
# by size, inode and time of change.
_ALWAYS_HASHED_BYTES = 256 << 20

_INTERLEAVED = frozenset({"llama", "mistral", "baichuan", "deepseek", "granite", "cohere", "internlm2", "minicpm"})


def describe(path: Path) -> Description:
    """Describe a GGUF file.

    Raises:
        ModelError: it is missing or broken, or something in it is not supported.
    """
    fingerprint = fingerprint_of(path)
    kept = home() / "gguf" / f"{fingerprint.partition(':')[2]}-{__version__}"
    with suppress(ModelError):
        return describe_folder(kept)
    with TemporaryDirectory(prefix="edge-pc-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _write(GGUFFile(path), fingerprint, made)
        # A home that cannot be written only makes the next start slow.
        with suppress(OSError):
            _keep(made, kept)
        return describe_folder(made)


def fingerprint_of(path: Path) -> str:
    """Hash of a file's content.

    Raises:
        ModelError: there is no such file.
    """
    try:
        found = path.stat()
        if found.st_size <= _ALWAYS_HASHED_BYTES:
            return _hash(path)
        return _remembered_hash(path, [found.st_size, found.st_ino, found.st_mtime_ns])
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc


def _remembered_hash(path: Path, identity: list[int]) -> str:
    import xxhash

    note = home() / "gguf" / f"{xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))}.json"
    with suppress(OSError, ValueError):
        known: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        if known.get("identity") == identity:
            return str(known["fingerprint"])
    fingerprint = _hash(path)
    with suppress(OSError):
        make_private_folder(note.parent)
        with replacing_file(note) as file:
            file.write(json.dumps({"identity": identity, "fingerprint": fingerprint}).encode())
    return fingerprint


def _hash(path: Path) -> str:
    import xxhash

    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ModelError(f"{path} is empty, expected a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"


def _write(file: GGUFFile, fingerprint: str, folder: Path) -> None:
    text = text_from_gguf(file)
    text.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
    if text.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(text.chat_template, encoding="utf-8", newline="")
    sizes = _sizes(file)
    ModelSpec(
        **sizes,
        vocab_size=len(file.require("tokenizer.ggml.tokens")),
        quantization=_quantization(file),
        fingerprint=fingerprint,
        bos_id=text.bos_id,
        eos_ids=text.eos_ids,
        special_tokens=text.special_tokens,
    ).save(folder)


def _sizes(file: GGUFFile) -> dict[str, Any]:
    architecture: str = file.require("general.architecture")

    def number(key: str, default: int | None = None) -> Any:
        name = f"{architecture}.{key}"
        value = file.require(name) if default is None else file.get(name, default)
        if isinstance(value, list):
            raise ModelError(f"{file.path}: {name} differs from layer to layer, which is not supported")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // max(heads, 1))
    if number("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different sizes are not supported")
    return {
        "architecture": architecture,
        "layers": number("block_count"),
        "heads": heads,
        "kv_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_size": hidden,
        "max_positions": number("context_length"),
        "rotary": RotaryEncoding(
            base=float(number("rope.freq_base", 10000)),
            dims=number("rope.dimension_count", head_dim),
            interleaved=architecture in _INTERLEAVED,
        ),
    }


def _quantization(file: GGUFFile) -> str:
    """The file's type as llama.cpp names it (`Q4_1`); of most of its tensors, if the file does not say."""
    from gguf import LlamaFileType

    with suppress(ValueError):
        return LlamaFileType(file.get("general.file_type", -1)).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    kinds = [tensor.tensor_type.name for tensor in file.tensors.values()]
    return max(set(kinds), key=kinds.count, default="unknown")


def _keep(made: Path, kept: Path) -> None:
    make_private_folder(kept.parent)
    with replacing_folder(kept) as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
