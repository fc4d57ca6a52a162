"""Text to token ids and back.

Text given by a person or a file is *plain*: whatever it spells, it never becomes a control token. Only text that a
chat template wrote goes through `encode_template`, where control tokens are recognised. Neither adds a BOS.

SentencePiece vocabularies put a space before a text that stands at a boundary: at the very start, or right after
a control token. Texts here are composed by ids, so that space must not come with every text; who composes says where a
boundary is. Byte-level vocabularies know no such thing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_pc.errors import ModelError, OptionError
from edge_pc.system.text import unusable_character

if TYPE_CHECKING:
    import tokenizers

# Texts whose ids are kept, those used last: modules come again in other schemas, as files in other sets of files.
_KEPT_TEXTS = 256

TOKENIZER_FILE = "tokenizer.json"
_SHOWN_CHARACTERS = 40
# The largest vocabularies take 35 MB.
_MAX_BYTES = 256 << 20


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Attributes:
        vocab_size: number of ids, added tokens included.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Without this, "<|im_end|>" in a person's text would end their turn.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._encoded = lru_cache(_KEPT_TEXTS)(self._encode)
        self._boundary_prefix = " " if _take_prefix_space(tokenizer) else ""
        added = tokenizer.get_added_tokens_decoder()
        self._control = {token.content: id_ for id_, token in added.items() if token.special}
        self._control_ids = frozenset(self._control.values()) - {self._unknown_id()}
        # Longest first, so that of two control tokens that start alike the longer one is recognised.
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` from an exported model.

        Raises:
            ModelError: the file is missing, or not a tokenizer.
        """
        return cls(load_tokenizer(folder, hint="export the model again"))

    def encode(self, text: str, *, boundary: bool = False) -> list[int]:
        """Ids of plain text: control tokens in it stay text, and no BOS is added.

        Args:
            text: any text.
            boundary: nothing, or a control token, stands before it.

        Raises:
            OptionError: the text holds a character that no model can be given.
            ModelError: the tokenizer makes a control token of this text anyway.
        """
        if (unusable := unusable_character(text)) is not None:
            message = f"a text cannot be given to a model: its {unusable}; it begins {text[:_SHOWN_CHARACTERS]!r}"
            raise OptionError(message, hint="remove this character")
        return list(self._encoded(self._boundary_prefix + text if boundary and text else text))

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not self._control_ids.isdisjoint(ids):
            id_ = next(id_ for id_ in ids if id_ in self._control_ids)
            raise ModelError(f"plain text became the control token {self._tokenizer.id_to_token(id_)!r}")
        return ids

    def encode_template(self, text: str, *, boundary: bool = False, guard: str = "") -> list[int]:
        """Ids of text that a chat template wrote: control tokens in it are recognised, and no BOS is added.

        Args:
            text: written by a template.
            boundary: nothing, or a control token, stands before it.
            guard: what `break_control_tokens` put into texts of a person; it is taken out again.
        """
        if guard and guard in text and self._control_pattern is None:
            text = text.replace(guard, "")
        if self._control_pattern is None:
            return self.encode(text, boundary=boundary)
        ids: list[int] = []
        # With one group in the pattern, plain text and control tokens take turns.
        for i, part in enumerate(self._control_pattern.split(text)):
            if i % 2:
                ids.append(self._control[part])
            else:
                ids += self.encode(part.replace(guard, "") if guard else part, boundary=boundary or i > 0)
        return ids

    def break_control_tokens(self, text: str, guard: str) -> str:
        """The text of a person, to be put into a template: `guard`, a character that no text has, stands in whatever
        spells a control token, so that `encode_template` does not recognise it."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(lambda found: found[0][0] + guard + found[0][1:], text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; control tokens are skipped, bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it (`<|im_end|>`, `Ġthe`), or None."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def is_control(self, id_: int) -> bool:
        """Whether the id is a control token's."""
        return id_ in self._control_ids

    def as_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it."""
        text: str = self._tokenizer.to_str()
        return text

    def bytes_of(self, id_: int) -> bytes:
        """The bytes that a token adds to a text; a control token's are those of its name."""
        token: str | None = self._tokenizer.id_to_token(id_)
        if token is None:
            return b""
        if id_ in self._control_ids:
            return token.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # how SentencePiece spells a byte
            return bytes([int(token[3:5], 16)])
        try:
            return bytes(_byte_level_alphabet()[character] for character in token)
        except KeyError:
            return token.replace("▁", " ").encode()

    def detokenizer(self) -> Detokenizer:
        """A streaming decoder for one answer."""
        return Detokenizer(self)

    def _unknown_id(self) -> int | None:
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        return None if unknown is None else self.id_of(unknown)


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level vocabularies spell them: what shows stands for itself, the others follow 255."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def load_tokenizer(folder: Path, *, hint: str) -> tokenizers.Tokenizer:
    """The library's tokenizer from `tokenizer.json` in `folder`; `hint` says what to do without one.

    Raises:
        ModelError: the file is missing, or not a tokenizer.
    """
    import tokenizers

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: {TOKENIZER_FILE} is missing", hint=hint)
    if path.stat().st_size > _MAX_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size} bytes, expected at most {_MAX_BYTES}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer that can be read: {exc}", hint=hint) from exc


def _take_prefix_space(tokenizer: tokenizers.Tokenizer) -> bool:
    """Switch off that the library puts a space before every text; whether it did."""
    from tokenizers import normalizers, pre_tokenizers

    normalizer = tokenizer.normalizer
    steps: list[Any] = [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[i] for i in range(len(normalizer))]
    kept = [step for step in steps if not isinstance(step, normalizers.Prepend)]
    if len(kept) < len(steps):
        tokenizer.normalizer = normalizers.Sequence(kept)
        return True
    splitter = tokenizer.pre_tokenizer
    if isinstance(splitter, pre_tokenizers.Metaspace) and splitter.prepend_scheme != "never":
        splitter.prepend_scheme = "never"
        return True
    return False


class Detokenizer:
    """Turns ids that come one by one into text that only ever grows, in whole characters.

    A character whose bytes are spread over several tokens is held back until it is complete. Some decoders look at
    the neighbouring token, so a short window of ids before the new text is decoded along with it.

    `tokenizers.decoders.DecodeStream` would do the same, but raises where the bytes of a SentencePiece vocabulary make
    no character, and a model may write such bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # where the window starts; ids before `_given` are already in the text given out
        self._given = 0

    def push(self, id_: int) -> str:
        """Add a token; the text that is certain now, often empty in the middle of a character."""
        self._ids.append(id_)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._context, self._given = self._given, len(self._ids)
        return text

    def finish(self) -> str:
        """The rest; bytes that never became a character are U+FFFD."""
        text = self._pending()
        self._context = self._given = len(self._ids)
        return text

    def _pending(self) -> str:
        given = self._tokenizer.decode(self._ids[self._context : self._given])
        return self._tokenizer.decode(self._ids[self._context :])[len(given) :]
