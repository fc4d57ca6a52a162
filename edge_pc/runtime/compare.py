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
from edge_pc.runtime.prefill import prefill_cached, prefill_full
from edge_pc.runtime.sampler import softmax
from edge_pc.runtime.serving import FIDELITIES, Fidelity, Serving

# Nats. Greedy answers seldom part below it.
CLOSE_KL = 0.02

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
        needed: the fastest `fidelity` that would have had the same first token and a divergence of at most `CLOSE_KL`.
    """

    full_ttft_ms: float
    cached_ttft_ms: float
    in_place_ttft_ms: float
    ttft_ratio: float
    max_abs_logit_diff: float
    kl: float
    same_first_token: bool
    needed: Fidelity


def compare_prefills(
    context: Context, lay_out: Callable[[], LaidOut], encoder: Encoder, fidelity: Fidelity
) -> Comparison:
    """Prefill a prompt both ways in one context.

    Args:
        context: with room for the prompt.
        lay_out: parses the prompt and lays it out; part of what is timed.
        encoder: gets its states.
    """
    prompt = lay_out()
    states = [obtained.states for _, obtained in encoder.serve(encoder.find(prompt))]
    in_place = in_place_plan(prompt.cached_plan(states))
    in_place_ms, cached_ms = [], []
    for _ in range(_REPEATS):
        context.prefill(in_place)
        in_place_ms.append(context.prefill(in_place).forward_ms)
        cached, took_ms = _timed(context, lay_out, encoder, fidelity)
        cached_ms.append(took_ms)
    submitted = time.perf_counter()
    full = prefill_full(context, lay_out(), submitted).logits
    full_ms = (time.perf_counter() - submitted) * 1e3
    return Comparison(
        full_ttft_ms=full_ms,
        cached_ttft_ms=median(cached_ms),
        in_place_ttft_ms=median(in_place_ms),
        ttft_ratio=full_ms / median(cached_ms),
        max_abs_logit_diff=float(np.abs(cached - full).max()),
        kl=kl_divergence(full, cached),
        same_first_token=int(np.argmax(cached)) == int(np.argmax(full)),
        needed=_needed(full, lambda level: _timed(context, lay_out, encoder, level)[0]),
    )


def _timed(
    context: Context, lay_out: Callable[[], LaidOut], encoder: Encoder, fidelity: Fidelity
) -> tuple[Logits, float]:
    """The logits of a prefill with stored states, and the milliseconds from the prompt's text on."""
    submitted = time.perf_counter()
    logits = prefill_cached(context, lay_out(), encoder, submitted, Serving(fidelity=fidelity)).logits
    return logits, (time.perf_counter() - submitted) * 1e3


def _needed(full: Logits, logits_at: Callable[[Fidelity], Logits]) -> Fidelity:
    """The fastest level whose logits are close to those of full prefill."""
    for level in FIDELITIES[:-1]:
        logits = logits_at(level)
        if kl_divergence(full, logits) <= CLOSE_KL and np.argmax(logits) == np.argmax(full):
            return level
    return FIDELITIES[-1]


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
