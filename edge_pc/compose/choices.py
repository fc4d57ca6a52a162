"""What a person may choose of how prompts are composed: the values and the defaults, stated once."""

from __future__ import annotations

from typing import Literal, get_args

EncodingRule = Literal["neutral", "guaranteed", "isolated"]
Placeholder = Literal["nothing", "unk", "default"]
Tail = Literal["imported", "packed", "schema"]

ENCODING_RULES: tuple[EncodingRule, ...] = get_args(EncodingRule)
PLACEHOLDERS: tuple[Placeholder, ...] = get_args(Placeholder)
TAILS: tuple[Tail, ...] = get_args(Tail)

DEFAULT_ENCODING: EncodingRule = "neutral"
DEFAULT_PLACEHOLDER: Placeholder = "nothing"

# What tells the model what to do with documents. SmolLM2-135M never says that they do not answer, but answers no
# worse for being told to: of eight facts six, and of 20 questions of NQ with 10 documents two instead of one.
DEFAULT_SYSTEM = "Answer the question using the documents below. If they do not answer it, say that they do not."
