"""Processes that hold prompts open, and what memory they have, alone and together, as Linux counts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from edge_pc.backends.base import Context
from edge_pc.bench.texts import Shape, Texts
from edge_pc.bench.ways import EngineWays
from edge_pc.engine import Engine
from edge_pc.errors import EdgePCError

_ROLLUP = Path("/proc/self/smaps_rollup")
_MEMINFO = Path("/proc/meminfo")

# Our name → the names in `smaps_rollup` that it adds up.
_SIZES = {
    "rss": ("Rss",),
    "pss": ("Pss",),
    "private_dirty": ("Private_Dirty",),
    "private_clean": ("Private_Clean",),
    "shared": ("Shared_Clean", "Shared_Dirty"),
}


class Holder:
    """Holds prompts of one shape in an engine that stays open until the process ends.

    Args:
        shape: of the prompts, whose states are stored.
        options: what the engine is opened with.
    """

    def __init__(self, shape: Shape, options: dict[str, Any]) -> None:
        engine = Engine(**options)
        self._ways, texts = EngineWays(engine), Texts(engine.tokenizer)
        warm_up, self._case = texts.case(Shape(0, shape.new)), texts.case(shape)
        for case in (warm_up, self._case):
            engine.load_schema(case.schema)
        self._ways.hold(warm_up).close()
        self._held: list[Context] = []

    def hold(self, prompts: int) -> dict[str, int] | None:
        """Open prompts until there are as many; the memory of the process then."""
        while len(self._held) < prompts:
            self._held.append(self._ways.hold(self._case))
        return memory_of_this_process()


class _Process(BaseManager):
    """A child process with objects that this one calls."""


_Process.register("Holder", Holder)


@contextmanager
def holder(shape: Shape, options: dict[str, Any]) -> Iterator[Any]:
    """A `Holder` in a process of its own, which ends with the block.

    Raises:
        EdgePCError: that process ended early.
    """
    child: Any = _Process(ctx=get_context("spawn"))
    try:
        with child:
            yield child.Holder(shape, options)
    except (EOFError, ConnectionError) as exc:
        raise EdgePCError("the process that holds prompts ended early; its own message is above") from exc


def memory_of_this_process() -> dict[str, int] | None:
    """Bytes by name, as docs/bench.md describes them; None where the system does not count like this."""
    found = _kibibytes(_ROLLUP)
    return {name: sum(found[part] for part in parts) for name, parts in _SIZES.items()} if found else None


def available_bytes() -> int | None:
    """Memory that new processes can take without pushing others out; None where the system does not tell."""
    return _kibibytes(_MEMINFO).get("MemAvailable")


def _kibibytes(path: Path) -> dict[str, int]:
    """The `Name: 12 kB` lines of a file, in bytes; none when it is not there."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
