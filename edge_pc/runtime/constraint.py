"""Holds answers to their grammars: logits are masked, token by token, so that nothing else can be written.

llguidance (extra `serve`) reads grammars and computes masks; it is loaded with the first grammar.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_pc.backends.base import Logits
from edge_pc.errors import MissingDependencyError, OptionError
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.sampling import Grammar

if TYPE_CHECKING:
    import llguidance

# A small model that may write white space anywhere in JSON can go on with it for ever.
_JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Starts grammars for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._model_tokenizer = tokenizer
        self._spec = spec

    def start(self, grammar: Grammar) -> Constraint:
        """What masks the logits of one answer.

        Raises:
            OptionError: the grammar cannot be used.
            MissingDependencyError: llguidance is not installed.
        """
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        try:
            if grammar.kind == "json":
                compiled = LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_OPTIONS)  # type: ignore[arg-type]
            elif grammar.kind == "regex":
                compiled = LLMatcher.grammar_from_regex(grammar.source)
            else:
                compiled = LLMatcher.grammar_from_lark(grammar.source)
        except ValueError as exc:
            raise _unusable(grammar, str(exc)) from exc
        matcher = LLMatcher(tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise _unusable(grammar, matcher.get_error())
        return Constraint(matcher, self._spec.vocab_size, grammar)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as exc:
            raise MissingDependencyError(
                "answers of a given form need llguidance", hint='pip install "edge-prompt-cache[serve]"'
            ) from exc
        return LLTokenizer(
            self._model_tokenizer.as_json(), n_vocab=self._spec.vocab_size, eos_token=list(self._spec.eos_ids)
        )


class Constraint:
    """The grammar of one answer, as far as it has been written.

    Attributes:
        complete: the answer is whole, and nothing may follow.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, grammar: Grammar) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._grammar = grammar
        self.complete = False

    def mask(self, logits: Logits) -> Logits:
        """The logits float32 `[vocab]`, minus infinity for tokens that may not come next.

        Raises:
            OptionError: the grammar became too complex on the way.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        masked: Logits = np.where(allowed, logits, np.float32(-np.inf))
        return masked

    def take(self, token: int) -> None:
        """Go on behind the token that was chosen."""
        self._matcher.consume_token(token)
        self._check()
        self.complete = self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _unusable(self._grammar, self._matcher.get_error())


def _unusable(grammar: Grammar, why: str) -> OptionError:
    kinds = {"json": "the JSON Schema", "regex": "the regular expression", "lark": "the grammar"}
    return OptionError(f"{kinds[grammar.kind]} cannot be used: {why.strip()}")
