"""What a person may choose of how prompts are composed: the values, stated once. The first of each is the default."""

from __future__ import annotations

from typing import Literal, get_args

EncodingRule = Literal["guaranteed", "isolated"]
Placeholder = Literal["nothing", "unk", "default"]
Tail = Literal["imported", "schema"]

ENCODING_RULES: tuple[EncodingRule, ...] = get_args(EncodingRule)
PLACEHOLDERS: tuple[Placeholder, ...] = get_args(Placeholder)
TAILS: tuple[Tail, ...] = get_args(Tail)
