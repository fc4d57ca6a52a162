"""Sets reuse against full prefill of the same tokens: how much faster, and how faithful."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from edge_pc.backends.base import Context, KVStates, Logits, Plan
from edge_pc.compose.laid_out import LaidOut
from edge_pc.runtime.encoder import Encoder
from edge_pc.runtime.prefill import Serving, prefill_cached, prefill_full
from edge_pc.runtime.sampler import softmax

_REPEATS = 3  # of the fast ones; the median is taken


@dataclass(frozen=True, slots=True)
class Comparison:
    """Reuse against full prefill, first-token logits against first-token logits.

    Attributes:
        full_ttft_ms: of full prefill, parse included.
        cached_ttft_ms: with stored states, parse, lookup and assembly included.
        in_place_ttft_ms: the limit: the same tokens computed over cells that are in place already.
        ttft_ratio: full over cached.
        max_abs_logit_diff: largest difference of a logit.
        kl: Kullback-Leibler divergence of the cached distribution from the full one, in nats.
        same_first_token: both have the same likeliest token.
    """

    full_ttft_ms: float
    cached_ttft_ms: float
    in_place_ttft_ms: float
    ttft_ratio: float
    max_abs_logit_diff: float
    kl: float
    same_first_token: bool


def compare_prefills(context: Context, lay_out: Callable[[], LaidOut], encoder: Encoder, *, exact: bool) -> Comparison:
    """Prefill a prompt both ways in one context.

    Args:
        context: with room for the prompt.
        lay_out: parses the prompt and lays it out; part of what is timed.
        encoder: gets its states.
    """
    prompt = lay_out()
    states = [obtained.states for _, obtained in encoder.serve(prompt)]
    plan = prompt.cached_plan(states, exact=exact)
    in_place = in_place_plan(plan)
    cached_ms, in_place_ms = [], []
    for _ in range(_REPEATS):
        context.prefill(in_place)
        in_place_ms.append(context.prefill(in_place).forward_ms)
        submitted = time.perf_counter()
        prompt = lay_out()
        cached = prefill_cached(context, prompt, encoder, submitted, Serving(exact=exact)).logits
        cached_ms.append((time.perf_counter() - submitted) * 1e3)
    submitted = time.perf_counter()
    prompt = lay_out()
    full = prefill_full(context, prompt, submitted).logits
    full_ms = (time.perf_counter() - submitted) * 1e3
    return Comparison(
        full_ttft_ms=full_ms,
        cached_ttft_ms=median(cached_ms),
        in_place_ttft_ms=median(in_place_ms),
        ttft_ratio=full_ms / median(cached_ms),
        max_abs_logit_diff=float(np.abs(cached - full).max()),
        kl=kl_divergence(full, cached),
        same_first_token=int(np.argmax(cached)) == int(np.argmax(full)),
    )


def kl_divergence(reference: Logits, logits: Logits) -> float:
    """KL(reference ‖ logits) in nats, of the softmax of two logit vectors `[vocab]`."""
    p = softmax(reference.astype(np.float64))
    q = softmax(logits.astype(np.float64))
    return float(np.sum(np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))), 0.0)))


def in_place_plan(plan: Plan) -> Plan:
    """The same plan over states in memory, which a second prefill finds in place: only its run is computed."""

    def in_memory(states: KVStates) -> KVStates:
        return replace(states, key=f"memory-{states.key}", array=np.array(states.array), path=None)

    spans = tuple(replace(span, states=in_memory(span.states)) for span in plan.spans)
    return replace(plan, spans=spans)
