"""The ways in which an engine can serve one prompt, each timed stage by stage.

They follow the engine's own path step by step (`Engine.stream` does the same, with an answer after it), so that the
answer cannot end early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edge_pc.backends.base import Context, DecodeStep, IntArray, KVStates, Logits, Plan
from edge_pc.bench import pagecache
from edge_pc.bench.texts import Case
from edge_pc.bench.timing import Sample, Way
from edge_pc.compose.laid_out import LaidOut
from edge_pc.engine import Engine
from edge_pc.errors import CacheMissError
from edge_pc.runtime.compare import in_place_plan
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.prefill import prefill_cached, prefill_full
from edge_pc.runtime.serving import Serving
from edge_pc.runtime.stats import PrefillStats
from edge_pc.store import StateStore

# Tokens decoded after the first one, for the time per later token.
LATER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """An encoded schema, and the case's prompt.

    Attributes:
        encode_ms: computing and writing took; None: all was already stored.
        files: of the states that the prompt uses.
        token_ids: of the whole prompt in position order, int32 `[tokens]`.
        cached_tokens, computed_tokens: of the prompt, as the cached way serves it.
    """

    encode_ms: float | None
    files: tuple[Path, ...]
    token_ids: IntArray
    cached_tokens: int
    computed_tokens: int


class EngineWays:
    """An engine, and its full prefill at the best settings.

    Args:
        engine: opened; its store is the bench's own.
        full: token ids, int32 `[n]` → logits, at the best settings found; None: the engine's own are the best.
    """

    def __init__(self, engine: Engine, full: Callable[[IntArray], Logits] | None = None) -> None:
        self.engine = engine
        self._full = full

    def prepare(self, case: Case) -> Prepared:
        """Load the schema, encode what is not stored yet, and lay the prompt out."""
        report = self.engine.encode(case.schema)
        prompt, states = self.states(case)
        plan = prompt.cached_plan(states, exact=False)
        return Prepared(
            encode_ms=report.seconds * 1e3 if report.tokens else None,
            files=tuple(each.path for each in states if each.path is not None),
            token_ids=prompt.in_position_order(),
            cached_tokens=plan.cached_tokens,
            computed_tokens=len(plan.token_ids),
        )

    def states(self, case: Case) -> tuple[LaidOut, list[KVStates]]:
        """The prompt of a prepared case, and the stored states that it uses."""
        prompt = self.engine.lay_out(case.prompt)
        return prompt, [obtained.states for obtained in self.engine.encoder.obtain(prompt.encodings)]

    def ways(self, case: Case) -> dict[str, Way]:
        """The ways to serve the prompt of a prepared case.

        `cached` comes after something else was in the context, so that states are really placed; `again` right after
        the same prompt; `in_place` is the limit, the same computation over cells that are there; `full` reuses nothing.
        """
        prompt, states = self.states(case)
        plan = in_place_plan(prompt.cached_plan(states, exact=False))
        reuse: dict[str, Way] = {"cached": lambda: self._cached_after(self._displace, case)}
        if plan.spans:
            same = partial(self._cached, case, later_tokens=0)
            reuse |= {"again": lambda: self._cached_after(same, case, 0), "in_place": lambda: self._in_place(plan)}
        return {**reuse, "full": lambda: self._full_prefill(case)}

    def cold(self, case: Case, files: tuple[Path, ...]) -> tuple[Sample, float]:
        """Reuse right after the system was made to forget the files' pages, and the share of them that it kept."""
        self.release()
        pagecache.drop(files)
        resident = pagecache.resident_share(files)
        return self._cached(case), resident

    def release(self) -> None:
        """Let go of all mappings of stored states: empty the context, and open the store again."""
        self._displace()
        engine = self.engine
        engine.store.close()
        engine.store = StateStore(engine.store.path)
        engine.encoder = Encoder(engine.backend, engine.store, "bench")

    def hold(self, case: Case) -> Context:
        """Serve the prompt up to its second token, and keep its context open; the caller closes it."""
        prompt = self.engine.lay_out(case.prompt)
        context: Context = self.engine.backend.new_context(prompt.tokens + 1)
        started = prefill_cached(
            context, prompt, self.engine.encoder, time.perf_counter(), Serving(fidelity="fast", strict=True)
        )
        self._next_token(context, int(np.argmax(started.logits)), started.position)
        return context

    def raw_prefill_ms(self, case: Case) -> float:
        """Computing all tokens of a prompt takes this long, nothing parsed, nothing stored."""
        prompt = self.engine.lay_out(case.prompt)
        with closing(self.engine.backend.new_context(prompt.tokens)) as context:
            forward_ms: float = context.prefill(prompt.full_plan()).forward_ms
        return forward_ms

    def remove_states(self) -> None:
        """Delete all states of the bench's store."""
        store = self.engine.store
        store.remove([entry.key for entry in store.entries()])

    def _cached(self, case: Case, later_tokens: int = LATER_TOKENS) -> Sample:
        submitted = time.perf_counter()
        prompt = self.engine.lay_out(case.prompt)
        with closing(self.engine.backend.new_context(prompt.tokens + LATER_TOKENS + 1)) as context:
            started = prefill_cached(context, prompt, self.engine.encoder, submitted, Serving(fidelity="fast"))
            token = int(np.argmax(started.logits))
            ttft = time.perf_counter() - submitted
            later = self._later_ms(context, token, started.position, later_tokens)
        missed = [module for module in started.stats.modules if not module.hit]
        if missed:
            raise CacheMissError(f"states that were just stored are not found: {missed[0].path}: {missed[0].reason}")
        return _stages(ttft, started.stats) | ({"later_token": later} if later_tokens else {})

    def _full_prefill(self, case: Case) -> Sample:
        submitted = time.perf_counter()
        prompt = self.engine.lay_out(case.prompt)
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

    def _in_place(self, plan: Plan) -> Sample:
        with closing(self.engine.backend.new_context(plan.cached_tokens + len(plan.token_ids))) as context:
            context.prefill(plan)
            submitted = time.perf_counter()
            prefill = context.prefill(plan)
            int(np.argmax(prefill.logits))
            ttft = (time.perf_counter() - submitted) * 1e3
        return {"ttft": ttft, "assembly": prefill.assembly_ms, "forward": prefill.forward_ms}

    def _cached_after(self, before: Callable[[], object], case: Case, later_tokens: int = LATER_TOKENS) -> Sample:
        before()
        return self._cached(case, later_tokens)

    def _displace(self) -> None:
        """Run a few tokens over nothing, so that no module is in the context any more."""
        few = np.arange(4, dtype=np.int32)
        with closing(self.engine.backend.new_context(len(few))) as context:
            context.prefill(Plan((), few, few))

    def _later_ms(self, context: Context, token: int, position: int, count: int) -> float:
        """Milliseconds per token of `count` tokens after the first; 0 for none."""
        began = time.perf_counter()
        for index in range(count):
            token = self._next_token(context, token, position + index)
        return (time.perf_counter() - began) * 1e3 / count if count else 0.0

    def _next_token(self, context: Context, token: int, position: int) -> int:
        (logits,) = self.engine.backend.decode([DecodeStep(context, token, position)])
        return int(np.argmax(logits))


def _stages(ttft_s: float, stats: PrefillStats) -> Sample:
    stages = {"parse": stats.parse_ms, "assembly": stats.assembly_ms, "forward": stats.forward_ms}
    return {"ttft": ttft_s * 1e3, **stages}
