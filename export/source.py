"""Everything an export takes from its source: weights, tokenizer, chat template and the ids that matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.models.chat_template import TEMPLATE_FILE
from edge_pc.errors import ModelError
from edge_pc.export.gguf_reader import GGUFFile, read_gguf
from edge_pc.export.hf_reader import read_huggingface, read_json
from edge_pc.export.tokenizer_from_gguf import tokenizer_from_gguf
from edge_pc.export.weights import LlamaWeights
from edge_pc.models.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How models call the token that ends a turn. Files often name only `eos_token`, and the template ends turns with
# another token; an answer would then never end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")

_GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True, eq=False)
class TextSide:
    """What a model file or folder says of text.

    Attributes:
        tokenizer: its tokenizer, which adds no BOS by itself.
        chat_template: Jinja text, or None.
        special_tokens: what chat templates may ask for (`bos_token`, …) → the token's text.
        bos_id: the token that must stand at position 0, or None when the model wants none.
        eos_ids: tokens that end an answer, ascending.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Source(TextSide):
    """All that a model file or folder holds: text, and `weights`, its tensors."""

    weights: LlamaWeights


def read_source(path: Path) -> Source:
    """Read a GGUF file or a Hugging Face folder; the weights are checked now and loaded later.

    Raises:
        ModelError: it is neither, broken, or not supported.
        MissingDependencyError: a package for Hugging Face folders is missing.
    """
    source = _from_huggingface(path) if path.is_dir() else _from_gguf(GGUFFile(path))
    largest = max(source.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= source.weights.config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has ids up to {largest}, but the model only {source.weights.config.vocab_size}"
        )
    if not source.eos_ids:
        raise ModelError(f"{path}: no token that ends an answer is named, so answers would never end")
    return source


def text_from_gguf(file: GGUFFile) -> TextSide:
    """Tokenizer, chat template and ids of a GGUF file, whatever its architecture.

    Raises:
        ModelError: the tokenizer is not supported or broken.
    """
    tokenizer = tokenizer_from_gguf(file)
    template = file.get("tokenizer.chat_template")
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_TOKENS.items()}
    special = {name: tokenizer.id_to_token(id_) for name, id_ in ids.items() if id_ is not None}
    # Where the file says nothing, llama.cpp adds a BOS for SentencePiece vocabularies and for Llama 3's.
    usual = file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre") == "llama-bpe"
    add_bos = file.get("tokenizer.ggml.add_bos_token", usual)
    return TextSide(
        tokenizer,
        template,
        special_tokens={name: token for name, token in special.items() if token is not None},
        bos_id=ids["bos_token"] if add_bos else None,
        eos_ids=_eos_ids(tokenizer, template, (ids["eos_token"], file.get("tokenizer.ggml.eot_token_id"))),
    )


def _from_gguf(file: GGUFFile) -> Source:
    weights, text = read_gguf(file), text_from_gguf(file)
    return Source(text.tokenizer, text.chat_template, text.special_tokens, text.bos_id, text.eos_ids, weights=weights)


def _from_huggingface(folder: Path) -> Source:
    weights = read_huggingface(folder)
    tokenizer = _load_tokenizer(folder)
    settings = _optional_json(folder / "tokenizer_config.json")
    template = _chat_template(folder, settings)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    contents = {name: _token_text(settings.get(name)) for name in names}
    special = {name: token for name, token in contents.items() if token is not None}
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    named = [_optional_json(folder / "generation_config.json").get("eos_token_id")]
    named.append(read_json(folder / "config.json").get("eos_token_id"))
    if "eos_token" in special:
        named.append(tokenizer.token_to_id(special["eos_token"]))
    flat = [id_ for ids in named for id_ in (ids if isinstance(ids, list) else [ids])]
    return Source(
        tokenizer,
        template,
        special_tokens=special,
        bos_id=bos_id if bos_id is not None and _wants_bos(tokenizer, settings, bos_id) else None,
        eos_ids=_eos_ids(tokenizer, template, flat),
        weights=weights,
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(
            f"{folder}: {TOKENIZER_FILE} is missing",
            hint="save the tokenizer in the fast format, with transformers' AutoTokenizer and save_pretrained",
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise ModelError(f"{path} is no tokenizer that can be read: {exc}", hint="download it again") from exc


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The default template: a file of its own in newer folders, else in the tokenizer's settings."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
    return template


def _token_text(entry: Any) -> str | None:
    """A token in the tokenizer's settings: its text, or an object that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _wants_bos(tokenizer: Tokenizer, settings: dict[str, Any], bos_id: int) -> bool:
    """What the settings say; without a word there, what the tokenizer itself puts in front of a text."""
    if "add_bos_token" in settings:
        return bool(settings["add_bos_token"])
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _eos_ids(tokenizer: Tokenizer, template: str | None, named: Iterable[Any]) -> tuple[int, ...]:
    """Ids that the source names, and the token that its template writes at the end of a turn."""
    ids = {id_ for id_ in named if isinstance(id_, int)}
    for token in _TURN_ENDS:
        id_ = tokenizer.token_to_id(token)
        if id_ is not None and template is not None and token in template:
            ids.add(id_)
    return tuple(sorted(ids))
