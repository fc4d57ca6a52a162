"""The one thread that computes: it decodes all answers together, a token of each at a time, and starts new ones.

A prompt is prefilled in chunks of a few hundred tokens. Between two chunks the answers that are under way get as much
time as the chunk took, and a prompt that has little to compute is started at once: so neither waits for an encoding.
Apart from that prompts are started in the order in which they came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from edge_pc.backends.base import Context
from edge_pc.compose.laid_out import LaidOut
from edge_pc.engine import Engine
from edge_pc.errors import ContextLengthError, EdgePCError, EngineError
from edge_pc.progress import Progress
from edge_pc.runtime.decoding import Live, step
from edge_pc.runtime.live_cells import LiveCells
from edge_pc.runtime.prefill import continue_prefill
from edge_pc.runtime.stats import Started
from edge_pc.runtime.watch import Cancelled, Watch
from edge_pc.server.jobs import Busy, Job
from edge_pc.server.warm import Held, WarmCells, kind_of, tokens_of
from edge_pc.store import Miss

log = logging.getLogger("edge_pc")

# A prompt that has no more to compute does not wait for others that have.
SHORT_TOKENS = 256

# A signal's handler cannot notify: whether the end has come is looked at so often.
_LOOK_SECONDS = 0.2

# The speed of prefill is taken from runs of at least so many tokens, the newest counting this much.
_MEASURED_FROM, _NEWEST = 64, 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler has to do now: answers that wait, and are under way; contexts that are kept."""

    waiting: int
    answering: int
    kept_contexts: int


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    held: Held
    live: Live


class _Between(Watch):
    """Watches a prefill: ends it when its own job is cancelled, and lets others work between its chunks."""

    def __init__(self, job: Watch, others: Callable[[float], None]) -> None:
        super().__init__()
        self._job = job
        self._others = others
        self._since = time.perf_counter()

    def check(self) -> None:
        self._job.check()
        self._others(time.perf_counter() - self._since)
        self._since = time.perf_counter()

    def report(self, progress: Progress) -> None:
        self.check()


