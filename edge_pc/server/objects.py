"""Answers as OpenAI's clients know them: whole, or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.stats import Result, Stats, TokenLogprobs
from edge_pc.server.tool_calls import Call

_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one answer have in common."""

    model: str
    fingerprint: str
    kind: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, model: str, fingerprint: str, kind: str) -> Envelope:
        """`kind` is `chat.completion` or `text_completion`."""
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        return cls(model, fingerprint, kind, f"{prefix}-{uuid.uuid4().hex}")

    def whole(self, choices: Sequence[dict[str, Any]], stats: Sequence[Stats], speed: float | None) -> dict[str, Any]:
        """An answer in one piece."""
        return {**self._head(self.kind, choices), "usage": usage(stats), "edge_pc": report(stats, speed)}

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A part of an answer."""
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        return {**self._head(kind, choices), **more}

    def _head(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
        }


def usage(stats: Sequence[Stats]) -> dict[str, Any]:
    """Tokens of all prompts and answers."""
    prompt, answer = sum(each.prompt_tokens for each in stats), sum(each.new_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats)},
    }


def report(stats: Sequence[Stats], tokens_per_s: float | None) -> dict[str, Any]:
    """What the (first) prompt took, and what a full prefill would take, estimated from the speed measured so far."""
    first = stats[0]
    estimate = None if tokens_per_s is None else round(first.prompt_tokens / tokens_per_s * 1e3, 1)
    return {
        "ttft_ms": round(first.ttft_ms, 2),
        "full_prefill_estimate_ms": estimate,
        "computed_tokens": first.computed_tokens,
        "decode_tokens_per_s": round(first.decode_tokens_per_s, 1),
        "modules": [
            {"path": module.path, "tokens": module.tokens, "hit": module.hit, "exact": module.exact}
            | ({"reason": module.reason} if module.reason else {})
            for module in first.modules
        ],
    }


def finish_reason(result: Result, calls: Sequence[Call] = ()) -> str:
    return "tool_calls" if calls else _FINISH[result.stop]


def tool_calls(calls: Sequence[Call], *, streamed: bool) -> list[dict[str, Any]]:
    """Calls as a message has them, or as a chunk does."""
    return [
        ({"index": index} if streamed else {})
        | {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def chat_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities as chats have them."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**named(each.token_id, each.logprob), "top_logprobs": [named(*one) for one in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """Log-probabilities as completions have them; `offset` is of the first token in the text."""
    tokens = [tokenizer.bytes_of(each.token_id).decode("utf-8", "replace") for each in logprobs]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    tops = [{tokenizer.bytes_of(token).decode("utf-8", "replace"): p for token, p in each.top} for each in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
