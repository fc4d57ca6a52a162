"""`bench encode`: how fast a schema is encoded and stored, against raw prefill of the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_pc.bench.rows import EncodeRow, samples_of
from edge_pc.bench.tables import TITLES, Table
from edge_pc.bench.texts import Case, Shape, Texts
from edge_pc.bench.timing import Sample, Way, interleave, timed
from edge_pc.bench.ways import EngineWays
from edge_pc.bench.work import Bench, Work

WAYS = ("encode", "write", "prefill")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `bench encode` measures.

    Attributes:
        lengths: tokens of a schema; what the model cannot take is capped.
        modules: numbers of modules that share them.
        repeats: samples of each way.
    """

    lengths: tuple[int, ...] = (512, 2048, 4096)
    modules: tuple[int, ...] = (1, 8)
    repeats: int = 3

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes some seconds."""
        return cls(lengths=(256,), modules=(1, 4), repeats=2)


def measure(work: Work[EncodeRow], settings: Settings) -> None:
    """Encode schemas of each size, on each backend."""
    for backend in work.backends:
        with work.engine(backend) as engine:
            ways, texts = EngineWays(engine), Texts(engine.tokenizer)
            longest = engine.spec.max_positions - 4
            shapes = [Shape(min(n, longest), 0, modules) for n in settings.lengths for modules in settings.modules]
            for index, shape in enumerate(dict.fromkeys(shapes)):
                work.progress(index, len(shapes), f"{backend}: {shape.cached} tokens in {shape.modules} module(s)")
                keys = {way: f"{backend}/tokens={shape.cached}/modules={shape.modules}/{way}" for way in WAYS}
                if all(work.section.row(key) for key in keys.values()):
                    continue
                samples = interleave(_ways(ways, texts.case(shape)), dict.fromkeys(WAYS, settings.repeats))
                ways.remove_states()
                for way, taken in samples.items():
                    row = EncodeRow(
                        key=keys[way],
                        backend=backend,
                        way=way,
                        tokens=shape.cached,
                        modules=shape.modules,
                        samples_ms=samples_of(taken),
                    )
                    work.section.add(row)
            work.progress(len(shapes), len(shapes), f"{backend}: done")


def _ways(ways: EngineWays, case: Case) -> dict[str, Way]:
    return {
        "encode": lambda: _encode(ways, case),
        "write": lambda: _write(ways, case),
        "prefill": lambda: {"total": ways.raw_prefill_ms(case)},
    }


def _encode(ways: EngineWays, case: Case) -> Sample:
    """Encode from nothing, writing included."""
    ways.remove_states()
    return {"total": ways.prepare(case).encode_ms or 0.0}


def _write(ways: EngineWays, case: Case) -> Sample:
    """Write the same states once more: the part of encoding that is not computing."""
    ways.prepare(case)
    _, states = ways.states(case)
    store, layout = ways.engine.store, ways.engine.backend.kv_layout
    arrays = [np.array(each.array) for each in states]

    def write() -> None:
        for each, array in zip(states, arrays, strict=True):
            cells = (each.token_ids, each.position_ids)
            store.put(each.key, layout, array, *cells, model="bench", schema="bench", module="bench")

    return timed("total", write)


def tables(rows: Sequence[EncodeRow]) -> list[Table]:
    """Speed of encoding against full prefill."""
    by_shape: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        by_shape.setdefault((row.backend, row.tokens, row.modules), {})[row.way] = row.median("total")
    whole = [(*shape, times) for shape, times in by_shape.items() if set(times) == set(WAYS)]
    columns = {
        "backend": lambda line: TITLES[line[0]],
        "> tokens": lambda line: str(line[1]),
        "> modules": lambda line: str(line[2]),
        "> encode (tokens/s)": lambda line: f"{line[1] / line[3]['encode'] * 1e3:,.0f}",
        "> full prefill (tokens/s)": lambda line: f"{line[1] / line[3]['prefill'] * 1e3:,.0f}",
        "> ratio": lambda line: f"{line[3]['prefill'] / line[3]['encode']:.2f}",
        "> of it writing": lambda line: f"{line[3]['write'] / line[3]['encode']:.0%}",
    }
    note = "Encoding includes writing to disk. Modules do not attend to one another: several are less work than one."
    return [Table.of("Speed", whole, columns, note)]


BENCH = Bench(title="Encoding", row=EncodeRow, settings=Settings, measure=measure, tables=tables)
