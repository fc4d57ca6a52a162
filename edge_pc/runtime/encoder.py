"""Gets the KV states of encodings: from the store, or by computing and storing them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from edge_pc.backends.base import Backend, KVStates, OnTokens, Plan, Span, states_bytes
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import LaidOut
from edge_pc.errors import StoreError
from edge_pc.progress import OnProgress, Progress
from edge_pc.store import Miss, StateStore, file_bytes

log = logging.getLogger("edge_pc")


@dataclass(frozen=True, slots=True)
class EncodingSize:
    """What `encode` would still compute, and write at most."""

    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What `encode` did.

    Attributes:
        encoded, reused, unstored: labels of the encodings that were made and stored, of those that were there, and of
            those that could not be stored.
        tokens: computed.
        nbytes: of the states stored.
        seconds: it took.
    """

    encoded: tuple[str, ...]
    reused: tuple[str, ...]
    unstored: tuple[str, ...]
    tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Obtained:
    """States, and where they came from.

    Attributes:
        states: of the encoding's stored cells.
        miss: why they had to be computed; None for a hit.
        computed_tokens: tokens computed for them, a context that was missing included.
        encode_ms: time spent computing and storing them.
    """

    states: KVStates
    miss: str | None = None
    computed_tokens: int = 0
    encode_ms: float = 0.0

    @property
    def stored(self) -> bool:
        return self.states.path is not None


# An encoding, and its stored states or why there are none.
Looked = tuple[Encoding, KVStates | Miss]


class Encoder:
    """Looks encodings up and encodes what is missing.

    Args:
        backend: computes.
        store: keeps.
        model: the model's name, for people who list the store.
    """

    def __init__(self, backend: Backend[Any], store: StateStore, model: str) -> None:
        self._backend = backend
        self._store = store
        self._model = model

    def lookup(self, encoding: Encoding) -> KVStates | Miss:
        """The stored states, or why there are none."""
        if not encoding.stored:
            return Miss('cache="false" in the schema')
        return self._store.lookup(
            encoding.key, self._backend.kv_layout, encoding.kept_token_ids, encoding.kept_position_ids
        )

    def find(self, prompt: LaidOut) -> list[Looked]:
        """Which encodings serve a prompt, and what is stored of them.

        Exact versions from the first on, as far as they are stored. Then the version that suits each place, or another
        one of which more is stored; modules inside one another attend to each other, so they have the same.
        """
        found = self._exact(prompt)
        pairs = zip(prompt.encodings[len(found) :], prompt.others[len(found) :], strict=True)
        for _, group in groupby(pairs, key=lambda pair: pair[0].outermost):
            here, elsewhere = zip(*group, strict=True)
            looked = self._look_up(here)
            if _misses(looked) and here != elsewhere:
                looked = min(looked, self._look_up(elsewhere), key=_missing_tokens)
            found += looked
        return found

    def serve(self, found: Sequence[Looked], progress: OnProgress | None = None) -> list[tuple[Encoding, Obtained]]:
        """The encodings that were found for a prompt, those that are not stored encoded now. See `obtain`."""
        encodings = [encoding for encoding, _ in found]
        stored = [Obtained(states) for _, states in found if isinstance(states, KVStates)]
        return list(zip(encodings, _Obtaining(self, encodings, progress, stored).all(), strict=True))

    def _exact(self, prompt: LaidOut) -> list[Looked]:
        stored: list[Looked] = []
        for encoding in prompt.exact:
            found = self.lookup(encoding)
            if isinstance(found, Miss):
                break
            stored.append((encoding, found))
        return stored

    def _look_up(self, encodings: Sequence[Encoding]) -> list[Looked]:
        return [(encoding, self.lookup(encoding)) for encoding in encodings]

    def size_of_missing(self, encodings: Sequence[Encoding]) -> EncodingSize:
        """What obtaining all of them would still compute and write."""
        missing = [encoding for encoding, _ in _misses(self._look_up(encodings))]
        nbytes = sum(self._file_bytes(encoding) for encoding in missing if encoding.stored)
        return EncodingSize(sum(len(encoding.token_ids) for encoding in missing), nbytes)

    def _file_bytes(self, encoding: Encoding) -> int:
        positions = encoding.encoded_position_ids
        return file_bytes(states_bytes(self._backend.kv_layout, positions), len(positions))

    def encode(self, encodings: Sequence[Encoding], progress: OnProgress | None = None) -> EncodeReport:
        """Encode what is not stored, and report it."""
        started = time.perf_counter()
        obtained = self.obtain(encodings, progress)
        pairs = list(zip(encodings, obtained, strict=True))
        return EncodeReport(
            encoded=tuple(e.label for e, o in pairs if o.miss is not None and o.stored),
            reused=tuple(e.label for e, o in pairs if o.miss is None),
            unstored=tuple(e.label for e, o in pairs if o.miss is not None and not o.stored),
            tokens=sum(o.computed_tokens for o in obtained),
            nbytes=sum(o.states.array.nbytes for o in obtained if o.miss is not None and o.stored),
            seconds=time.perf_counter() - started,
        )

    def obtain(self, encodings: Sequence[Encoding], progress: OnProgress | None = None) -> list[Obtained]:
        """The states of each, encoded now if they are not stored; every token is computed at most once.

        Two processes that want the same encoding compute it once. A store that cannot be written costs a warning.

        Args:
            progress: in tokens of all that are missing, with the label of the one computed. What it raises ends the
                work.
        """
        return _Obtaining(self, encodings, progress).all()

    def compute(self, encoding: Encoding, context: Sequence[KVStates], on_tokens: OnTokens) -> Any:
        """The array of an encoding's states, computed over the states of its context."""
        spans = tuple(
            Span(s, 0, p.tokens, int(p.encoding.encoded_position_ids[0] - s.position_ids[0]))
            for s, p in zip(context, encoding.context, strict=True)
        )
        # Context in position order makes the states equal to full prefill's, bit for bit.
        plan = Plan(spans, encoding.token_ids, encoding.run_position_ids, exact=True)
        with closing(self._backend.new_context(plan.cached_tokens + len(plan.token_ids) + 1)) as live:
            return live.encode(plan, encoding.keep, on_tokens)

    def put(self, encoding: Encoding, array: Any) -> KVStates:
        """Store states.

        Raises:
            StoreError: that cannot be done.
        """
        return self._store.put(
            encoding.key, self._backend.kv_layout, array, encoding.kept_token_ids, encoding.encoded_position_ids,
            model=self._model, schema=encoding.schema, module=encoding.label,
        )  # fmt: skip

    def lock(self, encoding: Encoding) -> Any:
        """Hold an encoding, so that one thread of one process encodes it."""
        return self._store.lock(encoding.key)


