"""`bench ttft`: time to the first token with reuse and without, over everything that it depends on.

Axes are varied one at a time around a base point: cached length, new tokens, the share that is cached, the number of
modules. What the ways are that each point is timed in, `ways.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edge_pc.bench import baseline, pagecache, ttft_pictures, ttft_tables
from edge_pc.bench.report import Section
from edge_pc.bench.rows import BaselineRow, TtftRow, samples_of
from edge_pc.bench.texts import Case, Shape, Texts
from edge_pc.bench.timing import affordable_rounds, interleave
from edge_pc.bench.ways import LATER_TOKENS, EngineWays, Prepared
from edge_pc.bench.work import Bench, Work
from edge_pc.progress import OnProgress, Progress, ignore
from edge_pc.system.cpu import allowed_cpus

# The time per token of a full prefill grows with length; the estimate that plans repeats allows for it.
_GROWTH_ALLOWANCE = 1.3

# Of a point's rows the last to be written: when it is there, the point is whole.
LAST = "full"


@dataclass(frozen=True, slots=True)
class Settings:
    """What `bench ttft` measures.

    Attributes:
        lengths: cached tokens, with `base_new` new ones; those that the model cannot take are capped.
        new_tokens: with `base_cached` cached ones.
        shares: percent of a prompt of `base_cached` tokens that is cached.
        modules: numbers of modules that share `base_cached` tokens.
        base_cached, base_new: the point around which axes vary.
        repeats: samples of each fast way.
        cold_repeats: samples with the page cache cold.
        budget_s: seconds that one way may take at one point: it gets fewer samples where it is slow (full prefill of
            thousands of tokens) ...
        least_repeats: ... but at least this many.
        search_tokens, search_repeats: of the search for full prefill's best settings.
        search_threads: whether it tries fewer threads than there are CPUs.
    """

    lengths: tuple[int, ...] = (16, 32, 64, 128, 512, 1024, 2048, 4096, 8000)
    new_tokens: tuple[int, ...] = (1, 8, 32, 128)
    shares: tuple[int, ...] = (0, 25, 50, 75, 90, 100)
    modules: tuple[int, ...] = (1, 4, 16)
    base_cached: int = 4096
    base_new: int = 32
    repeats: int = 9
    cold_repeats: int = 3
    budget_s: float = 25.0
    least_repeats: int = 2
    search_tokens: int = 2048
    search_repeats: int = 2
    search_threads: bool = True

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes about a minute for both backends; enough to see that all works, not to quote."""
        few = cls(lengths=(16, 128, 512), new_tokens=(1, 32), shares=(0, 50, 100), modules=(1, 4), base_cached=256)
        once = {"cold_repeats": 1, "least_repeats": 1, "search_repeats": 1, "search_threads": False}
        return cls(**{**asdict(few), **once, "repeats": 3, "budget_s": 0.5, "search_tokens": 256})


