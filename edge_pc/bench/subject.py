"""One backend under test: an engine, its full prefill at the best settings, and the ways that a prompt is timed in.

The ways follow the engine's own path step by step (`Engine.stream` does the same with an answer behind it), so that
each stage can be timed and the answer cannot end early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edge_pc.backends.base import Context, DecodeStep, IntArray, Logits, Plan
from edge_pc.bench import pagecache
from edge_pc.bench.texts import Case
from edge_pc.bench.timing import Sample, Way
from edge_pc.compose.laid_out import LaidOut
from edge_pc.engine import Engine
from edge_pc.errors import CacheMissError
from edge_pc.runtime.compare import in_place_plan
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.prefill import Serving, prefill_cached, prefill_full
from edge_pc.runtime.stats import PrefillStats
from edge_pc.store import Miss, StateStore

# Tokens decoded behind the first one, for the time per later token.
LATER_TOKENS = 8

FullPrefill = Callable[[IntArray], Logits]


class Subject(Protocol):
    """What `bench ttft` measures; an engine, or in tests something that only says how long it took."""

    def prepare(self, case: Case) -> Prepared:
        """Load the schema and encode it."""
        ...

    def ways(self, case: Case) -> AbstractContextManager[dict[str, Way]]:
        """The ways to serve the prompt, for as long as the block lasts: `cached`, `in_place`, `full`, …"""
        ...

    def cold(self, case: Case, files: tuple[Path, ...]) -> Sample:
        """A cached prefill with the files' pages out of memory; its stage `resident` is the share that was not."""
        ...

    def remove_states(self) -> None:
        """Delete all states of the bench's store."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """An encoded schema.

    Attributes:
        tokens: computed for it; 0 when it was stored already.
        encode_ms: it took, writing included.
        files: of the states that the case's prompt uses.
        token_ids: of the whole prompt in position order, int32 `[tokens]`.
        cached_tokens, computed_tokens: of the prompt, as the cached way serves it.
    """

    tokens: int
    encode_ms: float
    files: tuple[Path, ...]
    token_ids: IntArray
    cached_tokens: int
    computed_tokens: int


class EngineSubject:
    """An engine under test.

    Args:
        engine: opened; its store is the bench's own.
        full: full prefill at the best settings found; None: the engine's own is the best.
    """

    def __init__(self, engine: Engine, full: FullPrefill | None = None) -> None:
        self.engine = engine
        self._full = full

    def prepare(self, case: Case) -> Prepared:
        """Load the schema and encode what is not stored yet."""
        report = self.engine.encode(self.engine.load_schema(case.schema))
        encoder, prompt = self.engine.lay_out(case.prompt)
        found = [encoder.lookup(encoding) for encoding in prompt.encodings]
        states = [result for result in found if not isinstance(result, Miss)]
        plan = prompt.cached_plan(states, exact=False)
        return Prepared(
            tokens=report.tokens,
            encode_ms=report.seconds * 1e3,
            files=tuple(result.path for result in states if result.path is not None),
            token_ids=prompt.in_position_order(),
            cached_tokens=plan.cached_tokens,
            computed_tokens=len(plan.token_ids),
        )

    @contextmanager
    def ways(self, case: Case) -> Iterator[dict[str, Way]]:
        """The ways to serve a prepared prompt.

        `cached` comes after something else was in the context, so that states are really placed; `again` right after
        the same prompt; `in_place` is the limit, the same computation over cells that are there; `full` reuses nothing.
        """
        plan = self._in_place_plan(case)
        ways: dict[str, Way] = {
            "cached": lambda: self._after_another(lambda: self._cached(case)),
            "again": lambda: self._twice(lambda: self._cached(case, later_tokens=0)),
            "in_place": lambda: self._in_place(case, plan),
            "full": lambda: self._full_prefill(case),
        }
        if not plan.spans:
            del ways["again"], ways["in_place"]
        yield ways

    def cold(self, case: Case, files: tuple[Path, ...]) -> Sample:
        """A cached prefill right after the system was made to forget the files' pages.

        The sample has one number more, `resident`: the share of pages that were in memory all the same.
        """
        self.release(case)
        pagecache.drop(files)
        resident = pagecache.resident_share(files)
        return {**self._cached(case), "resident": 1.0 if resident is None else resident}

    def release(self, case: Case) -> None:
        """Let go of all mappings of stored states: close the store and empty the context."""
        self._displace()
        self.engine.store.close()
        self.engine.store = StateStore(self.engine.store.path)
        self.engine.load_schema(case.schema)

    def _cached(self, case: Case, later_tokens: int = LATER_TOKENS) -> Sample:
        submitted = time.perf_counter()
        encoder, prompt = self.engine.lay_out(case.prompt)
        with closing(self.engine.backend.new_context(prompt.tokens + LATER_TOKENS + 1)) as context:
            started = prefill_cached(context, prompt, encoder, submitted)
            token = int(np.argmax(started.logits))
            ttft = time.perf_counter() - submitted
            later = self._later_ms(context, token, started.position, later_tokens)
        missed = [module for module in started.stats.modules if not module.hit]
        if missed:
            raise CacheMissError(f"states that were just stored are not found: {missed[0].path}: {missed[0].reason}")
        return _stages(ttft, started.stats) | ({"later_token": later} if later_tokens else {})

    def _full_prefill(self, case: Case) -> Sample:
        submitted = time.perf_counter()
        _, prompt = self.engine.lay_out(case.prompt)
        if self._full is not None:
            parsed = time.perf_counter()
            int(np.argmax(self._full(prompt.in_position_order())))
            done = time.perf_counter()
            parse_ms, forward_ms = (parsed - submitted) * 1e3, (done - parsed) * 1e3
            return {"ttft": (done - submitted) * 1e3, "parse": parse_ms, "assembly": 0.0, "forward": forward_ms}
        with closing(self.engine.backend.new_context(prompt.tokens + 1)) as context:
            started = prefill_full(context, prompt, submitted)
            int(np.argmax(started.logits))
            ttft = time.perf_counter() - submitted
        return _stages(ttft, started.stats)

    def _in_place(self, case: Case, plan: Plan) -> Sample:
        with closing(self.engine.backend.new_context(plan.cached_tokens + len(plan.token_ids))) as context:
            context.prefill(plan)
            submitted = time.perf_counter()
            prefill = context.prefill(plan)
            int(np.argmax(prefill.logits))
            ttft = (time.perf_counter() - submitted) * 1e3
        return {"ttft": ttft, "assembly": prefill.assembly_ms, "forward": prefill.forward_ms}

    def _in_place_plan(self, case: Case) -> Plan:
        encoder, prompt = self.engine.lay_out(case.prompt)
        states = [encoder.obtain(encoding).states for encoding in prompt.encodings]
        return in_place_plan(prompt.cached_plan(states, exact=False))

    def _later_ms(self, context: Context, token: int, position: int, count: int) -> float:
        """Milliseconds per token of `count` tokens behind the first; 0 for none."""
        began = time.perf_counter()
        for index in range(count):
            token = self._next_token(context, token, position + index)
        return (time.perf_counter() - began) * 1e3 / count if count else 0.0

    def _next_token(self, context: Context, token: int, position: int) -> int:
        (logits,) = self.engine.backend.decode([DecodeStep(context, token, position)])
        return int(np.argmax(logits))

    def _after_another(self, way: Way) -> Sample:
        self._displace()
        return way()

    def _twice(self, way: Way) -> Sample:
        way()
        return way()

    def _displace(self) -> None:
        """Run a few tokens over nothing, so that no module is in the context any more."""
        few = np.arange(4, dtype=np.int32)
        with closing(self.engine.backend.new_context(len(few))) as context:
            context.prefill(Plan((), few, few))

    def hold(self, case: Case) -> Context:
        """Serve the prompt up to its second token, and keep its context open; the caller closes it."""
        encoder, prompt = self.engine.lay_out(case.prompt)
        context = self.engine.backend.new_context(prompt.tokens + 1)
        started = prefill_cached(context, prompt, encoder, time.perf_counter(), Serving(strict=True))
        self._next_token(context, int(np.argmax(started.logits)), started.position)
        return context

    def raw_prefill(self, case: Case) -> float:
        """Milliseconds to compute all tokens of a prompt, nothing parsed, nothing stored."""
        _, prompt = self.engine.lay_out(case.prompt)
        plan = prompt.full_plan()
        with closing(self.engine.backend.new_context(prompt.tokens)) as context:
            return context.prefill(plan).forward_ms

    def lay_out(self, case: Case) -> tuple[Encoder, LaidOut]:
        """The case's prompt with its tokens, and what gets its states."""
        return self.engine.lay_out(case.prompt)

    def remove_states(self) -> None:
        """Delete all states of the bench's store."""
        store = self.engine.store
        store.remove([entry.key for entry in store.entries()])


def _stages(ttft_s: float, stats: PrefillStats) -> Sample:
    return {
        "ttft": ttft_s * 1e3,
        "parse": stats.parse_ms,
        "assembly": stats.assembly_ms,
        "forward": stats.forward_ms,
    }
