"""The arena: what is placed where, by mapping and by copying, and what is left of it."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from edge_pc.backends.base import KVStates, Span
from edge_pc.backends.onnx import arena as arena_module
from edge_pc.backends.onnx.arena import MAP_FROM_TOKENS_FRESH, MAP_FROM_TOKENS_WARM, Arena
from edge_pc.backends.onnx.layout import PagedLayout, tokens_per_page
from edge_pc.backends.onnx.pieces import in_position_order
from edge_pc.errors import ContextLengthError, StatesError
from edge_pc.models.positions import LearnedEncoding, RotaryEncoding
from edge_pc.models.rotation import rotate
from edge_pc.store import StateStore
from edge_pc.system.pages import can_map

LAYERS, HEADS, DIM = 2, 2, 64
PAGE = tokens_per_page(DIM)
LAYOUT = PagedLayout(LAYERS, HEADS, DIM, "float32", PAGE)
ROTARY = RotaryEncoding(tuple(100.0 ** (-i / 32) for i in range(32)), interleaved=False)

needs_mapping = pytest.mark.skipif(not can_map(), reason="this system cannot map files over memory")


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "states")


def states(store: StateStore, tokens: int, start: int, seed: int) -> KVStates:
    """Random states of `tokens` cells at positions from `start`, in the store."""
    ids, positions = np.arange(tokens, dtype=np.int32), np.arange(start, start + tokens, dtype=np.int32)
    array = np.zeros(LAYOUT.array_shape(positions), dtype=np.float32)
    lead = LAYOUT.lead(positions)
    array[:, :, :, lead : lead + tokens] = np.random.default_rng(seed).standard_normal((LAYERS, 2, HEADS, tokens, DIM))
    return store.put(f"key{seed}", LAYOUT, array, ids, positions, model="m", schema="s", module="x")


def check(arena: Arena, *spans: Span) -> None:
    """The arena's cells are exactly the spans' cells, whatever their order."""
    wanted = {int(p): (s.states, c) for s in spans for c, p in enumerate(s.position_ids, s.start)}
    assert sorted(arena.position_ids[: arena.cells].tolist()) == sorted(wanted)
    for slot, position in enumerate(arena.position_ids[: arena.cells].tolist()):
        source, cell = wanted[position]
        row = LAYOUT.lead(source.position_ids) + cell
        np.testing.assert_array_equal(arena.kv[:, :, :, slot], source.array[:, :, :, row])


@pytest.mark.parametrize("assembly", ["copy", pytest.param("map", marks=needs_mapping), "auto"])
@pytest.mark.parametrize("exact", [False, True])
def test_one_prompt_after_another(store: StateStore, assembly: str, exact: bool) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, assembly)
    a, b, c = states(store, 300, 0, 1), states(store, 2 * PAGE + 3, 300, 2), states(store, 5, 900, 3)
    whole = [Span(s, 0, len(s.position_ids)) for s in (a, b, c)]
    shorter = Span(a, 0, 299)
    for spans in (whole, whole, whole[:1], [shorter, *whole[1:]], whole[1:], [whole[2], whole[0]], []):
        arena.place(spans, exact=exact)
        check(arena, *spans)
        slots = take(arena, 40, 1000)
        arena.kv[:, :, :, slots] = 7.0  # what computing does
    assert store.verify() == [], "writing to the arena never reaches a file"


def take(arena: Arena, tokens: int, start: int) -> slice:
    """Slots for cells that are computed, at positions from `start` on."""
    positions = np.arange(start, start + tokens, dtype=np.int32)
    return arena.take(positions, positions)


def placed(arena: Arena) -> list[tuple[int, bool]]:
    return [(part.tokens, part.mapped) for part in arena.parts]


@needs_mapping
@pytest.mark.parametrize("exact", [False, True])
def test_without_gaps_all_is_mapped_in_position_order(store: StateStore, exact: bool) -> None:
    """Only the rows before a file's first whole page are copied."""
    arena = Arena(LAYOUT, ROTARY, 2048, "map")
    first, second = states(store, 5 * PAGE + 7, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 7, 2)
    arena.place([Span(first, 0, 5 * PAGE + 7), Span(second, 0, 3 * PAGE)], exact=exact)
    assert placed(arena) == [(5 * PAGE + 7, True), (PAGE - 7, False), (2 * PAGE + 7, True)]
    assert arena.position_ids[: arena.cells].tolist() == list(range(8 * PAGE + 7))