class Scheduler:
    """Computes answers in a thread of its own, until it is closed.

    Args:
        engine: does the work; nobody else uses its contexts meanwhile.
        parallel: answers that are decoded together, at most.
        waiting: jobs that may wait, at most.
        kept: contexts of finished answers that are kept.
    """

    def __init__(self, engine: Engine, *, parallel: int, waiting: int, kept: int) -> None:
        self._engine = engine
        self._parallel = parallel
        self._most_waiting = waiting
        self._warm = WarmCells(kept)
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._starting = 0
        self._news = threading.Condition()
        self._closing = False
        self.prefill_tokens_per_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="edge-pc-scheduler", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        return Load(len(self._waiting), len(self._running) + self._starting, len(self._warm))

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn.

        Raises:
            Busy: too many wait already.
            EngineError: the scheduler is closed.
        """
        with self._news:
            if self._closing:
                raise EngineError("the server is shutting down")
            if len(self._waiting) >= self._most_waiting:
                raise Busy
            self._waiting.append(job)
            self._news.notify()

    def stop(self) -> None:
        """End all answers soon, and take no more. Safe to call in a signal's handler."""
        self._closing = True

    def close(self) -> None:
        """End all answers, and wait for that."""
        self.stop()
        with self._news:
            self._news.notify()
        self._thread.join()

    def _work(self) -> None:
        while self._wait():
            self._start_next()
            self._round()
        error = EngineError("the server is shutting down")
        for job in [*(run.job for run in self._running), *self._waiting]:
            job.failed(error)
        for run in self._running:
            run.held.cells.close()
        self._running.clear()
        self._waiting.clear()
        self._warm.close()

    def _wait(self) -> bool:
        """Wait for something to do; False: the end has come."""
        with self._news:
            self._news.wait_for(lambda: self._closing or self._running or self._waiting, _LOOK_SECONDS)
            return not self._closing

    def _start_next(self) -> None:
        """Start the prompt that came first, if another answer may join."""
        if len(self._running) + self._starting < self._parallel:
            with self._news:
                job = self._waiting.popleft() if self._waiting else None
            if job is not None:
                self._start(job, self._between_chunks)

    def _between_chunks(self, seconds: float) -> None:
        """What others may do after a chunk that took so long."""
        if self._closing:
            raise Cancelled
        deadline = time.perf_counter() + seconds
        while len(self._running) + self._starting < self._parallel:
            job = self._take_short()
            if job is None:
                break
            self._start(job, self._nothing_between)
        while self._running and time.perf_counter() < deadline:
            self._round()

    def _nothing_between(self, seconds: float) -> None:
        if self._closing:
            raise Cancelled

    def _take_short(self) -> Job | None:
        """The first job that has little to compute, and nothing for the store."""
        with self._news:
            waiting = list(self._waiting)
        for job in waiting:
            if job.watch.cancelled or self._to_compute(job) <= SHORT_TOKENS:
                with self._news:
                    self._waiting.remove(job)
                return job
        return None

    def _to_compute(self, job: Job) -> int:
        """How many tokens would be computed if the job was started now."""
        prompt = job.prompt
        _, kept = self._warm.best(kind_of(prompt, job.serving.fidelity), tokens_of(prompt))
        most = prompt.tokens - kept
        if most <= SHORT_TOKENS or not prompt.encodings:
            return most
        found = self._engine.encoder.find(prompt)
        if any(isinstance(states, Miss) for _, states in found):
            return most
        return min(most, len(prompt.token_ids))

    def _start(self, job: Job, others: Callable[[float], None]) -> None:
        """Bring a job to its first token; what goes wrong is told to whoever asked."""
        if job.watch.cancelled:
            job.cancelled()
            return
        self._starting += 1
        try:
            held, started = self._prefilled(job, _Between(job.watch, others))
        except Cancelled:
            job.cancelled()
            return
        except Exception as exc:
            _log_bug(exc)
            job.failed(exc)
            return
        finally:
            self._starting -= 1
        self._measure(started)
        run = _Running(job, held, Live(held.cells.context(0), started, job.answer))
        self._running.append(run)
        self._advance(run, partial(job.answer.begin, started))

    def _prefilled(self, job: Job, watch: Watch) -> tuple[Held, Started]:
        """Cells of the job's prompt, and its first logits."""
        prompt, wanted = job.prompt, tokens_of(job.prompt)
        kind, capacity = kind_of(prompt, job.serving.fidelity), prompt.end + job.answer.max_tokens
        held, kept = self._warm.best(kind, wanted)
        if held is not None and kept >= self._stored_tokens(prompt, kept):
            held = self._warm.take(held, kept)
            held.prompt_tokens = kept
            try:
                started = continue_prefill(held.cells, prompt, kept, capacity, job.submitted, watch)
            except Cancelled:
                self._warm.put(held)
                raise
            except BaseException:
                held.cells.close()
                raise
        else:
            held = Held(LiveCells(self._engine.backend, exact=job.serving.fidelity == "full"), kind, 0)
            try:
                context = self._context(held.cells, capacity)
                started = self._engine.answering.prefill(context, prompt, job.submitted, job.serving, watch)
            except BaseException:
                held.cells.close()
                raise
            held.cells.note(wanted)
        held.prompt_tokens = len(wanted)
        return held, started

    def _context(self, cells: LiveCells, capacity: int) -> Context:
        """A new context; where no more may be open, those that are kept have to go."""
        try:
            return cells.empty_context(capacity)
        except ContextLengthError:
            if not len(self._warm):
                raise
            self._warm.close()
            return cells.empty_context(capacity)

    def _stored_tokens(self, prompt: LaidOut, kept: int) -> int:
        """How many of the prompt's first tokens the store has, where that may be more than are `kept`."""
        if kept >= sum(encoding.tokens for encoding in prompt.encodings):
            return 0
        stored = 0
        for encoding, states in self._engine.encoder.find(prompt):
            if isinstance(states, Miss):
                break
            stored += encoding.tokens
        return stored

    def _round(self) -> None:
        """Compute a token of every answer that is under way."""
        for run in [run for run in self._running if run.job.watch.cancelled]:
            self._end(run)
            run.job.cancelled()
        going = list(self._running)
        if not going:
            return
        try:
            logits = step(self._engine.backend, [run.live for run in going])
        except Exception as exc:
            _log_bug(exc)
            for run in going:
                self._running.remove(run)
                run.held.cells.close()
                run.job.failed(exc)
            return
        for run, each in zip(going, logits, strict=True):
            self._advance(run, partial(run.job.answer.take, each))
        with suppress(EdgePCError):
            self._engine.store.start_checks()

    def _advance(self, run: _Running, take: Callable[[], str]) -> None:
        """Choose a token of an answer, and tell of it."""
        try:
            text = take()
        except Exception as exc:  # a grammar that became too complex
            _log_bug(exc)
            self._end(run)
            run.job.failed(exc)
            return
        if run.job.answer.done:
            self._end(run)
        run.job.gained(text)

    def _end(self, run: _Running) -> None:
        """Keep the cells of an answer that has ended."""
        self._running.remove(run)
        cells = run.held.cells
        cells.note(cells.there.plus(run.job.answer.computed_ids))
        self._warm.put(run.held)

    def _measure(self, started: Started) -> None:
        stats = started.stats
        seconds = (stats.encode_ms + stats.forward_ms) / 1e3
        if stats.computed_tokens >= _MEASURED_FROM and seconds:
            speed, before = stats.computed_tokens / seconds, self.prefill_tokens_per_s
            self.prefill_tokens_per_s = speed if before is None else before + _NEWEST * (speed - before)


def _log_bug(error: Exception) -> None:
    """What is nobody's mistake goes to the log with its traceback."""
    if not isinstance(error, EdgePCError):
        log.error("the server failed", exc_info=error)
