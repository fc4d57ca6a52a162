"""A conversation: one live context to which each turn adds its own tokens, so that nothing is computed twice.

Its tokens are those of its opening (modules, a system text, files), and for each turn what the model's template writes
around the question, and the answer as the model chose it. Invariant: what a session has come to is one immutable value
(`State`), which is replaced when a turn has ended; a turn that fails leaves the one before.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from edge_pc.backends.base import OnTokens
from edge_pc.compose.schemas import CONVERSATION, Opening
from edge_pc.errors import EngineError, ModelError, OptionError, StatesError
from edge_pc.pml.model import ROLES, Role
from edge_pc.progress import OnProgress, Progress
from edge_pc.runtime.answer import Answer
from edge_pc.runtime.answering import Answering, exhaust
from edge_pc.runtime.decoding import Live
from edge_pc.runtime.exchanges import Exchange, Manner, State, with_room_for
from edge_pc.runtime.live_cells import LiveCells, Parts, Tokens
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.saved_cells import Stretch, Stretches, still_valid
from edge_pc.runtime.serving import DEFAULT_FIDELITY, FIDELITIES, Serving
from edge_pc.runtime.stats import PrefillStats, Result, Started
from edge_pc.runtime.stream import Stream
from edge_pc.runtime.watch import Cancelled, Watch
from edge_pc.store import SavedSession

log = logging.getLogger("edge_pc")


class Session:
    """A conversation. Use it as a context manager, or `close` it.

    One turn at a time; `Stream.cancel` and `close` may be called from any thread. An answer that is cancelled, closed
    early or interrupted (Ctrl-C) after its first token stays as far as it came, as the answer of its turn; `undo` drops
    it. A turn that ends before its first token, or fails, leaves the session as it was.

    Args:
        answering: computes in the opened model.
        manner: how turns are written.
        serving: of the first turn, as of a prompt: cells that are computed again are chosen for the first question.
            Later turns see the cells as they are.
        opening: what stands before the first question; None: that has been asked.
    """

    def __init__(self, answering: Answering, manner: Manner, serving: Serving, opening: Opening | None) -> None:
        self._answering = answering
        self._manner = manner
        self._serving = serving
        self._opening = opening
        self._cells = LiveCells(answering.backend, exact=serving.fidelity == "full")
        self._stretches = Stretches(answering.backend, answering.store, answering.model)
        self._saved: list[Stretch] = []
        self._state = State()
        self._working = threading.Lock()
        self._closed = False
        self._stream: weakref.ref[Stream] | None = None

    @classmethod
    def begin(cls, answering: Answering, opening: Opening, serving: Serving) -> Session:
        """See `Engine.session`."""
        return cls(answering, Manner(answering.backend, opening.roles, chat=opening.chat), serving, opening)

    @classmethod
    def resume(cls, answering: Answering, saved: SavedSession) -> Session:
        """See `Engine.resume`."""
        if saved.fingerprint != answering.backend.spec.fingerprint:
            raise ModelError(
                f"the session {saved.name!r} was saved with another model, {saved.model}, or with another backend",
                hint="open it with the model and the backend that it was saved with",
            )
        fidelity = next((level for level in FIDELITIES if level == saved.fidelity), DEFAULT_FIDELITY)
        roles = [role for name in saved.roles for role in ROLES if role == name]
        session = cls(answering, Manner(answering.backend, roles, chat=saved.chat), Serving(fidelity=fidelity), None)
        tokens = Tokens(np.array(saved.token_ids, dtype=np.int32), np.array(saved.position_ids, dtype=np.int32))
        session._state = State(tokens, tuple(Exchange(*exchange) for exchange in saved.exchanges))
        start = 0
        for key, count in saved.stretches:
            session._saved.append(Stretch(key, tokens.first(start + count).after(start)))
            start += count
        return session

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def turns(self) -> tuple[tuple[Role, str], ...]:
        """(role, text) of questions and answers, the oldest first."""
        return self._state.turns

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the conversation so far; none before the first question."""
        return tuple(self._state.tokens.token_ids.tolist())

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._state.tokens)

    @property
    def room(self) -> int:
        """How many more tokens the model has positions for."""
        return self._answering.max_positions - self._state.tokens.end

    def prepare(self, progress: OnProgress | None = None) -> None:
        """Compute and store now what the first question would wait for, as far as it is not stored.

        Args:
            progress: called as tokens are computed.
        """
        with self._answering.lifetime.work(Watch(progress)) as watch:
            if self._opening and self._serving.use_cache and not self.tokens:
                self._answering.encoder.obtain(self._opening.encodings(), watch.report)

    def ask(self, text: str, sampling: Sampling = Sampling(), progress: OnProgress | None = None) -> Result:
        """Ask the next question.

        Where there is no room for it and an answer of 256 tokens (or of `sampling.max_tokens`), the oldest turns are
        dropped; `result.stats.dropped_turns` says how many.

        Args:
            text: the question; spaces around it are left out.
            sampling: how the answer's tokens are chosen.
            progress: called before the first token, while what is not stored is computed.

        Raises:
            OptionError: the question is empty.
            ContextLengthError: opening, question and answer do not fit into the model, even without earlier turns.
            CacheMissError: `serving` is strict, and something was not stored.
            EngineError: the session or the engine is closed, or a turn is under way.
        """
        return exhaust(self.stream(text, sampling, progress))

    def stream(self, text: str, sampling: Sampling = Sampling(), progress: OnProgress | None = None) -> Stream:
        """As `ask`, piece by piece. Errors come with the first piece."""
        stream = self._answering.stream(lambda answer, watch: self.turn(text, answer, watch), sampling, progress)
        self._stream = weakref.ref(stream)
        return stream

    @contextmanager
    def turn(self, text: str, answer: Answer, watch: Watch) -> Iterator[Live]:
        """A turn brought to its first token's logits; the answer is to be decoded within the block.

        For those who decode answers of several sessions together. Errors as of `ask`.
        """
        with self._alone():
            submitted = self._answering.submit()
            if self._opening and not self.tokens:
                asked, started = self._begin_first(self._opening, text.strip(), answer, watch, submitted)
            else:
                asked, started = self._begin_later(text.strip(), answer, watch, submitted)
            try:
                yield Live(self._cells.context(0), started, answer)
            except (Cancelled, GeneratorExit, KeyboardInterrupt):
                self._end(asked, answer)
                raise
            self._end(asked, answer)

    def save(self, name: str) -> None:
        """Keep the conversation under a name, in place of another one: `Engine.resume` goes on with it.

        Its cells are kept in the store, and a later save adds only those that are new. They are the cells as they are:
        with `kv_storage="float16"` they lose a little precision.

        Raises:
            OptionError: the name cannot be used, or no question was asked yet.
            StoreError: it cannot be written.
            EngineError: a turn is under way, or the session is closed.
        """
        with self._alone():
            store = self._answering.store
            store.sessions.path(name)
            if not self.tokens:
                raise OptionError("there is nothing to save: no question was asked yet", hint="ask one first")
            self._store_cells(name)
            state, spec = self._state, self._answering.backend.spec
            saved = SavedSession(
                name=name,
                model=self._answering.model,
                fingerprint=spec.fingerprint,
                fidelity=self._serving.fidelity,
                chat=self._manner.chat,
                roles=self._manner.roles,
                token_ids=self.token_ids,
                position_ids=tuple(state.tokens.position_ids.tolist()),
                exchanges=tuple((e.question, e.answer, e.start, e.text_start) for e in state.exchanges),
                stretches=tuple((stretch.key, len(stretch.tokens)) for stretch in self._saved),
                saved=round(time.time(), 3),
            )
            store.save_session(saved)

    def _store_cells(self, name: str) -> None:
        cells = self._cells
        cells.cut(cells.there.common(self._state.tokens))
        known = still_valid(self._saved, cells.there if len(cells.there) else self._state.tokens)
        try:
            self._saved = self._stretches.save(name, cells, known)
        except StatesError as exc:
            log.warning("%s; the conversation is saved without them", exc.message)
            self._saved = known

    def undo(self) -> str:
        """Drop the last question and its answer; returns the question.

        Raises:
            OptionError: there is none.
            EngineError: a turn is under way, or the session is closed.
        """
        with self._alone():
            if not self._state.exchanges:
                raise OptionError("there is no question to undo", hint="ask one first")
            *before, last = self._state.exchanges
            count = last.start
            if not before:
                # Cells of the opening were chosen for the first question; another one chooses its own, if it can.
                count, self._saved = (0, []) if self._opening else (last.text_start, self._saved)
            self._state = State(self._state.tokens.first(count), tuple(before))
            self._cells.cut(count)
            return last.question

    def fork(self) -> Session:
        """A second session that goes on from here; none of its cells is computed again.

        Raises:
            EngineError: a turn is under way, or the session is closed.
        """
        with self._alone():
            forked = Session(self._answering, self._manner, self._serving, self._opening)
            forked._state, forked._cells, forked._saved = self._state, self._cells.fork(), list(self._saved)
        return self._answering.lifetime.keep(forked)

    def close(self) -> None:
        """End the answer that is being made, and give the memory back; a second time nothing happens.

        Raises:
            EngineError: it is called by the work itself, in a progress callback; or a turn is under way that has no
                stream.
        """
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            if stream.is_worked_on_here:
                raise EngineError("a session cannot be closed from a progress callback", hint="cancel the stream")
            stream.close_and_wait()
        with self._held():
            self._closed = True
            self._cells.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the session, which is open.

        Raises:
            EngineError: a turn is under way, or the session or the engine is closed.
        """
        self._answering.lifetime.require_open()
        with self._held():
            if self._closed:
                raise EngineError("this session is closed", hint="begin another one")
            yield

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._working.acquire(blocking=False):
            hint = "read its stream to the end or close it; or go on in a fork"
            raise EngineError("this session is making an answer already", hint=hint)
        try:
            yield
        finally:
            self._working.release()

    def _begin_first(
        self, opening: Opening, text: str, answer: Answer, watch: Watch, submitted: float
    ) -> tuple[State, Started]:
        """Ask the first question: the state then, its exchange without an answer; and the prefilled prompt."""
        prompt = opening.ask(text)
        self._answering.make_room(prompt, answer)
        context = self._cells.empty_context(prompt.tokens + answer.max_tokens)
        started = self._answering.prefill(context, prompt, submitted, self._serving, watch)
        plan = prompt.computed_plan() if self._serving.use_cache else prompt.full_plan()
        tokens = Tokens(plan.token_ids, plan.position_ids)
        self._cells.note(tokens)
        return State(tokens, (Exchange(text, "", 0, len(tokens) - prompt.last_text),)), started

    def _begin_later(self, text: str, answer: Answer, watch: Watch, submitted: float) -> tuple[State, Started]:
        """As `_begin_first`, after what is there."""
        most = self._answering.max_positions
        asked, dropped = with_room_for(self._state, text, self._manner, answer.sampling, most)
        tokens = asked.tokens
        answer.max_tokens = answer.sampling.answer_room(most - tokens.end)
        parsed = time.perf_counter()
        parts = Parts(lambda: self._stretches.spans(still_valid(self._saved, tokens)), self._moved_by(asked, dropped))
        prefilled = self._cells.go_on(tokens, len(tokens) + answer.max_tokens, parts, _reporting(watch, len(tokens)))
        stats = PrefillStats(
            prompt_tokens=len(tokens),
            cached_tokens=len(tokens) - prefilled.computed_tokens,
            computed_tokens=prefilled.computed_tokens,
            parse_ms=(parsed - submitted) * 1e3,
            encode_ms=0.0,
            assembly_ms=prefilled.assembly_ms,
            choose_ms=0.0,
            forward_ms=prefilled.forward_ms,
            modules=(),
            picked=(),
            dropped_turns=dropped,
        )
        return asked, Started(prefilled.logits, tokens.end, tuple(tokens.token_ids.tolist()), stats, submitted)

    def _moved_by(self, asked: State, dropped: int) -> int:
        """By how many places cells that stay are moved: 0 where none are, or where they are computed again instead."""
        fixed = self._answering.backend.spec.position.fixed
        if not dropped or fixed or self._serving.fidelity == "full":
            return 0
        return len(self._state.tokens) - asked.exchanges[-1].start

    def _end(self, asked: State, answer: Answer) -> None:
        """Take the answer into the conversation, as far as it came."""
        answer.cancel()
        if answer.begun:
            self._cells.note(asked.tokens.plus(answer.computed_ids))
            self._state = asked.answered(answer.result().text, answer.said_ids())


def _reporting(watch: Watch, total: int) -> OnTokens:
    """Tells who waits how many of a conversation's tokens are computed. Where few are, that is soon over."""
    done = 0

    def report(tokens: int) -> None:
        nonlocal done
        done += tokens
        watch.report(Progress(done, total, CONVERSATION))
        watch.check()

    return report
