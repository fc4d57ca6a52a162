"""The ONNX Runtime backend's contexts: rows, and prompts that grow and shrink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_pc.backends.base import IntArray, KVStates, Plan, Span
from edge_pc.backends.onnx.backend import OnnxBackend, OnnxContext
from edge_pc.backends.onnx.chunks import CHUNK_TOKENS, ROW_TILE, chunks


@pytest.fixture
def backend(tiny_model: Path) -> Iterator[OnnxBackend]:
    opened = OnnxBackend(tiny_model)
    yield opened
    opened.close()


IDS = np.random.default_rng(0).integers(10, 200, 400).astype(np.int32)


def run(start: int, stop: int, spans: tuple[Span, ...] = ()) -> Plan:
    """Tokens `[start, stop)` of `IDS` at their positions."""
    return Plan(spans, IDS[start:stop], np.arange(start, stop, dtype=np.int32), exact=True)


def encoded(backend: OnnxBackend, start: int, stop: int, spans: tuple[Span, ...] = ()) -> Span:
    context = backend.new_context(400)
    array = context.encode(run(start, stop, spans), np.arange(stop - start, dtype=np.int32))
    context.close()
    positions = np.arange(start, stop, dtype=np.int32)
    return Span(KVStates(f"{start}to{stop}", array, IDS[start:stop], positions), 0, stop - start)


def full_logits(backend: OnnxBackend, stop: int) -> IntArray:
    context = backend.new_context(400)
    logits = context.prefill(run(0, stop)).logits
    context.close()
    return logits


@pytest.fixture
def context(backend: OnnxBackend) -> Iterator[OnnxContext]:
    opened = backend.new_context(400)
    yield opened
    opened.close()


@pytest.mark.parametrize("cut", [1, 2, 100, 128, 129, 198, 199])
def test_a_prompt_in_two_steps_is_the_prompt_in_one(backend: OnnxBackend, context: OnnxContext, cut: int) -> None:
    context.prefill(run(0, cut))
    np.testing.assert_array_equal(context.append(run(cut, 200)).logits, full_logits(backend, 200))


@pytest.mark.parametrize("new", [1, 2, 30])
def test_stored_states_are_added_after_computed_tokens(backend: OnnxBackend, context: OnnxContext, new: int) -> None:
    first = encoded(backend, 0, 100)
    second = encoded(backend, 140, 250, (first, encoded(backend, 100, 140, (first,))))
    context.prefill(run(100, 140, (first,)))
    result = context.append(run(250, 250 + new, (second,)))
    np.testing.assert_array_equal(result.logits, full_logits(backend, 250 + new))
    assert result.computed_tokens == max(new, 2), "a row alone is computed with the cell before it"


@pytest.mark.parametrize("position", [1, 2, 60, 100, 101, 130, 199])
def test_what_was_dropped_leaves_no_trace(backend: OnnxBackend, context: OnnxContext, position: int) -> None:
    context.prefill(run(100, 200, (encoded(backend, 0, 100),)))
    for token in (7, 8, 9):
        context.decode(token, 200 + token - 7)
    context.truncate(position)
    np.testing.assert_array_equal(context.append(run(position, 230)).logits, full_logits(backend, 230))


def test_computed_cells_take_the_place_of_stored_ones(backend: OnnxBackend, context: OnnxContext) -> None:
    """Cells that were encoded with nothing before them, all computed again, are those of full prefill."""
    apart = encoded(backend, 100, 180)
    plan = run(100, 200, (encoded(backend, 0, 100), apart))
    for again in range(2):
        result = context.prefill(plan)
        np.testing.assert_allclose(result.logits, full_logits(backend, 200), atol=1e-4)
        assert result.computed_tokens == 100
        after = context.decode(7, 200)
        context.prefill(run(0, 200))
        np.testing.assert_allclose(after, context.decode(7, 200), atol=1e-4, err_msg=f"time {again}")


def test_some_computed_cells(backend: OnnxBackend, context: OnnxContext) -> None:
    """The same as without the cells whose place they take."""
    apart = encoded(backend, 100, 180)
    some = np.array([100, 101, 130, 131, 150, 179, *range(180, 200)], dtype=np.int32)
    first = encoded(backend, 0, 100)
    whole = context.prefill(Plan((first, apart), IDS[some], some)).logits
    left = [Span(apart.states, start, stop) for start, stop in ((2, 30), (32, 50), (51, 79))]
    cut = context.prefill(Plan((first, *left), IDS[some], some)).logits
    np.testing.assert_allclose(whole, cut, atol=1e-4)
    assert np.abs(whole - context.prefill(Plan((first, apart), IDS[180:200], some[-20:])).logits).max() > 1e-2


def test_attention_is_that_of_the_run(backend: OnnxBackend, context: OnnxContext) -> None:
    first, apart = encoded(backend, 0, 100), encoded(backend, 100, 180)
    weights = context.attention(run(180, 200, (apart, first)))
    assert weights.shape == (180,)
    assert weights.sum() == pytest.approx(1, abs=1e-4)
    in_order = context.attention(run(180, 200, (first, apart)))
    np.testing.assert_allclose(weights, np.concatenate([in_order[100:], in_order[:100]]), atol=1e-6)
    logits = context.prefill(run(180, 200, (first, apart))).logits
    np.testing.assert_array_equal(logits, context.prefill(run(180, 200, (first, apart))).logits)


def test_one_new_token_alone(backend: OnnxBackend, context: OnnxContext) -> None:
    result = context.prefill(run(100, 101, (encoded(backend, 0, 100),)))
    np.testing.assert_array_equal(result.logits, full_logits(backend, 101))
    assert result.computed_tokens == 2


def test_work_that_was_stopped_leaves_a_context_that_can_be_used(backend: OnnxBackend, context: OnnxContext) -> None:
    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        context.prefill(run(0, 300), stop)
    np.testing.assert_array_equal(context.prefill(run(0, 200)).logits, full_logits(backend, 200))


@pytest.mark.parametrize("tokens", [1, 2, 3, *range(120, 136), *range(250, 264), *range(505, 520), 641, 1025, 2049])
def test_no_chunk_leaves_a_row_alone_in_a_tile(tokens: int) -> None:
    parts = list(chunks(tokens))
    sizes = [part.stop - part.start for part in parts]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(tokens))
    assert max(sizes) <= CHUNK_TOKENS
    assert tokens == 1 or all(size % ROW_TILE != 1 for size in sizes)