def axes(settings: Settings, max_positions: int) -> dict[str, list[Shape]]:
    """Axis → the shapes on it, in rising order; the model's positions bound them."""
    room = max_positions - LATER_TOKENS - 1

    def shape(cached: int, new: int, modules: int = 1) -> Shape:
        return Shape(max(0, min(cached, room - new)), new, modules)

    base = min(settings.base_cached, room - settings.base_new)
    found = {
        "length": [shape(length, settings.base_new) for length in settings.lengths],
        "new": [shape(base, new) for new in settings.new_tokens],
        "share": [shape(base * share // 100, base - base * share // 100) for share in settings.shares],
        "modules": [shape(base, settings.base_new, modules) for modules in settings.modules],
    }
    return {axis: list(dict.fromkeys(shapes)) for axis, shapes in found.items()}


def measure(work: Work[TtftRow], settings: Settings) -> None:
    """Search each backend's baseline, which fills its own section, and time every point."""
    tried = {"search_tokens": settings.search_tokens, "search_repeats": settings.search_repeats}
    baselines = work.report.section("baseline", BaselineRow, "The baseline", tried, command=work.command)
    for backend in work.backends:
        work.progress(0, 0, f"{backend}: searching for full prefill's best settings")
        path = work.options.model_path(backend)
        fixed = work.options.threads or (None if settings.search_threads else allowed_cpus())
        threads = baseline.thread_counts(fixed, allowed_cpus())
        best = baseline.search(baselines, backend, path, threads, settings.search_tokens, settings.search_repeats)
        baselines.show(baseline.tables(baselines.rows))
        with work.engine(backend, best.settings["threads"]) as engine:
            positions = engine.spec.max_positions
            with baseline.full_prefill(backend, path, best, positions) as full:
                points = Points(
                    section=work.section,
                    backend=backend,
                    ways=EngineWays(engine, full),
                    texts=Texts(engine.tokenizer),
                    settings=settings,
                    axes=axes(settings, positions),
                    full_ms_per_token=best.ms_per_token,
                )
                points.measure(work.on_progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """All points of one backend.

    Attributes:
        ways: of the engine.
        texts: makes each point's prompt.
        axes: what is varied, as `axes` gives it.
        full_ms_per_token: of full prefill, to plan its repeats.
    """

    section: Section[TtftRow]
    backend: str
    ways: EngineWays
    texts: Texts
    settings: Settings
    axes: dict[str, list[Shape]]
    full_ms_per_token: float

    def measure(self, on_progress: OnProgress = ignore) -> None:
        """Fill the rows; those that are there are not measured again."""
        # Shapes of the same modules follow one another: what is stored serves them all.
        shapes = sorted({s for on in self.axes.values() for s in on}, key=lambda s: (s.cached, s.modules, s.new))
        stored = None
        for index, shape in enumerate(shapes):
            text = f"{self.backend}: {shape.cached} cached + {shape.new} new, {shape.modules} module(s)"
            on_progress(Progress(index, len(shapes), text))
            todo = list(self._todo(shape))
            if not todo:
                continue
            if (shape.cached, shape.modules) != stored:
                self.ways.remove_states()
                stored = (shape.cached, shape.modules)
            case = self.texts.case(shape)
            for measure in todo:
                measure(shape, case, self.ways.prepare(case))
        on_progress(Progress(len(shapes), len(shapes), f"{self.backend}: done"))

    def _todo(self, shape: Shape) -> Iterator[Any]:
        """What of this point is still to be measured."""
        if self.section.row(self._key(shape, "warm", LAST)) is None:
            yield self._measure_warm
        wanted_cold = shape in self.axes["length"] and shape.cached > 0 and pagecache.can_drop()
        if wanted_cold and self.section.row(self._key(shape, "cold", "cached")) is None:
            yield self._measure_cold

    def _measure_warm(self, shape: Shape, case: Case, prepared: Prepared) -> None:
        """A row for each way, and one for the encoding if it had to be made."""
        if prepared.encode_ms is not None:
            self._add(shape, prepared, "encode", [{"encode": prepared.encode_ms}])
        ways = self.ways.ways(case)
        if shape not in self.axes["length"]:
            ways.pop("again", None)
        rounds = dict.fromkeys(ways, self._rounds(shape.new)) | {LAST: self._rounds(shape.tokens)}
        samples = interleave(ways, rounds)
        for way in sorted(samples, key=lambda way: way == LAST):
            self._add(shape, prepared, way, samples[way])

    def _measure_cold(self, shape: Shape, case: Case, prepared: Prepared) -> None:
        taken = [self.ways.cold(case, prepared.files) for _ in range(self.settings.cold_repeats)]
        resident = round(max(share for _, share in taken), 4)
        samples = [sample for sample, _ in taken]
        self._add(shape, prepared, "cached", samples, pages="cold", resident_share=resident)

    def _rounds(self, computed: int) -> int:
        estimate, settings = self.full_ms_per_token * _GROWTH_ALLOWANCE * computed, self.settings
        return affordable_rounds(settings.repeats, estimate, settings.budget_s, settings.least_repeats)

    def _add(
        self,
        shape: Shape,
        prepared: Prepared,
        way: str,
        samples: Sequence[dict[str, float]],
        *,
        pages: str = "warm",
        resident_share: float | None = None,
    ) -> None:
        self.section.add(
            TtftRow(
                key=self._key(shape, pages, way),
                backend=self.backend,
                way=way,
                pages=pages,
                axes=tuple(axis for axis, on in self.axes.items() if shape in on),
                cached_tokens=shape.cached,
                new_tokens=shape.new,
                modules=shape.modules,
                reused_tokens=prepared.cached_tokens,
                computed_tokens=prepared.computed_tokens,
                samples_ms=samples_of(samples),
                resident_share=resident_share,
            )
        )

    def _key(self, shape: Shape, pages: str, way: str) -> str:
        return f"{self.backend}/{shape.name}/{pages}/{way}"


_ABOUT = """The time to the first token (TTFT) runs from the submission of a prompt to its first token: reading and
checking the prompt, tokenizing it, finding stored states, placing them, and the forward pass of what is computed. It
does not include the start of the process, loading the model and the schema, or encoding, which is timed on its own. The
model is warm. Reuse is timed after another prompt was served, so that states are really placed; the limit computes the
same tokens over cells that are already in place, without reading a prompt. Full prefill computes all tokens at the best
settings that a short search found. Ways are timed in turn, in changing order, after a warm-up; the quartiles show the
spread, and the report keeps every sample."""

BENCH = Bench(
    title="Time to the first token",
    about=" ".join(_ABOUT.split()),
    row=TtftRow,
    settings=Settings,
    measure=measure,
    tables=ttft_tables.tables,
    pictures=ttft_pictures.pictures,
)