@needs_mapping
def test_after_a_gap_a_few_cells_of_the_end_come_first(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, "map")
    first, second = states(store, 5 * PAGE, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 3, 2)
    spans = [Span(first, 0, 5 * PAGE), Span(second, 0, 3 * PAGE)]
    arena.place(spans, exact=False)
    assert placed(arena) == [(5 * PAGE, True), (3, False), (PAGE - 3, False), (2 * PAGE, True)]
    check(arena, *spans)
    arena.place(spans, exact=True)
    assert placed(arena) == [(5 * PAGE, True), (3 * PAGE, False)]
    assert (np.diff(arena.position_ids[: arena.cells]) > 0).all()


@needs_mapping
@pytest.mark.parametrize("tokens", [MAP_FROM_TOKENS_FRESH, MAP_FROM_TOKENS_WARM - 1, MAP_FROM_TOKENS_WARM])
def test_what_was_placed_stays_however_it_would_be_placed_now(store: StateStore, tokens: int) -> None:
    """A short module is mapped into a fresh arena, and would be copied into one that has memory."""
    arena = Arena(LAYOUT, ROTARY, 2048)
    spans = [Span(states(store, tokens, 0, 1), 0, tokens)]
    arena.place(spans, exact=False)
    assert placed(arena) == [(tokens, True)]
    assert arena.place(spans, exact=False) == 0
    assert arena.place(spans, exact=True) == 0
    check(arena, *spans)