class _Obtaining:
    """One call of `Encoder.obtain`. What it computed stays in memory until its end, stored or not: encodings that are
    the context of others are wanted again."""

    def __init__(
        self,
        encoder: Encoder,
        encodings: Sequence[Encoding],
        progress: OnProgress | None,
        found: Iterable[Obtained] = (),
    ) -> None:
        self._encoder = encoder
        self._encodings = encodings
        self._progress = progress
        self._warned = False
        self._at_hand = {obtained.states.key: obtained for obtained in found}  # without what they took
        self._done_tokens = 0
        self._total_tokens: int | None = None

    def all(self) -> list[Obtained]:
        return [self._timed(encoding) for encoding in self._encodings]

    def _timed(self, encoding: Encoding) -> Obtained:
        """The states, with what they took: nothing if they were made for another encoding before."""
        started, before = time.perf_counter(), self._done_tokens
        obtained = self._get(encoding)
        computed = self._done_tokens - before
        encode_ms = (time.perf_counter() - started) * 1e3 if computed else 0.0
        return replace(obtained, computed_tokens=computed, encode_ms=encode_ms)

    def _get(self, encoding: Encoding) -> Obtained:
        at_hand = self._at_hand.get(encoding.key)
        if at_hand is not None:
            return at_hand
        found = self._encoder.lookup(encoding)
        if not isinstance(found, Miss):
            return Obtained(found)
        if not encoding.stored:
            return self._encode(encoding, found.reason)
        with self._encoder.lock(encoding):
            again = self._encoder.lookup(encoding)  # another process may have been faster
            return self._encode(encoding, found.reason) if isinstance(again, Miss) else Obtained(again)

    def _encode(self, encoding: Encoding, reason: str) -> Obtained:
        self._report(encoding, 0)
        context = [self._get(prefix.encoding).states for prefix in encoding.context]
        array = self._encoder.compute(encoding, context, lambda tokens: self._report(encoding, tokens))
        made = self._at_hand[encoding.key] = Obtained(self._stored(encoding, array), reason)
        return made

    def _stored(self, encoding: Encoding, array: Any) -> KVStates:
        """Store the states; where that cannot be done they live in memory for this call."""
        if encoding.stored:
            try:
                return self._encoder.put(encoding, array)
            except StoreError as exc:
                if not self._warned:  # what keeps one from being stored mostly keeps the others too
                    log.warning("%s: states are not kept: %s", encoding.label, exc)
                self._warned = True
        return KVStates(encoding.key, array, encoding.kept_token_ids, encoding.encoded_position_ids)

    def _report(self, encoding: Encoding, tokens: int) -> None:
        self._done_tokens += tokens
        if self._progress is None:
            return
        if self._total_tokens is None:  # only when there is something to report: a prompt that hits looks each up once
            self._total_tokens = self._encoder.size_of_missing(self._encodings).tokens
        self._progress(Progress(self._done_tokens, self._total_tokens, encoding.label))


def _misses(looked: Iterable[Looked]) -> list[tuple[Encoding, Miss]]:
    return [(encoding, found) for encoding, found in looked if isinstance(found, Miss)]


def _missing_tokens(looked: Iterable[Looked]) -> int:
    return sum(encoding.tokens for encoding, _ in _misses(looked))
