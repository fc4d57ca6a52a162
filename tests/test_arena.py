"""The arena: what is placed where, by mapping and by copying, and what is left of it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from edge_pc.backends.base import KVLayout, KVStates, Span
from edge_pc.backends.onnx.arena import (
    MAP_FROM_TOKENS_FRESH,
    MAP_FROM_TOKENS_WARM,
    Arena,
    can_map,
    in_position_order,
    tokens_per_page,
)
from edge_pc.backends.onnx.backend import CHUNK_TOKENS, ROW_TILE, chunks
from edge_pc.errors import ContextLengthError, StatesError
from edge_pc.store import StateStore

LAYERS, HEADS, DIM = 2, 2, 64
PAGE = tokens_per_page(DIM)
LAYOUT = KVLayout("test", "float32", (LAYERS, 2, HEADS, 1, DIM), 3, PAGE, congruent=True)

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
    arena = Arena(LAYOUT, 2048, assembly)
    a, b, c = states(store, 300, 0, 1), states(store, 2 * PAGE + 3, 300, 2), states(store, 5, 900, 3)
    whole = [Span(s, 0, len(s.position_ids)) for s in (a, b, c)]
    shorter = Span(a, 0, 299)
    for spans in (whole, whole, whole[:1], [shorter, *whole[1:]], whole[1:], [whole[2], whole[0]], []):
        arena.place(spans, exact=exact)
        check(arena, *spans)
        slots = arena.append(np.arange(1000, 1040, dtype=np.int32))
        arena.kv[:, :, :, slots] = 7.0  # what computing does
    assert store.verify() == [], "writing to the arena never reaches a file"


def placed(arena: Arena) -> list[tuple[int, bool]]:
    return [(piece.stop - piece.start, piece.mapped) for each in arena._placed for piece in each.parts]


@needs_mapping
@pytest.mark.parametrize("exact", [False, True])
def test_without_gaps_all_is_mapped_in_position_order(store: StateStore, exact: bool) -> None:
    """Only the rows in front of a file's first whole page are copied."""
    arena = Arena(LAYOUT, 2048, "map")
    first, second = states(store, 5 * PAGE + 7, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 7, 2)
    arena.place([Span(first, 0, 5 * PAGE + 7), Span(second, 0, 3 * PAGE)], exact=exact)
    assert placed(arena) == [(5 * PAGE + 7, True), (PAGE - 7, False), (2 * PAGE + 7, True)]
    assert arena.position_ids[: arena.cells].tolist() == list(range(8 * PAGE + 7))


