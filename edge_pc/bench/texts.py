"""Text of an exact number of tokens, and prompts of an exact shape made of it.

Time does not depend on what the words are, so they are drawn at random, always the same ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from edge_pc.backends.base import IntArray
from edge_pc.errors import ModelError
from edge_pc.models.tokenizer import Tokenizer

_WORDS = 400

# The seed of a prompt's own text; modules have their number.
OWN_TEXT = -1


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The shape of a prompt.

    Attributes:
        cached: tokens in modules.
        new: tokens of the prompt's own text.
        modules: number of modules that share the cached tokens.
    """

    cached: int
    new: int
    modules: int = 1

    @property
    def tokens(self) -> int:
        return self.cached + self.new

    @property
    def name(self) -> str:
        return f"cached={self.cached}/new={self.new}/modules={self.modules}"

    def sizes(self) -> list[int]:
        """Tokens of each module, as equal as can be."""
        each, rest = divmod(self.cached, self.modules)
        return [each + (index < rest) for index in range(self.modules)]


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and a prompt in PML."""

    schema: str
    prompt: str


class Texts:
    """Makes text of exact lengths for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = _one_token_words(tokenizer)

    def text(self, tokens: int, seed: int) -> str:
        """Text of exactly `tokens` tokens (at least 1), the same for the same seed.

        Raises:
            ModelError: this tokenizer cuts text in a way that does not allow it.
        """
        # A letter first: PML would take white space away, and it is one token in every byte-level vocabulary.
        text = "a" + "".join(random.Random(f"{seed}-0").choices(self._words, k=tokens - 1))
        if len(self._tokenizer.encode(text)) != tokens:
            raise ModelError(f"no text of exactly {tokens} tokens can be made for this tokenizer")
        return text

    def token_ids(self, tokens: int, seed: int) -> IntArray:
        """The tokens of `text`, int32 `[tokens]`."""
        return np.array(self._tokenizer.encode(self.text(tokens, seed)), dtype=np.int32)

    def case(self, shape: Shape) -> Case:
        """A schema with the shape's modules, and a prompt that imports them all and adds its own text.

        Modules depend on their number and sizes only: shapes that differ in `new` share them.
        """
        name = f"bench-{shape.cached}-{shape.modules}"
        sizes = shape.sizes() if shape.cached else []
        # A prompt that imports nothing still needs a schema with a module.
        texts = [self.text(size, seed) for seed, size in enumerate(sizes) if size] or [self.text(2, 0)]
        modules = "".join(f'<module name="m{index}">{text}</module>' for index, text in enumerate(texts))
        imports = "".join(f"<m{index}/>" for index in range(len(texts))) if shape.cached else ""
        own = self.text(shape.new, OWN_TEXT) if shape.new else ""
        return Case(f'<schema name="{name}">{modules}</schema>', f'<prompt schema="{name}">{imports}{own}</prompt>')


def _one_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words with the space before them that are one token each, from the vocabulary's most frequent ones."""
    words: list[str] = []
    for token in range(tokenizer.vocab_size):
        word = tokenizer.decode([token])
        if word[:1] == " " and word[1:].isascii() and word[1:].isalpha() and tokenizer.encode(word) == [token]:
            words.append(word)
            if len(words) == _WORDS:
                break
    if not words:
        raise ModelError("no word of this model's vocabulary is a single token: text of exact length cannot be made")
    return words
