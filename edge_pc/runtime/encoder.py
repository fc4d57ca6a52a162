"""Gets the KV states of encodings: from the store, or by computing and storing them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edge_pc.backends.base import Backend, KVStates, Plan, Progress, Span
from edge_pc.compose.encodings import Encoding, SchemaEncodings
from edge_pc.compose.schema_layout import ROOT, SchemaLayout
from edge_pc.errors import StoreError
from edge_pc.store import Miss, StateStore

log = logging.getLogger("edge_pc")


EncodeCallback = Callable[["EncodeProgress"], None]


@dataclass(frozen=True, slots=True)
class EncodeProgress:
    """How far the work is that was not stored: the modules being computed, and tokens done of those to compute."""

    module: str
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class EncodingSize:
    """What `encode` would still compute and write."""

    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EncodeReport:
    """What `encode` did.

    Attributes:
        encoded, reused: labels of the encodings that were made, and of those that were there.
        tokens: computed.
        nbytes: of the states made.
        seconds: it took.
    """

    encoded: tuple[str, ...]
    reused: tuple[str, ...]
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


class Encoder:
    """Looks encodings of one schema up and encodes what is missing.

    Args:
        backend: computes.
        store: keeps.
        layout: the schema.
        encodings: the schema's.
        model: the model's name, for people who list the store.
    """

    def __init__(
        self, backend: Backend, store: StateStore, layout: SchemaLayout, encodings: SchemaEncodings, model: str
    ) -> None:
        self._backend = backend
        self._store = store
        self._layout = layout
        self._encodings = encodings
        self._model = model

    def lookup(self, encoding: Encoding) -> KVStates | Miss:
        """The stored states, or why there are none."""
        return self._store.lookup(
            encoding.key, self._backend.kv_layout, encoding.kept_token_ids, encoding.kept_position_ids
        )

    def missing(self) -> EncodingSize:
        """What `encode_all` would still compute and write."""
        return self._size_of_missing(self._encodings.of_schema())

    def _size_of_missing(self, encodings: Sequence[Encoding]) -> EncodingSize:
        missing = [encoding for encoding in encodings if isinstance(self.lookup(encoding), Miss)]
        layout = self._backend.kv_layout
        nbytes = sum(layout.nbytes(encoding.kept_position_ids) for encoding in missing)
        return EncodingSize(sum(len(encoding.token_ids) for encoding in missing), nbytes)

    def encode_all(self, progress: EncodeCallback | None = None) -> EncodeReport:
        """Encode all that a schema's prompts may reuse, and report it."""
        started = time.perf_counter()
        encodings = self._encodings.of_schema()
        obtained = self.obtain_all(encodings, progress)
        labels = [self.label(encoding) for encoding in encodings]
        return EncodeReport(
            encoded=tuple(label for label, o in zip(labels, obtained, strict=True) if o.miss is not None),
            reused=tuple(label for label, o in zip(labels, obtained, strict=True) if o.miss is None),
            tokens=sum(o.computed_tokens for o in obtained),
            nbytes=sum(o.states.array.nbytes for o in obtained if o.miss is not None),
            seconds=time.perf_counter() - started,
        )

    def obtain_all(self, encodings: Sequence[Encoding], progress: EncodeCallback | None = None) -> list[Obtained]:
        """As `obtain`, for several; `progress` counts the tokens of all that are missing."""
        done, total = 0, None
        obtained = []
        for index, encoding in enumerate(encodings):

            def report(tokens: int, index: int = index) -> None:
                nonlocal done, total
                if progress is None:
                    return
                if total is None:  # only when there is something to report: a prompt that hits looks each up once
                    total = self._size_of_missing(encodings[index:]).tokens
                done += tokens
                progress(EncodeProgress(self.label(encodings[index]), done, total))

            obtained.append(self.obtain(encoding, report))
        return obtained

    def obtain(self, encoding: Encoding, progress: Progress | None = None) -> Obtained:
        """The states, encoded now if they are not stored.

        Two processes that want the same encoding compute it once. A store that cannot be written costs a warning.
        """
        found = self.lookup(encoding)
        if not isinstance(found, Miss):
            return Obtained(found)
        with self._store.lock(encoding.key):
            again = self.lookup(encoding)
            if not isinstance(again, Miss):
                return Obtained(again)
            return self._encode(encoding, found.reason, progress)

    def _encode(self, encoding: Encoding, reason: str, progress: Progress | None) -> Obtained:
        started = time.perf_counter()
        above = [self._obtain_context(self._encodings.single(context.path)) for context in encoding.context]
        spans = tuple(Span(o.states, 0, c.tokens) for o, c in zip(above, encoding.context, strict=True))
        # Context in position order makes the states equal to full prefill's, to the last bit.
        plan = Plan(spans, encoding.token_ids, encoding.position_ids, exact=True)
        with closing(self._backend.new_context(plan.cached_tokens + len(plan.token_ids) + 1)) as context:
            array = context.encode(plan, encoding.keep, progress)
        return Obtained(
            self._keep(encoding, array),
            reason,
            computed_tokens=len(plan.token_ids) + sum(o.computed_tokens for o in above),
            encode_ms=(time.perf_counter() - started) * 1e3,
        )

    def _keep(self, encoding: Encoding, array: NDArray[Any]) -> KVStates:
        """Store the states; where that cannot be done they live in memory for this prompt."""
        cells = (encoding.kept_token_ids, encoding.kept_position_ids)
        if self._stored(encoding):
            try:
                return self._store.put(
                    encoding.key, self._backend.kv_layout, array, *cells,
                    model=self._model, schema=self._layout.name, module=self.label(encoding),
                )  # fmt: skip
            except StoreError as exc:
                log.warning("%s: states are not kept: %s", self.label(encoding), exc)
        return KVStates(encoding.key, array, *cells)

    def _obtain_context(self, encoding: Encoding) -> Obtained:
        if self._stored(encoding):
            return self.obtain(encoding)
        return self._encode(encoding, 'cache="false"', None)

    def _stored(self, encoding: Encoding) -> bool:
        return all(self._layout.modules[path].cache for path in encoding.paths)

    def label(self, encoding: Encoding) -> str:
        """How people know the encoding: its modules' paths, the anonymous text under the schema's name."""
        return " + ".join(path if path != ROOT else self._layout.name for path in encoding.paths)
