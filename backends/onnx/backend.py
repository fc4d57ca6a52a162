"""The ONNX Runtime backend: an exported model, and contexts that each have an arena."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import (
    MIN_COMPUTED_TOKENS,
    BackendOptions,
    DecodeStep,
    IntArray,
    KVLayout,
    Logits,
    Plan,
    Prefill,
    Progress,
)
from edge_pc.backends.onnx.arena import Arena, check_assembly, tokens_per_page
from edge_pc.backends.onnx.forward import Forward, open_session
from edge_pc.errors import OptionError
from edge_pc.models.description import describe
from edge_pc.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnxruntime

# Tokens forwarded at a time. Results do not depend on it (tested), peak memory does; larger chunks were slower by 5 to
# 15 % on 2 cores of a Xeon with AVX512-VNNI, smaller ones no faster.
CHUNK_TOKENS = 256

# MatMulNBits works on tiles of this many rows, and a row alone in a tile goes through another kernel: its states differ
# in the last bits from the same row's in other company (measured: rows 1, 129, 257, 385 and 513 of a call).
ROW_TILE = 128

# Cells that every arena has at least, so that one serves prompt after prompt; only what is used takes memory.
ARENA_CELLS = 8192

# Slots behind the placed cells whose memory stays with an idle context, for the next prompt's own text. With more of
# them a prompt of other modules waits longer until they are given back (measured: 1.5 ms for 512).
IDLE_SLOTS = 256

KV_STORAGE = ("float32", "float16")


class OnnxBackend:
    """An exported model, opened with ONNX Runtime.

    Args:
        folder: what `edge-pc export` wrote.
        options: threads, execution provider, assembly, dtype of stored states.

    Raises:
        ModelError: the folder is no exported model, or the graph cannot be loaded.
        MissingDependencyError: no such execution provider.
        OptionError: an option's value is not known.
    """

    name = "onnx"

    def __init__(self, folder: Path, options: BackendOptions = BackendOptions()) -> None:
        if options.kv_storage not in KV_STORAGE:
            raise OptionError(f"kv_storage is {options.kv_storage!r}, expected one of {', '.join(KV_STORAGE)}")
        check_assembly(options.assembly)
        with ThreadPoolExecutor(1) as pool:  # the session takes longest to open, and does not hold the interpreter
            session = pool.submit(
                open_session, folder, threads=options.threads, provider=options.provider, verbose=options.verbose
            )
            described = describe(folder)
            self._session = session.result()
        self.spec = described.spec
        self.tokenizer = described.tokenizer
        self.chat_template = described.chat_template
        self.kv_layout = kv_layout(self.spec, options.kv_storage)
        self._assembly = options.assembly
        # Two forwards at once would share the same cores; one at a time is as fast.
        self._running = threading.Lock()
        self._idle: list[OnnxContext] = []

    def new_context(self, capacity: int) -> OnnxContext:
        """A context with room for at least `capacity` cells."""
        capacity = max(capacity, min(ARENA_CELLS, self.spec.max_positions))
        with self._running:
            for context in self._idle:
                if context.capacity >= capacity:
                    self._idle.remove(context)
                    return context
        return OnnxContext(self, self._session, self._running, capacity, self._assembly)

    def take_back(self, context: OnnxContext) -> None:
        """Keep one closed context: the cells that its last prompt placed are likely wanted again."""
        with self._running:
            self._idle = [context]

    def decode(self, steps: Sequence[DecodeStep]) -> list[Logits]:
        return [step.context.decode(step.token_id, step.position_id) for step in steps]  # type: ignore[attr-defined]

    def close(self) -> None:
        self._idle.clear()
        del self._session


class OnnxContext:
    """One live prompt in its own arena."""

    def __init__(
        self,
        backend: OnnxBackend,
        session: onnxruntime.InferenceSession,
        running: threading.Lock,
        capacity: int,
        assembly: str,
    ) -> None:
        self._backend = backend
        self._running = running
        self._arena = Arena(backend.kv_layout, capacity, assembly)
        self._forward = Forward(session, backend.spec, self._arena)
        self._dtype = np.dtype(backend.kv_layout.dtype)

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    def prefill(self, plan: Plan, progress: Progress | None = None) -> Prefill:
        """Place the plan's spans, compute its run; the logits are of the run's last token."""
        started = time.perf_counter()
        self._arena.place(plan.spans, exact=plan.exact)
        placed = time.perf_counter()
        first = self._arena.cells
        for part in chunks(len(plan.token_ids)):
            with self._running:
                logits = self._forward(plan.token_ids[part], plan.position_ids[part])
            if progress:
                progress(part.stop - part.start)
        return Prefill(
            logits,
            computed_tokens=self._arena.cells - first,
            assembly_ms=(placed - started) * 1e3,
            forward_ms=(time.perf_counter() - placed) * 1e3,
        )

    def encode(self, plan: Plan, keep: IntArray, progress: Progress | None = None) -> NDArray[Any]:
        if len(plan.token_ids) < MIN_COMPUTED_TOKENS:
            # A second row makes it the kernel of longer runs; the first never sees it.
            position_ids: IntArray = np.append(plan.position_ids, plan.position_ids[-1] + 1).astype(np.int32)
            plan = Plan(plan.spans, np.repeat(plan.token_ids, 2), position_ids)
        self.prefill(plan, progress)
        layout = self._backend.kv_layout
        positions = plan.position_ids[keep]
        states = np.zeros(layout.array_shape(positions), dtype=self._dtype)
        row = layout.lead(positions)
        for cells in np.split(keep, np.flatnonzero(np.diff(keep) != 1) + 1):  # slices copy faster than indices
            slot = plan.cached_tokens + int(cells[0])
            states[:, :, :, row : row + len(cells)] = self._arena.kv[:, :, :, slot : slot + len(cells)]
            row += len(cells)
        return states

    def decode(self, token_id: int, position_id: int) -> Logits:
        """Compute one more token behind all present cells; logits float32 `[vocab]`."""
        with self._running:
            return self._forward(np.array([token_id], dtype=np.int32), np.array([position_id], dtype=np.int32))

    def close(self) -> None:
        self._arena.trim(IDLE_SLOTS)
        self._backend.take_back(self)


def kv_layout(spec: ModelSpec, dtype: str) -> KVLayout:
    """`[layers, 2, kv_heads, tokens, head_dim]`, each head's tokens starting on a page."""
    page_tokens = tokens_per_page(spec.head_dim)
    return KVLayout(
        name=f"onnx-2-{dtype}-{page_tokens}",
        dtype=dtype,
        shape=(spec.layers, 2, spec.kv_heads, 1, spec.head_dim),
        token_axis=3,
        token_multiple=page_tokens,
        congruent=True,
    )


def chunks(tokens: int) -> Iterator[slice]:
    """Cuts a run into chunks that leave no row alone in a tile, unless the run is a single token."""
    start = 0
    while start < tokens:
        size = min(CHUNK_TOKENS, tokens - start)
        if tokens - start - size == 1:
            size -= 1
        elif size > 1 and size % ROW_TILE == 1:
            size -= 2
        yield slice(start, start + size)
        start += size
