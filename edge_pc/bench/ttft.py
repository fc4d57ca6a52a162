"""`bench ttft`: time to the first token with reuse and without, over everything that it depends on.

Axes are varied one at a time around a base point: cached length, new tokens, the share that is cached, the number of
modules. Each point's ways are timed in turn (`timing.py`); what each way is, `subject.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_pc.bench import pagecache
from edge_pc.bench.report import Progress, Section, no_progress
from edge_pc.bench.subject import LATER_TOKENS, Prepared, Subject
from edge_pc.bench.texts import Case, Shape, Texts
from edge_pc.bench.timing import affordable_rounds, describe_samples, interleave

# Full prefill's time per token grows with length; the estimate that plans repeats allows for it.
_GROWTH_ALLOWANCE = 1.3

# Of a point's rows the last to be written: when it is there, the point is whole.
LAST = "full"


@dataclass(frozen=True, slots=True)
class TtftSettings:
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
    def quick(cls) -> TtftSettings:
        """A size that takes about a minute for both backends; enough to see that all works, not to quote."""
        return cls(
            lengths=(16, 128, 512),
            new_tokens=(1, 32),
            shares=(0, 50, 100),
            modules=(1, 4),
            base_cached=256,
            repeats=3,
            cold_repeats=1,
            budget_s=0.5,
            least_repeats=1,
            search_tokens=256,
            search_repeats=1,
            search_threads=False,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def axes(settings: TtftSettings, max_positions: int) -> dict[str, list[Shape]]:
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


def measure(
    section: Section,
    backend: str,
    subject: Subject,
    texts: Texts,
    settings: TtftSettings,
    *,
    max_positions: int,
    full_ms_per_token: float,
    progress: Progress = no_progress,
) -> None:
    """Fill the section's rows of one backend; rows that are there are not measured again.

    Args:
        full_ms_per_token: of full prefill, to plan its repeats.
    """
    by_axis = axes(settings, max_positions)
    # Shapes of the same modules follow one another: what is stored serves them all.
    shapes = sorted({s for found in by_axis.values() for s in found}, key=lambda s: (s.cached, s.modules, s.new))
    stored = None
    for index, shape in enumerate(shapes):
        progress(index, len(shapes), f"{backend}: {shape.cached} cached + {shape.new} new, {shape.modules} module(s)")
        wanted_cold = shape in by_axis["length"] and shape.cached > 0 and pagecache.can_drop()
        warm_done = section.row_done(_key(backend, shape, "warm", LAST))
        cold_done = section.row_done(_key(backend, shape, "cold", "cached")) or not wanted_cold
        if warm_done and cold_done:
            continue
        case = texts.case(shape)
        if (shape.cached, shape.modules) != stored:
            subject.remove_states()
            stored = (shape.cached, shape.modules)
        point = _Point(section, backend, subject, case, shape, [a for a, on in by_axis.items() if shape in on])
        if not warm_done:
            point.measure_warm(settings, full_ms_per_token)
        if not cold_done:
            point.measure_cold(settings.cold_repeats)
    progress(len(shapes), len(shapes), f"{backend}: done")


@dataclass(frozen=True, slots=True)
class _Point:
    """One shape of prompt, under measurement."""

    section: Section
    backend: str
    subject: Subject
    case: Case
    shape: Shape
    axes: list[str]

    def measure_warm(self, settings: TtftSettings, full_ms_per_token: float) -> None:
        """A row for each way, and one for the encoding if it had to be made."""
        prepared = self.subject.prepare(self.case)
        self._add_encoding(prepared)

        def rounds(computed: int) -> int:
            estimate = full_ms_per_token * computed * _GROWTH_ALLOWANCE
            return affordable_rounds(settings.repeats, estimate, settings.budget_s, settings.least_repeats)

        full, reuse = rounds(self.shape.tokens), rounds(self.shape.new)
        with self.subject.ways(self.case) as ways:
            wanted = {name: way for name, way in ways.items() if name != "again" or "length" in self.axes}
            samples = interleave(wanted, {name: full if name == LAST else reuse for name in wanted})
        for way, taken in sorted(samples.items(), key=lambda item: item[0] == LAST):
            row = self._row(prepared, way, "warm") | describe_samples(taken)
            self.section.add(_key(self.backend, self.shape, "warm", way), row)

    def measure_cold(self, repeats: int) -> None:
        prepared = self.subject.prepare(self.case)
        samples = [self.subject.cold(self.case, prepared.files) for _ in range(repeats)]
        resident = max(sample.pop("resident") for sample in samples)
        row = self._row(prepared, "cached", "cold") | describe_samples(samples)
        self.section.add(_key(self.backend, self.shape, "cold", "cached"), row | {"resident_share": round(resident, 4)})

    def _add_encoding(self, prepared: Prepared) -> None:
        key = f"{self.backend}/cached={self.shape.cached}/modules={self.shape.modules}/encode"
        if prepared.tokens and not self.section.row_done(key):
            row = {**self._row(prepared, "encode", "warm"), "tokens": prepared.tokens}
            self.section.add(key, row | describe_samples([{"encode": prepared.encode_ms}]))

    def _row(self, prepared: Prepared, way: str, pages: str) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "way": way,
            "pages": pages,
            "axes": self.axes,
            "cached_tokens": self.shape.cached,
            "new_tokens": self.shape.new,
            "modules": self.shape.modules,
            "reused_tokens": prepared.cached_tokens,
            "computed_tokens": prepared.computed_tokens,
        }


def other_ways(
    section: Section,
    path: Path,
    texts: Texts,
    settings: TtftSettings,
    *,
    threads: int,
    max_positions: int,
    folder: Path,
    progress: Progress = no_progress,
) -> None:
    """Time llama.cpp's own ways of reuse on the same tokens and the same GGUF file, over cached length.

    Without flash attention, which is faster for few tokens over a long prefix, and at the base length with it too.

    Args:
        path: the GGUF file.
        threads: compute threads.
        folder: where state files are put, and deleted.
    """
    from edge_pc.bench.llama_direct import LlamaSettings
    from edge_pc.bench.llama_ways import LAST_WAY, prefix_ways
    from edge_pc.bench.search import LLAMA_BATCHES

    wanted = list(_with_attention(axes(settings, max_positions)["length"], settings.base_cached))
    for index, (shape, flash) in enumerate(wanted):
        progress(index, len(wanted), f"llama.cpp's own ways: {shape.cached} cached")
        point = f"llamacpp/{shape.name}/{'flash' if flash else 'plain'}"
        if section.row_done(f"{point}/{LAST_WAY}"):
            continue
        token_ids = texts.token_ids(shape)
        prefix, new = token_ids[: shape.cached], token_ids[shape.cached :]
        with prefix_ways(path, LlamaSettings(threads, LLAMA_BATCHES[0], flash), prefix, new, folder) as ways:
            samples = interleave(ways, dict.fromkeys(ways, settings.repeats))
        for way, taken in samples.items():
            row = {
                "backend": "llamacpp",
                "way": way,
                "pages": "warm",
                "axes": [] if flash else ["length"],
                "cached_tokens": shape.cached,
                "new_tokens": shape.new,
                "modules": 1,
                "reused_tokens": shape.cached,
                "computed_tokens": shape.new,
                "flash": flash,
            }
            section.add(f"{point}/{way}", row | describe_samples(taken))
    progress(len(wanted), len(wanted), "llama.cpp's own ways: done")


def _with_attention(shapes: list[Shape], base: int) -> Iterator[tuple[Shape, bool]]:
    """Each shape, and whether flash attention is on."""
    for shape in shapes:
        yield shape, False
        if shape.cached == base:
            yield shape, True


def _key(backend: str, shape: Shape, pages: str, way: str) -> str:
    return f"{backend}/{shape.name}/{pages}/{way}"
