"""SentencePiece vocabularies in GGUF files (`tokenizer.ggml.model = llama`) as a `tokenizers.Tokenizer`.

SentencePiece joins, again and again, the two neighbours whose joined piece has the best score, the leftmost ones on a
tie. The library joins by a list of pairs in order of rank instead. The two are the same when the list is ordered by
score, and, among pieces that tie, so that the leftmost join keeps growing: longer pieces first, longer left halves
first. That holds for ties between runs of one character (as SentencePiece scores runs of spaces); others are refused.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.errors import ModelError
from edge_pc.models.fields import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
NORMAL = 1  # in `tokenizer.ggml.token_type`


def sentencepiece_tokenizer(path: Path, fields: dict[str, Any], vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    """The tokenizer without its added tokens.

    Args:
        path: the GGUF file, for errors.
        fields: what it says of its tokenizer.
        vocab: token → id, in the order of ids.
        kinds: of each token.

    Raises:
        ModelError: the vocabulary has no byte tokens, or scores that the library cannot express.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if missing:
        raise ModelError(f"{path}: the vocabulary lacks {len(missing)} byte tokens, such as <0x{missing[0]:02X}>")
    scores: list[float] = fields["scores"] or []
    if len(scores) != len(vocab):
        raise ModelError(f"{path}: {len(scores)} scores for {len(vocab)} tokens")
    pieces = {token: score for (token, id_), score in zip(vocab.items(), scores, strict=True) if kinds[id_] == NORMAL}
    _check_expressible(path, pieces)
    tokenizer = Tokenizer(models.BPE(vocab, _merges(pieces), byte_fallback=True))
    prefix = fields["add_space_prefix"]
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    ranked = [
        (-score, -len(piece), -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _check_expressible(path: Path, pieces: dict[str, float]) -> None:
    characters = {character for piece in pieces for character in piece}
    if not characters <= pieces.keys():
        lacking = sorted(characters - pieces.keys())[0]
        raise ModelError(f"{path}: the character {lacking!r} is part of tokens but no token itself")
    ties = defaultdict(list)
    for piece, score in pieces.items():
        if len(piece) > 1:
            ties[score].append(piece)
    for score, tied in ties.items():
        if len(tied) > 1 and len(set("".join(tied))) > 1:
            raise ModelError(
                f"{path}: the tokens {shown(tied[0])} and {shown(tied[1])} have the same score {score}, which "
                "cannot be expressed in tokenizer.json",
                hint="export the model's Hugging Face folder instead: its tokenizer.json is used as it is",
            )
