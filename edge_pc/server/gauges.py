"""What the server counts, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edge_pc.runtime.stats import Result

if TYPE_CHECKING:
    from edge_pc.server.scheduler import Scheduler

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Gauges:
    """Counters of one server.

    Args:
        scheduler: says what there is to do when it is asked.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by way in and HTTP status.", ["path", "status"])
        self._answers = self._counter("answers", "Answers by why they ended.", ["reason"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", ["states"])
        self._answer_tokens = self._counter("answer_tokens", "Tokens of answers.")
        self._ttft = Histogram(
            "edge_pc_first_token_seconds",
            "From a request to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._gauge("waiting_requests", "Requests that wait for their turn.", lambda: scheduler.load.waiting)
        self._gauge("open_answers", "Answers that are being computed.", lambda: scheduler.load.answering)
        self._gauge(
            "kept_contexts", "Contexts of finished answers that are kept.", lambda: scheduler.load.kept_contexts
        )

    def request(self, path: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()

    def answered(self, result: Result) -> None:
        """Count an answer and what it took."""
        stats = result.stats
        self._answers.labels(result.stop).inc()
        self._prompt_tokens.labels("cached").inc(stats.cached_tokens)
        self._prompt_tokens.labels("computed").inc(stats.prompt_tokens - stats.cached_tokens)
        self._answer_tokens.inc(stats.new_tokens)
        if stats.ttft_ms:
            self._ttft.observe(stats.ttft_ms / 1e3)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"edge_pc_{name}", help, labels or (), registry=self._registry)

    def _gauge(self, name: str, help: str, value: object) -> None:
        Gauge(f"edge_pc_{name}", help, registry=self._registry).set_function(value)  # type: ignore[arg-type]
