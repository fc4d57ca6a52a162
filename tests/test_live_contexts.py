"""What every backend's contexts do alike: give cells back, and go on in two directions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_pc.backends import open_backend
from edge_pc.backends.base import DecodeStep, IntArray, KVStates, Plan, Span
from edge_pc.errors import StatesError

needs_llamacpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
IDS = np.random.default_rng(0).integers(10, 200, 400).astype(np.int32)


@pytest.fixture(params=["onnx", pytest.param("llamacpp", marks=needs_llamacpp)])
def backend(request: Any, tiny_model: Path, tiny_gguf: Path) -> Iterator[Any]:
    model = tiny_model if request.param == "onnx" else tiny_gguf
    with closing(open_backend(request.param, model, {"threads": 1})) as opened:
        yield opened


def positions(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def run(start: int, stop: int, spans: tuple[Span, ...] = ()) -> Plan:
    """Tokens `[start, stop)` of `IDS` at their positions."""
    return Plan(spans, IDS[start:stop], positions(start, stop), exact=True)


def span_of(context: Any, start: int, stop: int) -> Span:
    """Cells read from a context."""
    where = positions(start, stop)
    return Span(KVStates(f"{start}to{stop}", context.read(where), IDS[start:stop], where), 0, stop - start)


@pytest.fixture
def context(backend: Any) -> Iterator[Any]:
    with closing(backend.new_context(400)) as opened:
        yield opened


def test_cells_that_were_read_serve_another_context(backend: Any, context: Any) -> None:
    logits = context.prefill(run(0, 200)).logits
    wanted = backend.decode([DecodeStep(context, int(IDS[200]), 200)])[0]
    first, second = span_of(context, 0, 77), span_of(context, 77, 190)
    with closing(backend.new_context(400)) as other:
        np.testing.assert_array_equal(other.prefill(run(190, 200, (first, second))).logits, logits)
        np.testing.assert_array_equal(backend.decode([DecodeStep(other, int(IDS[200]), 200)])[0], wanted)


def test_cells_with_gaps_between_them(backend: Any, context: Any) -> None:
    where = np.concatenate([positions(3, 40), positions(60, 90)])
    context.prefill(Plan((), IDS[where], where))
    states = KVStates("gaps", context.read(where[:50]), IDS[where[:50]], where[:50])
    with closing(backend.new_context(400)) as other:
        np.testing.assert_array_equal(other.read(where[:0]), context.read(where[:0]))
        logits = other.prefill(Plan((Span(states, 0, 50),), IDS[where[50:]], where[50:], exact=True)).logits
    np.testing.assert_allclose(logits, context.prefill(Plan((), IDS[where], where, exact=True)).logits, atol=1e-4)


def test_cells_that_are_not_there_cannot_be_read(context: Any) -> None:
    context.prefill(run(0, 50))
    with pytest.raises(StatesError):
        context.read(positions(40, 60))


def test_a_fork_goes_on_as_the_first_does(backend: Any, context: Any) -> None:
    context.prefill(run(100, 150, (stored(backend, 0, 100),)))
    wanted = context.append(run(150, 170)).logits
    context.truncate(150)
    with closing(context.fork(400)) as other:
        np.testing.assert_array_equal(other.append(run(150, 170)).logits, wanted)
        np.testing.assert_array_equal(context.append(run(150, 170)).logits, wanted)


def stored(backend: Any, start: int, stop: int) -> Span:
    """Cells that were encoded."""
    with closing(backend.new_context(400)) as context:
        array = context.encode(run(start, stop), positions(0, stop - start))
    return Span(KVStates(f"{start}", array, IDS[start:stop], positions(start, stop)), 0, stop - start)


@pytest.mark.parametrize("cut", [1, 60, 100, 130])
def test_neither_sees_what_the_other_does(backend: Any, context: Any, cut: int) -> None:
    context.prefill(run(100, 150, (stored(backend, 0, 100),)))
    with closing(context.fork(400)) as other:
        other.truncate(cut)
        changed = other.append(Plan((), IDS[300:340], positions(cut, cut + 40))).logits
        whole = np.concatenate([IDS[:cut], IDS[300:340]])
        np.testing.assert_array_equal(context.append(run(150, 170)).logits, full(backend, IDS[:170]))
        np.testing.assert_array_equal(changed, full(backend, whole))
        context.truncate(0)
        more = other.append(Plan((), IDS[340:350], positions(cut + 40, cut + 50))).logits
        np.testing.assert_array_equal(more, full(backend, np.concatenate([whole, IDS[340:350]])))


def full(backend: Any, ids: IntArray) -> Any:
    """First-token logits of full prefill."""
    with closing(backend.new_context(400)) as context:
        return context.prefill(Plan((), ids, positions(0, len(ids)), exact=True)).logits


def test_a_fork_outlives_the_first(backend: Any, context: Any) -> None:
    with closing(backend.new_context(400)) as first:
        first.prefill(run(0, 150))
        other = first.fork(400)
    with closing(other):
        context.prefill(run(200, 300))
        np.testing.assert_array_equal(other.append(run(150, 170)).logits, full(backend, IDS[:170]))
    if hasattr(backend, "check"):
        backend.check()


def test_an_addition_that_was_stopped_leaves_what_was_there(backend: Any, context: Any) -> None:
    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    context.prefill(run(0, 100))
    with pytest.raises(KeyboardInterrupt):
        context.append(Plan((), IDS[200:390], positions(100, 290)), stop)
    context.truncate(100)
    np.testing.assert_array_equal(context.append(run(100, 200)).logits, full(backend, IDS[:200]))
