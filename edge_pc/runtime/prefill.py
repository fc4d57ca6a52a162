"""Prefills a prompt, with stored states or in full, and counts what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_pc.backends.base import Context
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import ROOT
from edge_pc.errors import CacheMissError, StatesError
from edge_pc.progress import Progress
from edge_pc.runtime.encoder import Encoder, Obtained
from edge_pc.runtime.stats import ModuleStats, PrefillStats, Started
from edge_pc.runtime.watch import Watch

log = logging.getLogger("edge_pc")

_UNCACHED = 'cache="false" in the schema'


@dataclass(frozen=True, slots=True)
class Serving:
    """What a prompt reuses, and how.

    Attributes:
        use_cache: False: full prefill, nothing reused and nothing stored.
        exact: cells strictly in position order, so that sums come out as in full prefill bit for bit.
        strict: a module that is not stored is an error.
    """

    use_cache: bool = True
    exact: bool = False
    strict: bool = False


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
    if serving.strict:
        _refuse_misses(prompt, encoder)
    served = encoder.serve(prompt, watch.report)
    obtained = [states for _, states in served]
    plan = prompt.cached_plan([o.states for o in obtained], exact=serving.exact)
    planned = time.perf_counter()
    try:
        prefilled = context.prefill(plan, watch.computed)
    except StatesError as exc:
        if serving.strict:
            raise CacheMissError(f"strict mode: {exc}") from exc
        log.warning("%s; the prompt is computed instead", exc.message)
        obtained = [replace(o, miss=exc.message) for o in obtained]
        plan = prompt.computed_plan()
        prefilled = context.prefill(plan, watch.computed)
    hits = {o.states.key for o in obtained if o.miss is None}
    cached = sum(span.tokens for span in plan.spans if span.states.key in hits)
    again = prefilled.computed_tokens - len(plan.token_ids)  # cached cells that the backend computed anyway
    encode_ms = sum(o.encode_ms for o in obtained)
    stats = PrefillStats(
        prompt_tokens=prompt.tokens,
        cached_tokens=max(cached - again, 0),
        computed_tokens=prefilled.computed_tokens + sum(o.computed_tokens for o in obtained),
        parse_ms=(parsed - submitted) * 1e3,
        encode_ms=encode_ms,
        assembly_ms=(planned - parsed) * 1e3 - encode_ms + prefilled.assembly_ms,
        forward_ms=prefilled.forward_ms,
        modules=_module_stats(prompt, [encoding for encoding, _ in served], obtained),
    )
    return Started(prefilled.logits, prompt.end, tuple(prompt.in_position_order().tolist()), stats, submitted)


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
        forward_ms=prefilled.forward_ms,
        modules=tuple(ModuleStats(name, tokens, False, True, reason) for name, _, tokens in _parts(prompt)),
    )
    return Started(prefilled.logits, prompt.tokens, tuple(prompt.in_position_order().tolist()), stats, submitted)


def _refuse_misses(prompt: LaidOut, encoder: Encoder) -> None:
    misses = [f"  {encoding.label}: {miss.reason}" for encoding, miss in encoder.misses(prompt)]
    if misses:
        raise CacheMissError(
            "strict mode: states are missing:\n" + "\n".join(misses),
            hint="encode the schema first (edge-pc encode SCHEMA), or turn strict mode off",
        )


def _module_stats(
    prompt: LaidOut, encodings: Sequence[Encoding], obtained: Sequence[Obtained]
) -> tuple[ModuleStats, ...]:
    exact = {encoding.key for encoding in prompt.exact}
    served = {path: (e.key in exact, o.miss) for e, o in zip(encodings, obtained, strict=True) for path in e.paths}
    stats = []
    for name, path, tokens in _parts(prompt):
        is_exact, reason = served.get(path, (True, _UNCACHED))
        stats.append(ModuleStats(name, tokens, reason is None, is_exact, reason))
    return tuple(stats)


def _parts(prompt: LaidOut) -> list[tuple[str, str, int]]:
    """(name for people, path, tokens) of each module that has text."""
    tokens = {path: len(prompt.schema.modules[path].token_ids) for path in prompt.modules}
    return [(path if path != ROOT else prompt.schema.name, path, count) for path, count in tokens.items() if count]