@needs_mapping
def test_behind_a_gap_a_few_cells_of_the_end_come_first(store: StateStore) -> None:
    arena = Arena(LAYOUT, 2048, "map")
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
def test_what_was_placed_stays_however_it_would_be_placed_now(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """A short module is mapped into a fresh arena, and would be copied into one that has memory."""
    arena = Arena(LAYOUT, 2048)
    spans = [Span(states(store, tokens, 0, 1), 0, tokens)]
    arena.place(spans, exact=False)
    assert placed(arena) == [(tokens, True)]
    monkeypatch.setattr(arena, "_copy", lambda piece: pytest.fail("placed again"))
    arena.place(spans, exact=False)
    arena.place(spans, exact=True)
    check(arena, *spans)


@needs_mapping
def test_short_modules_are_copied_where_there_is_memory(store: StateStore) -> None:
    arena = Arena(LAYOUT, 2048)
    arena.place([], exact=False)
    arena.kv[:, :, :, arena.append(np.arange(1000, dtype=np.int32))] = 1.0
    short, long = states(store, MAP_FROM_TOKENS_WARM - 1, 0, 1), states(store, MAP_FROM_TOKENS_WARM, 0, 2)
    arena.place([Span(short, 0, len(short.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM - 1, False)]
    arena.place([Span(long, 0, len(long.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM, True)]
    arena.place([Span(short, 0, len(short.position_ids))], exact=False)
    assert placed(arena) == [(MAP_FROM_TOKENS_WARM - 1, True)], "mapped pages are no memory of the arena's own"


def test_what_is_in_place_is_not_placed_again(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(LAYOUT, 2048)
    a, b = states(store, 400, 0, 1), states(store, 20, 400, 2)
    arena.place([Span(a, 0, 400), Span(b, 0, 20)], exact=False)
    anew = []
    for name in ("_map", "_copy"):
        monkeypatch.setattr(arena, name, lambda piece: anew.append(piece) or True)
    arena.place([Span(a, 0, 400), Span(b, 0, 20)], exact=False)
    assert anew == []
    arena.place([Span(a, 0, 400), Span(b, 0, 19)], exact=False)
    assert [piece.stop for piece in anew] == [19]


@needs_mapping
@pytest.mark.parametrize("step", ["_drop_pages", "_unmap", "_map", "_copy"])
def test_an_interrupt_leaves_nothing_that_counts_as_placed(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    arena = Arena(LAYOUT, 2048, "map")
    a, b = states(store, 5 * PAGE + 7, 0, 1), states(store, 3 * PAGE, 5 * PAGE + 7, 2)
    spans = [Span(a, 0, 5 * PAGE + 7), Span(b, 0, 3 * PAGE)]
    other = [Span(states(store, 4 * PAGE + 5, 0, 3), 0, 4 * PAGE + 5), Span(states(store, 40, 500, 4), 0, 40)]
    arena.place(spans, exact=False)
    work = getattr(arena, step)

    def interrupted(*args: object) -> None:
        work(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.place(other, exact=False)
    arena.place(spans, exact=False)
    check(arena, *spans)


def test_spans_that_lie_between_one_another_are_cut(store: StateStore) -> None:
    outer = states(store, 6, 0, 1)
    outer = KVStates(outer.key, outer.array, outer.token_ids, np.array([0, 1, 2, 10, 11, 12], dtype=np.int32))
    inner = states(store, 4, 4, 2)
    pieces = in_position_order([Span(outer, 0, 6), Span(inner, 0, 4)])
    assert [(p.states is outer, p.start, p.stop, p.slot) for p in pieces] == [
        (True, 0, 3, 0),
        (False, 0, 4, 3),
        (True, 3, 6, 7),
    ]


@needs_mapping
def test_a_file_cut_short_is_refused_and_not_died_of(store: StateStore) -> None:
    arena = Arena(LAYOUT, 2048, "map")
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
    arena = Arena(LAYOUT, 8192)
    before = _private_bytes()
    arena.place([Span(module, 0, tokens)], exact=False)
    assert float(arena.kv[:, :, :, :tokens].sum()) != 0  # touch every page
    assert _private_bytes() - before < 0.1 * module.array.nbytes


def test_memory_behind_the_placed_cells_goes_back(store: StateStore) -> None:
    arena = Arena(LAYOUT, 8192)
    a = states(store, 50, 0, 1)
    arena.place([Span(a, 0, 50)], exact=False)
    arena.kv[:, :, :, arena.append(np.arange(100, 8000, dtype=np.int32))] = 1.0
    arena.trim(100)
    arena.place([Span(a, 0, 50)], exact=False)
    check(arena, Span(a, 0, 50))
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not arena.kv[:, :, :, 1000:7900].any(), "pages that were given back come back as zeros"


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no memory back")
def test_memory_of_an_earlier_longer_prompt_goes_back_too() -> None:
    """Or the next prompt with modules frees it before its first token."""
    arena = Arena(LAYOUT, 2048)
    for tokens in (1000, 4):
        arena.place([], exact=False)
        arena.kv[:, :, :, arena.append(np.arange(tokens, dtype=np.int32))] = 1.0
    arena.trim(PAGE)
    assert arena.kv[:, :, :, :PAGE].all(), "what the next prompt's own text will want stays"
    assert not arena.kv[:, :, :, PAGE:].any()


def test_there_is_no_room_beyond_the_capacity() -> None:
    arena = Arena(LAYOUT, PAGE)
    with pytest.raises(ContextLengthError, match=str(PAGE)):
        arena.append(np.arange(PAGE + 1, dtype=np.int32))


@pytest.mark.parametrize("tokens", [1, 2, 3, *range(120, 136), *range(250, 264), *range(505, 520), 641, 1025, 2049])
def test_no_chunk_leaves_a_row_alone_in_a_tile(tokens: int) -> None:
    parts = list(chunks(tokens))
    sizes = [part.stop - part.start for part in parts]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(tokens))
    assert max(sizes) <= CHUNK_TOKENS
    assert tokens == 1 or all(size % ROW_TILE != 1 for size in sizes)


def _private_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists():
        pytest.skip("this system does not tell private memory")
    lines = (line.split() for line in rollup.read_text().splitlines())
    # A file just written counts as dirty until the kernel has written it back; only anonymous memory is ours.
    return sum(int(words[1]) * 1024 for words in lines if words[0] == "Anonymous:")
