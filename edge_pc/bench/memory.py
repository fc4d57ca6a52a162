"""`bench memory`: what prompts that are open at once share, and what their states take on disk.

Prompts are held open over the same cached tokens, several in one process and one in each of several processes
(`held.py`), which then say how the system counts their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from edge_pc.backends.base import states_bytes
from edge_pc.bench.held import available_bytes, holder
from edge_pc.bench.rows import MemoryRow
from edge_pc.bench.tables import TITLES, Table
from edge_pc.bench.texts import Shape, Texts
from edge_pc.bench.ways import EngineWays
from edge_pc.bench.work import Bench, Work
from edge_pc.system.sizes import format_size

ONE, SEVERAL = "one process", "processes"

# Memory that must stay free for the rest of the machine.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What `bench memory` measures.

    Attributes:
        tokens: cached tokens that all prompts share, one module; fewer when the model takes fewer.
        new_tokens: of each prompt's own text.
        prompts: numbers of prompts open at once, rising.
    """

    tokens: int = 4096
    new_tokens: int = 32
    prompts: tuple[int, ...] = (1, 4, 16)

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes a few seconds."""
        return cls(tokens=512, prompts=(1, 2))


def measure(work: Work[MemoryRow], settings: Settings) -> None:
    """Hold prompts on each backend, first in one process, then in several."""
    for backend in work.backends:
        kinds = [(ONE, count) for count in (0, *settings.prompts)] + [(SEVERAL, n) for n in settings.prompts[1:]]
        keys = {f"{backend}/{kind}/{count}": (kind, count) for kind, count in kinds}
        todo = [key for key in keys if work.section.row(key) is None]
        if not todo:
            continue
        work.progress(0, len(todo), f"{backend}: encoding")
        shape, states = _store_states(work, backend, settings)
        with ExitStack() as stack:
            one: Any = None
            for index, key in enumerate(todo):
                work.progress(index, len(todo), key)
                kind, count = keys[key]
                row = replace(states, key=key, kind=kind, prompts=count)
                if kind == ONE:
                    one = one or stack.enter_context(_holder(work, backend, shape))
                    held = [one.hold(count)]
                else:
                    stack.close()  # or the pages of these processes would be shared with that one
                    held = in_processes(work, shape, row)
                work.section.add(counted(row, held))
        work.progress(len(todo), len(todo), f"{backend}: done")


def _store_states(work: Work[MemoryRow], backend: str, settings: Settings) -> tuple[Shape, MemoryRow]:
    """Encode the module that all prompts share; the prompts' shape, and a row with what is on disk."""
    with work.engine(backend) as engine:
        tokens = min(settings.tokens, engine.spec.max_positions - settings.new_tokens - 2)
        shape, ways, layout = Shape(tokens, settings.new_tokens), EngineWays(engine), engine.backend.kv_layout
        case = Texts(engine.tokenizer).case(shape)
        stats = [path.stat() for path in ways.prepare(case).files]
        prompt, _ = ways.states(case)
        return shape, MemoryRow(
            key="",
            backend=backend,
            kind="",
            prompts=0,
            tokens=tokens,
            dtype=layout.dtype,
            states_bytes=sum(states_bytes(layout, encoding.encoded_position_ids) for encoding in prompt.encodings),
            file_bytes=sum(stat.st_size for stat in stats),
            disk_bytes=sum(getattr(stat, "st_blocks", 0) * 512 for stat in stats),
        )


def _holder(work: Work[MemoryRow], backend: str, shape: Shape) -> Any:
    return holder(shape, work.engine_options(backend))


def in_processes(work: Work[MemoryRow], shape: Shape, row: MemoryRow) -> list[dict[str, int] | None]:
    """The memory of as many processes with a prompt each, while all are there; none if they would not fit."""
    single = work.section.row(f"{row.backend}/{ONE}/1")
    available = available_bytes()
    if single and available is not None and single.private_dirty * row.prompts > available - _SPARE_BYTES:
        return []
    with ExitStack() as stack:
        holders = [stack.enter_context(_holder(work, row.backend, shape)) for _ in range(row.prompts)]
        for each in holders:
            each.hold(1)
        return [each.hold(1) for each in holders]


def counted(row: MemoryRow, held: Sequence[dict[str, int] | None]) -> MemoryRow:
    """The row with the sums over all processes."""
    found = [memory for memory in held if memory is not None]
    if not found:
        why = "this system does not report memory this way" if held else "not enough free memory"
        return replace(row, skipped=why)
    sums: dict[str, Any] = {size: sum(memory[size] for memory in found) for size in found[0]}
    return replace(row, **sums)


def tables(rows: Sequence[MemoryRow]) -> list[Table]:
    """Memory of prompts that are open at once, what of it they add, and bytes per token."""
    return [_prompts(rows), _added(rows), _states(rows)]


def _prompts(rows: Sequence[MemoryRow]) -> Table:
    def size_of(field: str) -> Callable[[MemoryRow], str]:
        return lambda row: "" if row.skipped else format_size(getattr(row, field))

    columns: dict[str, Callable[[MemoryRow], str]] = {
        "backend": lambda row: TITLES[row.backend],
        "prompts in": lambda row: row.kind,
        "> prompts": lambda row: str(row.prompts),
        "> RSS": lambda row: row.skipped or size_of("rss")(row),
        "> PSS": size_of("pss"),
        "> private dirty": size_of("private_dirty"),
        "> private clean": size_of("private_clean"),
        "> shared": size_of("shared"),
    }
    note = (
        "Sums over all processes, the model included; 0 prompts: the engine is open and warm. PSS counts each page "
        "once, shared out among those that map it. Only private dirty pages cannot be dropped."
    )
    return Table.of("Prompts open at once over the same cached tokens", rows, columns, note)


def _added(rows: Sequence[MemoryRow]) -> Table:
    one = [row for row in rows if row.kind == ONE and not row.skipped]
    base = {row.backend: row.private_dirty for row in one if not row.prompts}
    columns = {
        "backend": lambda row: TITLES[row.backend],
        "> prompts": lambda row: str(row.prompts),
        "> private memory that they add": lambda row: format_size(max(0, row.private_dirty - base[row.backend])),
        "> copies would take": lambda row: format_size(row.prompts * row.states_bytes),
    }
    held = [row for row in one if row.prompts and row.backend in base]
    return Table.of("What prompts in one process add to the opened model", held, columns)


def _states(rows: Sequence[MemoryRow]) -> Table:
    columns = {
        "backend": lambda row: TITLES[row.backend],
        "dtype": lambda row: row.dtype,
        "> tokens": lambda row: str(row.tokens),
        "> bytes per token": lambda row: f"{row.states_bytes / row.tokens:,.0f}",
        "> file": lambda row: format_size(row.file_bytes),
        "> on disk": lambda row: format_size(row.disk_bytes),
    }
    return Table.of("Stored states", {row.backend: row for row in rows}.values(), columns)


BENCH = Bench(title="Memory", row=MemoryRow, settings=Settings, measure=measure, tables=tables)