@needs_mapping
def test_short_modules_are_copied_where_there_is_memory(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048)
    arena.place([], exact=False)
    arena.kv[:, :, :, take(arena, 1000, 0)] = 1.0
    short, long = states(store, MAP_FROM_TOKENS_WARM - 1, 0, 1), states(store, MAP_FROM_TOKENS_WARM, 0, 2)
    arena.place([Span(short, 0, len(short.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM - 1, False)]
    arena.place([Span(long, 0, len(long.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM, True)]
    arena.place([Span(short, 0, len(short.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM - 1, True)], "mapped pages are no memory of the arena's own"


def test_what_is_in_place_is_not_placed_again(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048)
    a, b = states(store, 400, 0, 1), states(store, 20, 400, 2)
    assert arena.place([Span(a, 0, 400), Span(b, 0, 20)], exact=False) == 420
    assert arena.place([Span(a, 0, 400), Span(b, 0, 20)], exact=False) == 0
    assert arena.place([Span(a, 0, 400), Span(b, 0, 19)], exact=False) == 19


@needs_mapping
def test_an_interrupt_at_any_line_leaves_nothing_that_counts_as_placed(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, "map")
    a, b = states(store, 5 * PAGE + 7, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 7, 2)
    spans = [Span(a, 0, 5 * PAGE + 7), Span(b, 0, 3 * PAGE)]
    other = [Span(states(store, 4 * PAGE + 5, 0, 3), 0, 4 * PAGE + 5), Span(states(store, 40, 500, 4), 0, 40)]
    for line in range(0, 400, 3):
        arena.place(spans, exact=False)
        finished = interrupted_at(line, lambda: arena.place(other, exact=False))
        arena.place(spans, exact=False)
        check(arena, *spans)
        if finished:
            return
    pytest.fail("the work has more lines than were tried")


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Interrupt `work` at the given line of the arena that it runs; whether it had ended before."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != arena_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return True


@pytest.mark.parametrize("assembly", ["copy", pytest.param("map", marks=needs_mapping)])
def test_cells_are_added_after_those_that_are_there(store: StateStore, assembly: str) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, assembly)
    a, b = states(store, 3 * PAGE + 5, 0, 1), states(store, 4 * PAGE, 3 * PAGE + 25, 2)
    arena.place([Span(a, 0, 3 * PAGE + 5)], exact=True)
    computed = take(arena, 20, 3 * PAGE + 5)
    arena.kv[:, :, :, computed] = 7.0
    assert arena.extend([Span(b, 0, 4 * PAGE)], exact=True) == 4 * PAGE
    assert arena.position_ids[: arena.cells].tolist() == list(range(7 * PAGE + 25))
    assert (arena.kv[:, :, :, computed] == 7.0).all()
    row = LAYOUT.lead(b.position_ids)
    np.testing.assert_array_equal(
        arena.kv[:, :, :, computed.stop : arena.cells], b.array[:, :, :, row : row + 4 * PAGE]
    )
    arena.place([Span(a, 0, 3 * PAGE + 5), Span(b, 0, 4 * PAGE)], exact=False)
    check(arena, Span(a, 0, 3 * PAGE + 5), Span(b, 0, 4 * PAGE))


@needs_mapping
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "position", [0, 1, PAGE, 2 * PAGE + 3, 5 * PAGE + 2, 5 * PAGE + 3, 6 * PAGE, 8 * PAGE + 2, 9 * PAGE]
)
def test_cells_from_a_position_on_are_dropped(store: StateStore, position: int, exact: bool) -> None:
    """Also where the end of a piece was put before its start, and what is placed or computed next is as if they had
    never been there."""
    arena = Arena(LAYOUT, ROTARY, 2048, "map")
    a, b = states(store, 5 * PAGE, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 3, 2)
    spans = [Span(a, 0, 5 * PAGE), Span(b, 0, 3 * PAGE)]
    arena.place(spans, exact=exact)
    arena.truncate(position)
    left = [Span(s.states, 0, int((s.position_ids < position).sum())) for s in spans]
    check(arena, *left)
    arena.kv[:, :, :, take(arena, 50, 1000)] = 7.0
    arena.truncate(1000)
    check(arena, *left)
    arena.place(spans, exact=exact)
    check(arena, *spans)
    assert store.verify() == []


def test_spans_that_lie_between_one_another_are_cut(store: StateStore) -> None:
    outer = states(store, 6, 0, 1)
    outer = KVStates(outer.key, outer.array, outer.token_ids, np.array([0, 1, 2, 10, 11, 12], dtype=np.int32))
    inner = states(store, 4, 4, 2)
    pieces = in_position_order([Span(outer, 0, 6), Span(inner, 0, 4)], first_slot=5)
    assert [(p.states is outer, p.start, p.stop, p.slot) for p in pieces] == [
        (True, 0, 3, 5),
        (False, 0, 4, 8),
        (True, 3, 6, 12),
    ]


@pytest.mark.parametrize("assembly", ["copy", pytest.param("map", marks=needs_mapping)])
def test_moved_cells_are_rotated(store: StateStore, assembly: str) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, assembly)
    a = states(store, 300, 40, 1)
    lead = LAYOUT.lead(a.position_ids)
    for shift in (0, 7, 0, -40, -40):
        arena.place([Span(a, 0, 300, shift)], exact=False)
        slots = np.argsort(arena.position_ids[: arena.cells])
        assert arena.position_ids[slots].tolist() == list(range(40 + shift, 340 + shift))
        rows = slice(lead, lead + 300)
        keys = rotate(a.array[:, 0, :, rows], ROTARY, shift)
        np.testing.assert_allclose(arena.kv[:, 0, :, slots].transpose(1, 2, 0, 3), keys, atol=1e-5)
        np.testing.assert_array_equal(arena.kv[:, 1, :, slots].transpose(1, 2, 0, 3), a.array[:, 1, :, rows])
    assert arena.place([Span(a, 0, 300, -40)], exact=False) == 0, "what is in place is not placed again"


def test_cells_that_no_model_can_move_are_refused(store: StateStore) -> None:
    with pytest.raises(StatesError, match="moved"):
        Arena(LAYOUT, LearnedEncoding(1024), 2048).place([Span(states(store, 5, 0, 1), 0, 5, shift=3)], exact=False)


@pytest.mark.parametrize("assembly", ["copy", pytest.param("map", marks=needs_mapping)])
def test_computed_cells_take_the_place_of_stored_ones(store: StateStore, assembly: str) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, assembly)
    spans = [Span(states(store, 300, 3, 1), 0, 300), Span(states(store, 100, 303, 2), 0, 100)]
    arena.place(spans, exact=False)
    run = np.array([3, 17, 18, 299, 310, 403, 404], dtype=np.int32)
    hidden = arena.hide(run)
    assert sorted(hidden.tolist()) == [3, 17, 18, 299, 310]
    assert sorted(set(range(3, 403)) - set(arena.position_ids[:400].tolist())) == [3, 17, 18, 299, 310]
    slots = arena.take(run + 1000, run)
    arena.kv[:, :, :, slots] = run[np.newaxis, np.newaxis, np.newaxis, :, np.newaxis]
    arena.settle(hidden, slots.start)
    assert sorted(arena.position_ids[: arena.cells].tolist()) == list(range(3, 405))
    assert arena.position_ids[arena.cells - 2 : arena.cells].tolist() == [403, 404], "decoding goes on after them"
    for slot in range(arena.cells):
        position = int(arena.position_ids[slot])
        assert (arena.token_ids[slot] == position + 1000) == (position in run)
        assert bool((arena.kv[:, :, :, slot] == position).all()) == (position in run)
    arena.place(spans, exact=False)
    check(arena, *spans)
    assert store.verify() == []


@needs_mapping
def test_a_file_cut_short_is_refused(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 2048, "map")
    a = states(store, 400, 0, 1)
    assert a.path is not None
    a.path.chmod(0o600)
    with a.path.open("r+b") as file:
        file.truncate(mmap.PAGESIZE * 3)
    with pytest.raises(StatesError, match="cut short"):
        arena.place([Span(a, 0, 400)], exact=False)
    b = states(store, 10, 0, 2)
    arena.place([Span(b, 0, 10)], exact=False)
    check(arena, Span(b, 0, 10))


@needs_mapping
def test_mapped_modules_add_little_private_memory(store: StateStore) -> None:
    """The target: less than a tenth of their bytes."""
    tokens = 6000
    module = states(store, tokens, 0, 1)
    arena = Arena(LAYOUT, ROTARY, 8192)
    before = _private_bytes()
    arena.place([Span(module, 0, tokens)], exact=False)
    assert float(arena.kv[:, :, :, :tokens].sum()) != 0  # touch every page
    assert _private_bytes() - before < 0.1 * module.array.nbytes


def test_memory_after_the_placed_cells_goes_back(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, 8192)
    a = states(store, 50, 0, 1)
    arena.place([Span(a, 0, 50)], exact=False)
    arena.kv[:, :, :, take(arena, 7900, 100)] = 1.0
    arena.trim(100)
    arena.place([Span(a, 0, 50)], exact=False)
    check(arena, Span(a, 0, 50))
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not arena.kv[:, :, :, 1000:7900].any(), "pages that were given back come back as zeros"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no memory back")
def test_memory_of_an_earlier_longer_prompt_goes_back_too() -> None:
    """Or the next prompt with modules frees it before its first token."""
    arena = Arena(LAYOUT, ROTARY, 2048)
    for tokens in (1000, 4):
        arena.place([], exact=False)
        arena.kv[:, :, :, take(arena, tokens, 0)] = 1.0
    arena.trim(PAGE)
    assert arena.kv[:, :, :, :PAGE].all(), "what the next prompt's own text will want stays"
    assert not arena.kv[:, :, :, PAGE:].any()


def test_there_is_no_room_beyond_the_capacity(store: StateStore) -> None:
    arena = Arena(LAYOUT, ROTARY, PAGE)
    with pytest.raises(ContextLengthError, match=str(PAGE)):
        take(arena, PAGE + 1, 0)
    with pytest.raises(ContextLengthError, match=str(PAGE)):
        arena.place([Span(states(store, PAGE + 1, 0, 1), 0, PAGE + 1)], exact=False)


def _private_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        pytest.skip("this system does not tell private memory")
    lines = (line.split() for line in rollup.read_text().splitlines())
    # A file just written counts as dirty until the kernel has written it back; only anonymous memory is ours.
    return sum(int(words[1]) * 1024 for words in lines if words[0] == "Anonymous:")
