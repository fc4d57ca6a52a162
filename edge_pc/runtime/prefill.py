"""Prefills a prompt, with stored states or in full, and counts what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from edge_pc.backends.base import Context, Plan
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import ROOT
from edge_pc.errors import CacheMissError, StatesError
from edge_pc.progress import Progress
from edge_pc.runtime.encoder import Encoder, Looked, Obtained
from edge_pc.runtime.live_cells import ONLY_CELLS, LiveCells, Tokens
from edge_pc.runtime.recompute import COMPUTED_ANYWAY, with_recomputed
from edge_pc.runtime.serving import COMPUTED, Fidelity, Serving
from edge_pc.runtime.stats import ModuleStats, PrefillStats, Started
from edge_pc.runtime.watch import Watch
from edge_pc.store import Miss

log = logging.getLogger("edge_pc")

_UNCACHED = 'cache="false" in the schema'


def prefill(
    context: Context,
    prompt: LaidOut,
    encoder: Encoder,
    submitted: float,
    serving: Serving,
    watch: Watch,
) -> Started:
    """Bring a prompt to its first token's logits, as `serving` says.

    Args:
        submitted: `time.perf_counter()` when the prompt was submitted.
        watch: told while what is not stored is computed; may end the work.

    Raises:
        CacheMissError: `serving` is strict, and something is not stored.
        Cancelled: `watch` ended it.
    """
    if serving.use_cache:
        return prefill_cached(context, prompt, encoder, submitted, serving, watch)
    return prefill_full(context, prompt, submitted, watch)


def prefill_cached(
    context: Context,
    prompt: LaidOut,
    encoder: Encoder,
    submitted: float,
    serving: Serving = Serving(),
    watch: Watch | None = None,
) -> Started:
    """Inject what is stored, encode what is not, compute the rest.

    Stored states that turn out to be unusable only now cost a warning, and the prompt is computed.

    See `prefill` for arguments and errors.
    """
    parsed = time.perf_counter()
    watch = watch or Watch()
    found = found_for(prompt, encoder, serving.fidelity)
    if serving.strict:
        _refuse_misses(found)
    served = encoder.serve(found, watch.report)
    obtained = [states for _, states in served]
    planned = time.perf_counter()
    try:
        plan = served_plan(context, prompt, served, serving.fidelity)
        chosen = time.perf_counter()
        prefilled = context.prefill(plan, watch.computed)
    except StatesError as exc:
        if serving.strict:
            raise CacheMissError(f"strict mode: {exc}") from exc
        log.warning("%s; the prompt is computed instead", exc.message)
        obtained = [replace(o, miss=exc.message) for o in obtained]
        plan = prompt.computed_plan()
        chosen = time.perf_counter()
        prefilled = context.prefill(plan, watch.computed)
    hits = {o.states.key for o in obtained if o.miss is None}
    cached = sum(span.tokens for span in plan.spans if span.states.key in hits)
    again = prefilled.computed_tokens - (prompt.tokens - plan.cached_tokens)  # cached cells that were computed anyway
    encode_ms = sum(o.encode_ms for o in obtained)
    stats = PrefillStats(
        prompt_tokens=prompt.tokens,
        cached_tokens=max(cached - again, 0),
        computed_tokens=prefilled.computed_tokens + sum(o.computed_tokens for o in obtained),
        parse_ms=(parsed - submitted) * 1e3,
        encode_ms=encode_ms,
        assembly_ms=(planned - parsed) * 1e3 - encode_ms + prefilled.assembly_ms,
        choose_ms=(chosen - planned) * 1e3,
        forward_ms=prefilled.forward_ms,
        modules=_module_stats(prompt, served, obtained),
        picked=prompt.picked,
        dropped_turns=0,
    )
    return Started(prefilled.logits, prompt.end, tuple(prompt.in_position_order().tolist()), stats, submitted)


def found_for(prompt: LaidOut, encoder: Encoder, fidelity: Fidelity) -> list[Looked]:
    """What serves a prompt: all its encodings, or the first ones, whose states are as full prefill has them."""
    found = encoder.find(prompt)
    keys = {encoding.key for encoding in prompt.exact}
    exact = list(takewhile(lambda each: each[0].key in keys, found))
    approximate = sum(encoding.tokens for encoding, _ in found[len(exact) :])
    if fidelity == "full" or (fidelity == "balanced" and approximate <= COMPUTED_ANYWAY):
        return exact
    return found


def served_plan(
    context: Context, prompt: LaidOut, served: Sequence[tuple[Encoding, Obtained]], fidelity: Fidelity
) -> Plan:
    """The plan that injects what serves a prompt, and computes again what its fidelity asks for.

    Raises:
        StatesError: stored states cannot be used after all.
    """
    plan = prompt.cached_plan([obtained.states for _, obtained in served], exact=fidelity == "full")
    approximate = {encoding.key for encoding, _ in served} - {encoding.key for encoding in prompt.exact}
    if fidelity != "balanced" or not approximate:
        return plan
    return with_recomputed(context, plan, approximate)


def prefill_full(context: Context, prompt: LaidOut, submitted: float, watch: Watch | None = None) -> Started:
    """Compute every token at contiguous positions; nothing is reused or stored. See `prefill`."""
    parsed = time.perf_counter()
    watch = watch or Watch()
    done = 0

    def report(tokens: int) -> None:
        nonlocal done
        done += tokens
        watch.report(Progress(done, prompt.tokens, prompt.schema.name))

    prefilled = context.prefill(prompt.full_plan(), report)
    reason = "the cache is not used"
    stats = PrefillStats(
        prompt_tokens=prompt.tokens,
        cached_tokens=0,
        computed_tokens=prefilled.computed_tokens,
        parse_ms=(parsed - submitted) * 1e3,
        encode_ms=0.0,
        assembly_ms=prefilled.assembly_ms,
        choose_ms=0.0,
        forward_ms=prefilled.forward_ms,
        modules=tuple(ModuleStats(name, tokens, False, True, reason) for name, _, tokens in _parts(prompt)),
        picked=prompt.picked,
        dropped_turns=0,
    )
    return Started(prefilled.logits, prompt.tokens, tuple(prompt.in_position_order().tolist()), stats, submitted)


def continue_prefill(
    cells: LiveCells, prompt: LaidOut, kept: int, capacity: int, submitted: float, watch: Watch
) -> Started:
    """Bring a prompt to its first token's logits where the first `kept` of its cells, not all, are there already.

    Raises:
        ContextLengthError: there is not enough memory.
        Cancelled: `watch` ended it; those cells are still there.
    """
    parsed = time.perf_counter()
    plan = prompt.computed_plan()
    cells.cut(kept)
    prefilled = cells.go_on(Tokens(plan.token_ids, plan.position_ids), capacity, ONLY_CELLS, watch.computed)
    first_computed = int(plan.position_ids[kept])
    modules = []
    for name, path, tokens in _parts(prompt):
        hit = int(prompt.schema.modules[path].position_ids[-1]) < first_computed
        modules.append(ModuleStats(name, tokens, hit, True, None if hit else COMPUTED))
    stats = PrefillStats(
        prompt_tokens=prompt.tokens,
        cached_tokens=max(prompt.tokens - prefilled.computed_tokens, 0),
        computed_tokens=prefilled.computed_tokens,
        parse_ms=(parsed - submitted) * 1e3,
        encode_ms=0.0,
        assembly_ms=prefilled.assembly_ms,
        choose_ms=0.0,
        forward_ms=prefilled.forward_ms,
        modules=tuple(modules),
        dropped_turns=0,
        picked=prompt.picked,
    )
    return Started(prefilled.logits, prompt.end, tuple(plan.token_ids.tolist()), stats, submitted)


def _refuse_misses(found: Sequence[Looked]) -> None:
    misses = [f"  {encoding.label}: {states.reason}" for encoding, states in found if isinstance(states, Miss)]
    if misses:
        raise CacheMissError(
            "strict mode: states are missing:\n" + "\n".join(misses),
            hint="encode the schema first (edge-pc encode SCHEMA), or turn strict mode off",
        )


def _module_stats(
    prompt: LaidOut, served: Sequence[tuple[Encoding, Obtained]], obtained: Sequence[Obtained]
) -> tuple[ModuleStats, ...]:
    exact = {encoding.key for encoding in prompt.exact}
    computed = {path: (True, COMPUTED) for encoding in prompt.encodings for path in encoding.paths}
    reasons = {
        path: (encoding.key in exact, o.miss)
        for (encoding, _), o in zip(served, obtained, strict=True)
        for path in encoding.paths
    }
    stats = []
    for name, path, tokens in _parts(prompt):
        is_exact, reason = {**computed, **reasons}.get(path, (True, _UNCACHED))
        stats.append(ModuleStats(name, tokens, reason is None, is_exact, reason))
    return tuple(stats)


def _parts(prompt: LaidOut) -> list[tuple[str, str, int]]:
    """(name for people, path, tokens) of each module that has text."""
    tokens = {path: len(prompt.schema.modules[path].token_ids) for path in prompt.modules}
    return [(path if path != ROOT else prompt.schema.name, path, count) for path, count in tokens.items() if count]
