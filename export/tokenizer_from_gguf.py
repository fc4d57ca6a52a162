"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file, with the same ids as llama.cpp's tokenizer.

Byte-level BPE (`tokenizer.ggml.model = gpt2`) differs between models in how text is cut before merging, which the file
only names (`tokenizer.ggml.pre`). A name that is not known is refused: a near miss would give fluent wrong ids.
SentencePiece vocabularies (`llama`) have a separate file.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.errors import ModelError
from edge_pc.export.sentencepiece import sentencepiece_tokenizer
from edge_pc.models.fields import shown
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.gguf_model import tokenizer_fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED = 3, 4

_HINT = "export the model's Hugging Face folder instead: its tokenizer.json is used as it is"

# How text is cut before merging, as the models' own tokenizer files have it; None: GPT-2's rule, built into ByteLevel.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_PATTERNS = {
    "gpt-2": None,
    "smollm": None,  # after cutting out every digit
    "llama-bpe": _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),
    "qwen2": _QWEN2,
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file. It adds no BOS by itself.

    Control tokens become special added tokens, user-defined ones other added tokens.

    Raises:
        ModelError: a kind of tokenizer, or a rule for cutting text, that is not supported; a broken vocabulary.
    """
    from tokenizers import AddedToken

    fields = tokenizer_fields(file)
    tokens: list[str] = fields["tokens"]
    kinds: list[int] = fields["token_type"] or [1] * len(tokens)
    vocab = _vocab(file.path, tokens, kinds)
    kind = fields["model"]
    if kind == "gpt2":
        tokenizer = _byte_level_tokenizer(file.path, fields, vocab)
    elif kind == "llama":
        tokenizer = sentencepiece_tokenizer(file.path, fields, vocab, kinds)
    else:
        raise ModelError(
            f"{file.path}: the tokenizer {shown(kind)} is not supported, only 'gpt2' and 'llama'", hint=_HINT
        )
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level_tokenizer(path: Path, fields: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models

    pre = fields["pre"] or "none given"
    if pre not in _SPLIT_PATTERNS:
        known = ", ".join(sorted(_SPLIT_PATTERNS))
        raise ModelError(f"{path}: the pre-tokenizer {shown(pre)} is not supported, only {known}", hint=_HINT)
    merges = [_merge(path, text) for text in fields["merges"] or ()]
    if not merges:
        raise ModelError(f"{path}: tokenizer.ggml.merges is missing or empty")
    try:
        # Llama 3 takes a piece of text that is a token as it is, without asking whether merges lead to it.
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as exc:  # the library raises plain Exception
        raise ModelError(f"{path}: the vocabulary and its merges do not fit together: {exc}") from exc
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(path: Path, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not (left and right) or " " in right:
        raise ModelError(f"{path}: tokenizer.ggml.merges holds {shown(text)}, expected two pieces with a space between")
    return left, right


def _vocab(path: Path, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    if len(kinds) != len(tokens):
        raise ModelError(f"{path}: {len(kinds)} token types for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        [(token, count)] = Counter(tokens).most_common(1)
        raise ModelError(f"{path}: token {shown(token)} is in the vocabulary {count} times")
    return vocab


def _pre_tokenizer(pre: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_SPLIT_PATTERNS[pre] is None)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = _SPLIT_PATTERNS[pre]
    if pattern is None:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])
