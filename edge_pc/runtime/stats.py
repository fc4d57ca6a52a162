"""What an answer is and what it cost: the numbers that the API, the commands and the benches all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_pc.backends.base import Logits
from edge_pc.compose.laid_out import Cited, PickedParts

StopReason = Literal["eos", "length", "stop", "cancelled"]


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """How one module of a prompt was served.

    Attributes:
        path: the module's path; of anonymous text, the schema's name.
        tokens: of its own text.
        hit: its stored states were reused.
        exact: its states were made after all the text before it in this prompt; without gaps in the positions they are
            those that a full prefill would have.
        reason: why not, or None.
    """

    path: str
    tokens: int
    hit: bool
    exact: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """What it took to get to the first token's logits.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, reused from stored states.
        computed_tokens: tokens computed for this prompt, counted where they were computed; it includes the encoding of
            modules that were not stored.
        parse_ms: reading, checking and tokenizing the prompt.
        encode_ms: encoding modules that were not stored.
        assembly_ms: looking states up and placing them.
        choose_ms: finding out which cached tokens matter for the prompt.
        forward_ms: computing the prompt's own tokens, and cached ones again.
        modules: each module's part; of later turns of a conversation, none.
        picked: which parts of files the prompt is about; empty where it is about all that was given.
        dropped_turns: questions of a conversation that were dropped with their answers, because this one had no room.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    parse_ms: float
    encode_ms: float
    assembly_ms: float
    choose_ms: float
    forward_ms: float
    modules: tuple[ModuleStats, ...]
    picked: tuple[PickedParts, ...]
    dropped_turns: int


NO_PREFILL = PrefillStats(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, (), (), 0)


@dataclass(frozen=True, slots=True)
class Stats(PrefillStats):
    """What an answer took.

    Attributes:
        new_tokens: tokens of the answer.
        ttft_ms: from prompt submission to the first token, parse and assembly included.
        decode_tokens_per_s: tokens after the first, per second; 0 when there is none.
    """

    new_tokens: int
    ttft_ms: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, as the model has it: before temperature, penalties, cuts and grammars.

    Attributes:
        token_id: the token chosen.
        logprob: the natural logarithm of its probability.
        top: (token id, log-probability) of the likeliest tokens, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """An answer.

    Attributes:
        text: without the stop string that ended it.
        token_ids: as sampled, without the end-of-sequence token.
        stop: why it ended: an `eos` token (or its grammar allows nothing more), its `length`, a `stop` string, or
            because it was `cancelled`.
        stats: what it took.
        source: where in the documents it is from, where that was asked for and is known.
        logprobs: of each token; empty if `Sampling.logprobs` did not ask for them.
    """

    text: str
    token_ids: tuple[int, ...]
    stop: StopReason
    stats: Stats
    source: Cited | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A prefilled prompt, ready to answer.

    Attributes:
        logits: float32 `[vocab]`, for the first token.
        position: of the first token.
        prompt_ids: every token of the prompt.
        stats: what the prefill took.
        submitted: `time.perf_counter()` when the prompt was submitted.
    """

    logits: Logits
    position: int
    prompt_ids: tuple[int, ...]
    stats: PrefillStats
    submitted: float
