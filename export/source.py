"""Everything an export takes from its source: weights, tokenizer, chat template and the ids that matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.errors import ModelError
from edge_pc.export.gguf_reader import read_gguf
from edge_pc.export.hf_config import CONFIG_FILE
from edge_pc.export.hf_reader import read_huggingface
from edge_pc.export.tokenizer_from_gguf import tokenizer_from_gguf
from edge_pc.export.weights import LlamaWeights
from edge_pc.models.chat_template import MAX_TEMPLATE, TEMPLATE_FILE, read_template
from edge_pc.models.fields import Field, check_fields, read_json
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.gguf_model import check_gguf, tokenizer_fields
from edge_pc.models.spec import MAX_VOCABULARY
from edge_pc.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How models call the token that ends a turn. Files often name only `eos_token`, and the template ends turns with
# another token; an answer would then never end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")

_GGUF_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# A Hugging Face folder's settings of the tokenizer; tokens are texts, or objects that hold one.
_SETTINGS_FILE = "tokenizer_config.json"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKEN = Field(str, high=1000, default=None)
_TEMPLATE = Field(str, high=MAX_TEMPLATE, default=None)
_TOKEN_IDS = Field(list, 0, MAX_VOCABULARY, items=int)


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
    source = _from_huggingface(path) if path.is_dir() else _from_gguf(check_gguf(path))
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
    fields = tokenizer_fields(file)
    tokenizer = tokenizer_from_gguf(file)
    template = fields["chat_template"]
    ids = {name: fields[f"{key}_token_id"] for name, key in _GGUF_TOKENS.items()}
    special = {name: tokenizer.id_to_token(id_) for name, id_ in ids.items() if id_ is not None}
    # Where the file says nothing, llama.cpp adds a BOS for SentencePiece vocabularies and for Llama 3's.
    add_bos = fields["add_bos_token"]
    if add_bos is None:
        add_bos = fields["model"] == "llama" or fields["pre"] == "llama-bpe"
    return TextSide(
        tokenizer,
        template,
        special_tokens={name: token for name, token in special.items() if token is not None},
        bos_id=ids["bos_token"] if add_bos else None,
        eos_ids=_eos_ids(tokenizer, template, (ids["eos_token"], fields["eot_token_id"])),
    )


def _from_gguf(file: GGUFFile) -> Source:
    weights, text = read_gguf(file), text_from_gguf(file)
    return Source(text.tokenizer, text.chat_template, text.special_tokens, text.bos_id, text.eos_ids, weights=weights)


def _from_huggingface(folder: Path) -> Source:
    weights = read_huggingface(folder)
    tokenizer = load_tokenizer(
        folder, hint="save the tokenizer in the fast format, with transformers' AutoTokenizer and save_pretrained"
    )
    settings = _optional_json(folder / _SETTINGS_FILE)
    template = _chat_template(folder, settings)
    special = _special_tokens(folder, settings)
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    named: list[int | None] = [
        id_ for name in ("generation_config.json", CONFIG_FILE) for id_ in _ids_that_end(folder / name)
    ]
    if "eos_token" in special:
        named.append(tokenizer.token_to_id(special["eos_token"]))
    return Source(
        tokenizer,
        template,
        special_tokens=special,
        bos_id=bos_id if bos_id is not None and _wants_bos(folder, tokenizer, settings, bos_id) else None,
        eos_ids=_eos_ids(tokenizer, template, named),
        weights=weights,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The default template: its own file in newer folders, else in the tokenizer's settings."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_template(path)
    given = settings.get("chat_template")
    if isinstance(given, list):  # of objects with a name and a template
        entries = [entry for entry in given if isinstance(entry, dict) and entry.get("name") == "default"]
        given = entries[0].get("template") if entries else None
    [template] = check_fields({"chat_template": given}, {"chat_template": _TEMPLATE}, folder / _SETTINGS_FILE).values()
    return None if template is None else str(template)


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    given = {name: settings.get(name) for name in _TOKEN_NAMES}
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in given.items()}
    tokens = check_fields(texts, dict.fromkeys(_TOKEN_NAMES, _TOKEN), folder / _SETTINGS_FILE)
    return {name: token for name, token in tokens.items() if token is not None}


def _ids_that_end(path: Path) -> list[int]:
    """The token ids that a settings file names as ends of an answer: one, or a list."""
    given = _optional_json(path).get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    checked: list[int] = check_fields({"eos_token_id": ids}, {"eos_token_id": _TOKEN_IDS}, path)["eos_token_id"]
    return checked


def _wants_bos(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], bos_id: int) -> bool:
    """What the settings say; without a word there, what the tokenizer itself puts before a text."""
    given = check_fields(settings, {"add_bos_token": Field(bool, default=None)}, folder / _SETTINGS_FILE)
    if given["add_bos_token"] is not None:
        return bool(given["add_bos_token"])
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _eos_ids(tokenizer: Tokenizer, template: str | None, named: Iterable[int | None]) -> tuple[int, ...]:
    """Ids that the source names, and the token that its template writes at the end of a turn."""
    ids = {id_ for id_ in named if id_ is not None}
    for token in _TURN_ENDS:
        id_ = tokenizer.token_to_id(token)
        if id_ is not None and template is not None and token in template:
            ids.add(id_)
    return tuple(sorted(ids))
