"""`bench encode`: how fast a schema is encoded and stored, against raw prefill of the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from edge_pc.bench.names import BACKEND_NAMES
from edge_pc.bench.report import Progress, Report, Row, Section, no_progress
from edge_pc.bench.setup import BenchOptions, chosen_backends, open_engine, states_folder
from edge_pc.bench.subject import EngineSubject
from edge_pc.bench.texts import Case, Shape, Texts
from edge_pc.bench.timing import Sample, describe_samples, interleave

SECTION = "encode"


@dataclass(frozen=True, slots=True)
class EncodeSettings:
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
    def quick(cls) -> EncodeSettings:
        """A size that takes some seconds."""
        return cls(lengths=(256,), modules=(1, 4), repeats=2)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_encode(
    report: Report,
    options: BenchOptions,
    settings: EncodeSettings,
    progress: Progress = no_progress,
    *,
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `encode` and return it."""
    backends = chosen_backends(options)
    asked = settings.as_dict() | {"backends": backends, "threads": options.threads}
    section = report.section(SECTION, asked, command=command, restart=restart)
    with states_folder(options) as folder:
        for backend in backends:
            with open_engine(options, backend, folder) as engine:
                measure(section, backend, EngineSubject(engine), settings, progress)
    section.summarize(summarize(section.rows))
    return section


def measure(
    section: Section, backend: str, subject: EngineSubject, settings: EncodeSettings, progress: Progress = no_progress
) -> None:
    """Fill the rows of one backend."""
    texts = Texts(subject.engine.tokenizer)
    longest = subject.engine.spec.max_positions - 4
    shapes = dict.fromkeys(
        Shape(min(length, longest), 0, modules) for length in settings.lengths for modules in settings.modules
    )
    for index, shape in enumerate(shapes):
        progress(index, len(shapes), f"{backend}: {shape.cached} tokens in {shape.modules} module(s)")
        key = f"{backend}/tokens={shape.cached}/modules={shape.modules}"
        if section.row_done(f"{key}/prefill"):
            continue
        case = texts.case(shape)
        samples = interleave(
            {
                "encode": lambda case=case: _encode(subject, case),  # type: ignore[misc]
                "write": lambda case=case: _write(subject, case),  # type: ignore[misc]
                "prefill": lambda case=case: {"total": subject.raw_prefill(case)},  # type: ignore[misc]
            },
            dict.fromkeys(("encode", "write", "prefill"), settings.repeats),
        )
        subject.remove_states()
        for way, taken in samples.items():
            row = {"backend": backend, "way": way, "tokens": shape.cached, "modules": shape.modules}
            rate = shape.cached / median(sample["total"] for sample in taken) * 1e3
            section.add(f"{key}/{way}", row | {"tokens_per_s": round(rate, 1)} | describe_samples(taken))
    progress(len(shapes), len(shapes), f"{backend}: done")


def _encode(subject: EngineSubject, case: Case) -> Sample:
    """Encode from nothing, writing included."""
    subject.remove_states()
    return {"total": subject.prepare(case).encode_ms}


def _write(subject: EngineSubject, case: Case) -> Sample:
    """Write the same states once more: the part of encoding that is not computing."""
    import time

    subject.prepare(case)
    encoder, prompt = subject.lay_out(case)
    store, layout = subject.engine.store, subject.engine.backend.kv_layout
    states = [encoder.obtain(encoding).states for encoding in prompt.encodings]
    arrays = [np.array(each.array) for each in states]
    started = time.perf_counter()
    for each, array in zip(states, arrays, strict=True):
        cells = (each.token_ids, each.position_ids)
        store.put(each.key, layout, array, *cells, model="bench", schema="bench", module="bench")
    return {"total": (time.perf_counter() - started) * 1e3}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """For each backend and shape: encoding speed over raw prefill speed, and the share of time that is writing."""
    times = {
        (row["backend"], f"{row['tokens']} tokens, {row['modules']} module(s)", row["way"]): row["median_ms"]["total"]
        for row in rows
    }
    summary: dict[str, Any] = {}
    for backend, shape, way in times:
        if way == "encode":
            encode, write, prefill = (times[backend, shape, name] for name in ("encode", "write", "prefill"))
            found = {"speed_ratio": round(prefill / encode, 3), "write_share": round(write / encode, 3)}
            summary.setdefault(backend, {})[shape] = found
    return summary


def findings(summary: dict[str, Any]) -> list[str]:
    """The summary in sentences, for people."""
    return [
        f"{BACKEND_NAMES[backend]}: {shape}: encoded at {found['speed_ratio']:.2f} x the speed of full prefill, "
        f"writing took {found['write_share']:.0%} of the time"
        for backend, shapes in summary.items()
        for shape, found in shapes.items()
    ]
