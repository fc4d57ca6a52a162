"""The rows that experiments write. Times are in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.bench.rows import Row, TimedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow(TimedRow):
    """One of llama.cpp's own ways to reuse a prefix; stages: `ttft`, and of it `assembly` and `forward`.

    Attributes:
        way: `state_file`, `load_state` or `ram_cache`.
        flash: with flash attention.
        cached_tokens, new_tokens: of the prefix, and after it.
    """

    way: str
    flash: bool
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates; the best of a few runs, since whatever disturbs makes them lower.

    Attributes:
        copy_gbps: bytes read and written per second by a copy, in 10^9.
        read_gbps: bytes read per second, in 10^9.
        float32_gflops: of a float32 matrix product by numpy, in 10^9 operations per second.
        int8_gflops: of the product of float32 rows with 8-bit blocks, by ONNX Runtime's kernel for our weights.
    """

    copy_gbps: float
    read_gbps: float
    float32_gflops: float
    int8_gflops: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted model.

    Attributes:
        a_ms, b, c: coefficients, none below 0.
        median_error, worst_error: of the points, relative.
        r2: share of the variance of log TTFT that is explained.
        points: how many were fitted.
        explained: of the differences between machines (logarithms of the ratio at equal points) the share that the
            model explains; None for one machine.
    """

    a_ms: float
    b: float
    c: float
    median_error: float
    worst_error: float
    r2: float
    points: int
    explained: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesRow(Row):
    """What the model of TTFT needs to know of one backend, and the model.

    Attributes:
        rates: of the machine.
        weight_bytes: of the backend's weights.
        matmul_parameters: numbers in the matrices that every token is multiplied with.
        kv_number_bytes: of a number in the KV cache.
        fit: the model, fitted to the report's times; None with too few.
    """

    backend: str
    rates: Rates
    weight_bytes: int
    matmul_parameters: int
    kv_number_bytes: int
    fit: Fit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow(Row):
    """A model of the paper's Table 2.

    Attributes:
        model: its name.
        figure_mb: what the paper prints, in MB per token.
        calculated_mb: 2 × layers × all heads × head size × 2 bytes, in MiB cut off after two digits.
        bytes_per_token, stored_bytes_per_token: as the paper counts, and of KV heads alone.
    """

    model: str
    figure_mb: float
    calculated_mb: float
    bytes_per_token: int
    stored_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class CaseAnswer:
    """An answer, and why it ended."""

    text: str
    tokens: int
    stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow(Row):
    """One application on one backend.

    Attributes:
        case, title: the ready schema, and what it stands for.
        question: the prompt's own text.
        modules: of the prompt; the schema's name stands for its anonymous text.
        prompt_tokens, cached_tokens, computed_tokens: of the cached answer.
        encoded_tokens, encode_ms: to encode the whole schema.
        samples_ms: `full_ttft_ms` and `cached_ttft_ms` → every sample.
        kl, same_first_token: of the first token, against full prefill.
        same_answer: both have the same tokens.
        full, cached: both answers.
    """

    backend: str
    case: str
    title: str
    question: str
    modules: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    encoded_tokens: int
    encode_ms: float
    full_ttft_ms: float
    cached_ttft_ms: float
    samples_ms: dict[str, tuple[float, ...]]
    kl: float
    same_first_token: bool
    same_answer: bool
    full: CaseAnswer
    cached: CaseAnswer

    @property
    def speed_up(self) -> float:
        return self.full_ttft_ms / self.cached_ttft_ms


@dataclass(frozen=True, slots=True)
class Agreement:
    """Reuse against full prefill of the same tokens.

    Attributes:
        kl: Kullback-Leibler divergence of the first token's distribution from the full one, in nats.
        same_first_token: both have the same likeliest first token.
        gold_full, gold_cached: log-likelihood of the right answer per token, in nats, each token after the ones before
            it; None without a right answer.
        same_tokens: tokens of the greedy answers before the first that differs.
        answer_tokens: tokens of the full one.
        edit_similarity: of the two greedy answers, 1 when they are the same.
        answer_kl: as `kl`, averaged over the tokens of the full answer, each after the ones before it.
        same_tops: share of these where both have the same likeliest token.
    """

    kl: float
    same_first_token: bool
    same_tokens: int
    answer_tokens: int
    edit_similarity: float
    gold_full: float | None = None
    gold_cached: float | None = None
    answer_kl: float | None = None
    same_tops: float | None = None

    @property
    def loss(self) -> float | None:
        """Log-likelihood per token that the right answer loses, in nats; negative where it gains."""
        if self.gold_full is None or self.gold_cached is None:
            return None
        return self.gold_full - self.gold_cached


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityRow(Row):
    """One condition on one item.

    Attributes:
        group, condition: what is set.
        item: data set/item, or the prompt with parameters.
        tokens: of the prompt.
        end: position of the answer's first token; larger than `tokens` by the gaps.
        agreement: None where it was skipped.
        skipped: why: too long for the model, or for a parameter.
    """

    group: str
    condition: str
    item: str
    tokens: int = 0
    end: int = 0
    agreement: Agreement | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer, and its scores from 0 to 1 by metric."""

    text: str
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two greedy answers part, and how sure each way was there.

    Attributes:
        token: index of the first token that differs.
        full_chose, cached_chose: the two tokens.
        full_probabilities, cached_probabilities: each way's, of these two tokens in this order.
    """

    token: int
    full_chose: str
    cached_chose: str
    full_probabilities: tuple[float, ...]
    cached_probabilities: tuple[float, ...]

    def __str__(self) -> str:
        (mine, others), (theirs, own) = self.full_probabilities, self.cached_probabilities
        return (
            f"token {self.token + 1}: full {self.full_chose!r} ({mine:.0%}) before {self.cached_chose!r} "
            f"({others:.0%}); cached {own:.0%} against {theirs:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """One item answered both ways.

    Attributes:
        metric: the data set's own.
        documents: modules in the prompt.
        prompt_tokens, computed_tokens: of the prompt, and of it computed with reuse.
        cut_tokens: of documents, left out from the end because the model has no positions for them.
        full, cached: both answers.
        agreement: of the two.
        parting: where they part; None: they are the same.
    """

    metric: str
    documents: int
    prompt_tokens: int
    computed_tokens: int
    cut_tokens: int
    full: ScoredAnswer
    cached: ScoredAnswer
    agreement: Agreement
    parting: Parting | None = None

    @property
    def lost(self) -> float:
        """How much worse reuse does on the data set's own metric."""
        return self.full.scores[self.metric] - self.cached.scores[self.metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow(Row):
    """One item of a data set.

    Attributes:
        dataset: the file's name without endings.
        fidelity: level of reuse; empty for reports that were made before there were levels.
        question, right: and its right answers.
        compared: None where it was skipped.
        skipped: why.
    """

    dataset: str
    fidelity: str = ""
    question: str
    right: tuple[str, ...]
    compared: Compared | None = None
    skipped: str = ""
