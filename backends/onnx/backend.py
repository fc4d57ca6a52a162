"""The ONNX Runtime backend: an exported model, and contexts that each have an arena."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edge_pc.backends.base import DecodeStep, IntArray, Logits, OnTokens, Plan, Prefill
from edge_pc.backends.onnx.arena import Arena
from edge_pc.backends.onnx.attention import MAX_QUERIES, mean_attention
from edge_pc.backends.onnx.chunks import chunks, with_companion, with_last_cell
from edge_pc.backends.onnx.entry import OnnxOptions
from edge_pc.backends.onnx.forward import Forward, open_session
from edge_pc.backends.onnx.layout import paged_layout
from edge_pc.models.description import describe

if TYPE_CHECKING:
    import onnxruntime

# Cells that every arena has at least, so that one serves prompt after prompt; only what is used takes memory.
ARENA_CELLS = 8192

# Of a context's cells, how many may be computed again over those that were placed (0.15 are): both lie in the arena.
TWICE = 0.25

# Slots after the placed cells whose memory stays with an idle context, for the next prompt's own text. With more of
# them a prompt of other modules waits longer until they are given back (measured: 1.5 ms for 512).
IDLE_SLOTS = 256


class OnnxBackend:
    """An exported model, opened with ONNX Runtime.

    Args:
        folder: what `edge-pc export` wrote.
        options: threads, execution provider, assembly, dtype of stored states.

    Raises:
        ModelError: the folder is no exported model, or the graph cannot be loaded.
        MissingDependencyError: no such execution provider.
    """

    name = "onnx"

    def __init__(self, folder: Path, options: OnnxOptions = OnnxOptions()) -> None:
        with ThreadPoolExecutor(1) as pool:  # the session takes longest to open, and does not hold the interpreter
            session = pool.submit(
                open_session, folder, threads=options.threads, provider=options.provider, verbose=options.verbose
            )
            described = describe(folder)
            described.chat_template.prepare()
            self._session: onnxruntime.InferenceSession | None = session.result()
        self.spec = described.spec
        self.tokenizer = described.tokenizer
        self.chat_template = described.chat_template
        self.kv_layout = paged_layout(self.spec, options.kv_storage)
        self._assembly = options.assembly
        # Two forwards at once would share the same cores; one at a time is as fast.
        self._running = threading.Lock()
        self._idle: list[OnnxContext] = []

    def new_context(self, capacity: int) -> OnnxContext:
        """A context with room for at least `capacity` cells."""
        capacity = int((1 + TWICE) * max(capacity, min(ARENA_CELLS, self.spec.max_positions)))
        with self._running:
            for context in self._idle:
                if context.capacity >= capacity:
                    self._idle.remove(context)
                    return context
        arena = Arena(self.kv_layout, self.spec.position, capacity, self._assembly)
        return OnnxContext(self, Forward(self._session, self.spec, arena), arena, self._running)

    def take_back(self, context: OnnxContext) -> None:
        """Keep one closed context: the cells that its last prompt placed are likely wanted again."""
        with self._running:
            self._idle = [context]

    def decode(self, steps: Sequence[DecodeStep[OnnxContext]]) -> list[Logits]:
        return [step.context.decode(step.token_id, step.position_id) for step in steps]

    def close(self) -> None:
        self._idle.clear()
        self._session = None


class OnnxContext:
    """One live prompt in its own arena.

    Args:
        backend: what it goes back to when it is closed.
        forward: computes over `arena`.
        running: held while it does.
    """

    def __init__(self, backend: OnnxBackend, forward: Forward, arena: Arena, running: threading.Lock) -> None:
        self._backend = backend
        self._forward = forward
        self._arena = arena
        self._running = running

    @property
    def capacity(self) -> int:
        return self._arena.capacity

    def prefill(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """Place the plan's spans and compute its run."""
        plan = with_last_cell(plan)
        started = time.perf_counter()
        self._arena.place(plan.spans, exact=plan.exact)
        return self._compute(plan, started, on_tokens)

    def append(self, plan: Plan, on_tokens: OnTokens | None = None) -> Prefill:
        """Place the plan's spans after what is there and compute its run."""
        plan = with_last_cell(plan)
        started = time.perf_counter()
        self._arena.extend(plan.spans, exact=plan.exact)
        if len(plan.token_ids) == 1 and self._arena.cells:
            plan = self._with_last_present_cell(plan)
        return self._compute(plan, started, on_tokens)

    def attention(self, plan: Plan) -> NDArray[np.float32]:
        """Averaged over the plan's last tokens, all heads, and the layers whose queries the graph gives."""
        self._arena.place(plan.spans, exact=plan.exact)
        cells = self._arena.cells
        token_ids, position_ids = plan.token_ids[-MAX_QUERIES:], plan.position_ids[-MAX_QUERIES:]
        try:
            with self._running:
                queries = self._forward.queries(token_ids, position_ids)
        finally:
            self._arena.forget(cells)
        keys = {layer: self._arena.kv[layer, 0, :, :cells] for layer in queries}
        weights = mean_attention(queries, keys)
        slots = np.argsort(self._arena.position_ids[:cells])  # a piece's cells may lie in another order
        order = np.argsort(np.concatenate([span.position_ids for span in plan.spans]))
        by_span = np.empty_like(weights)
        by_span[order] = weights[slots]
        return by_span

    def truncate(self, position_id: int) -> None:
        self._arena.truncate(position_id)

    def encode(self, plan: Plan, keep: IntArray, on_tokens: OnTokens | None = None) -> NDArray[Any]:
        plan = with_companion(plan)
        started = time.perf_counter()
        self._arena.place(plan.spans, exact=plan.exact)
        self._compute(plan, started, on_tokens)
        return self.read(plan.position_ids[keep])

    def read(self, position_ids: IntArray) -> NDArray[Any]:
        layout = self._backend.kv_layout
        states = np.zeros(layout.array_shape(position_ids), dtype=layout.dtype)
        row = layout.lead(position_ids)
        slots = self._arena.slots_of(position_ids)
        for part in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):  # slices copy faster than indices
            cells = slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0)
            states[:, :, :, row : row + len(part)] = self._arena.kv[:, :, :, cells]
            row += len(part)
        return states

    def fork(self, capacity: int) -> OnnxContext:
        """Pages that are mapped are mapped again, so that both share them; what was computed is copied."""
        forked = self._backend.new_context(capacity)
        forked._arena.copy_of(self._arena)
        return forked

    def decode(self, token_id: int, position_id: int) -> Logits:
        """Compute one more token after all present cells; logits float32 `[vocab]`."""
        with self._running:
            return self._forward(np.array([token_id], dtype=np.int32), np.array([position_id], dtype=np.int32))

    def close(self) -> None:
        self._arena.trim(IDLE_SLOTS)
        self._backend.take_back(self)

    def _compute(self, plan: Plan, started: float, on_tokens: OnTokens | None) -> Prefill:
        """Compute the run over what is placed; the logits are of its last token."""
        placed = time.perf_counter()
        first = self._arena.cells
        hidden = self._arena.hide(plan.position_ids)
        for part in chunks(len(plan.token_ids)):
            with self._running:
                logits = self._forward(plan.token_ids[part], plan.position_ids[part])
            if on_tokens:
                on_tokens(part.stop - part.start)
        computed = self._arena.cells - first
        if len(hidden):
            self._arena.settle(hidden, first)
        return Prefill(
            logits,
            computed_tokens=computed,
            assembly_ms=(placed - started) * 1e3,
            forward_ms=(time.perf_counter() - placed) * 1e3,
        )

    def _with_last_present_cell(self, plan: Plan) -> Plan:
        """The plan with the last cell that is there computed again, see `chunks.py`."""
        last = int(np.argmax(self._arena.position_ids[: self._arena.cells]))
        token_id, position_id = self._arena.token_ids[last], self._arena.position_ids[last]
        self._arena.truncate(int(position_id))
        token_ids, position_ids = np.append(token_id, plan.token_ids), np.append(position_id, plan.position_ids)
        return Plan((), token_ids, position_ids, plan.exact)
