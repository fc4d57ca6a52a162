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
