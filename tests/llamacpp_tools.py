"""What the tests of the llama.cpp backend share: one long text, plans over it, and ways to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc.backends.base import DecodeStep, KVStates, Plan, Span
from edge_pc.backends.llamacpp.backend import LlamaCppBackend
from edge_pc.backends.llamacpp.blob import BlobFormat
from edge_pc.backends.llamacpp.context import LlamaCppContext
from edge_pc.backends.llamacpp.entry import LlamaCppOptions
from edge_pc.backends.llamacpp.native import NativeContext

RNG = np.random.default_rng(0)
TEXT = RNG.integers(10, 250, 1000).astype(np.int32)


@contextmanager
def opened(path: Path, n_ctx: int = 1024) -> Iterator[LlamaCppBackend]:
    """An open model whose notes agree with libllama at the end."""
    # One thread: several wait for one another at every operation, which takes long where other work has the CPUs.
    with closing(LlamaCppBackend(path, LlamaCppOptions(threads=1), n_ctx)) as backend:
        yield backend
        backend.check()


def blobs_of(backend: LlamaCppBackend) -> BlobFormat:
    """The format of a model's states."""
    return BlobFormat(backend.spec.layers, backend.spec.kv_heads * backend.spec.head_dim)


def plan_of(spans: Sequence[Span], start: int, stop: int, *, exact: bool = False) -> Plan:
    """Spans, and the text's tokens `[start, stop)` at those positions."""
    return Plan(tuple(spans), TEXT[start:stop], np.arange(start, stop, dtype=np.int32), exact)


def plan_at(spans: Sequence[Span], positions: Sequence[int], *, exact: bool = False) -> Plan:
    """Spans, and the text's tokens at `positions`."""
    run = np.array(positions, dtype=np.int32)
    return Plan(tuple(spans), TEXT[run], run, exact)


def encoded(backend: LlamaCppBackend, start: int, stop: int, spans: Sequence[Span] = ()) -> KVStates:
    """States of the text's tokens `[start, stop)`."""
    plan = plan_of(spans, start, stop, exact=True)
    with closing(backend.new_context(stop + 2)) as context:
        array = context.encode(plan, np.arange(stop - start, dtype=np.int32))
    return KVStates(f"{start}-{stop}", array, plan.token_ids, plan.position_ids)


def whole(states: KVStates) -> Span:
    return Span(states, 0, len(states.position_ids))


def served(backend: LlamaCppBackend, plan: Plan) -> Any:
    """First-token logits."""
    with closing(backend.new_context(plan.cached_tokens + len(plan.token_ids))) as context:
        return context.prefill(plan).logits


def answered(backend: LlamaCppBackend, plan: Plan, tokens: int = 3) -> list[Any]:
    """Logits of the first tokens of an answer."""
    with closing(backend.new_context(plan.cached_tokens + len(plan.token_ids) + tokens)) as context:
        first = context.prefill(plan).logits
        return [first, *gone_on(backend, context, int(plan.position_ids[-1]) + 1, tokens - 1)]


def gone_on(backend: LlamaCppBackend, context: LlamaCppContext, start: int, tokens: int) -> list[Any]:
    """Logits of the next tokens, which are the text's from position `start` on."""
    positions = range(start, start + tokens)
    return [backend.decode([DecodeStep(context, int(TEXT[p]), p)])[0] for p in positions]


def equal(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether all logits are equal bit for bit."""
    return len(found) == len(wanted) and all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True))


def used(backend: LlamaCppBackend) -> int:
    """Cells that open prompts hold; what is noted of the cache is checked."""
    backend.check()
    return backend.cache_use().held


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Filled with the arguments of each later call of a method of `NativeContext`."""
    original, calls = getattr(NativeContext, name), []

    def recording(self: NativeContext, *arguments: Any) -> Any:
        calls.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(NativeContext, name, recording)
    return calls
