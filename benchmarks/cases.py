"""`python -m benchmarks cases`: the paper's three applications on the ready schemas: code from several source files,
personalised tutoring, travel plans with parameters; and a persona put together from traits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.rows import CaseAnswer, CaseRow
from edge_pc import schemas
from edge_pc.bench.tables import TITLES, Table, milliseconds
from edge_pc.bench.work import Bench, Work
from edge_pc.engine import Engine
from edge_pc.pml.prompt import load_prompt
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.serving import Serving
from edge_pc.runtime.stats import Result

_TITLES = {
    "code": "code from several source files",
    "tutoring": "personalised tutoring",
    "travel": "a travel plan with parameters",
    "persona": "a persona put together from traits",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        cases: ready schemas, each with its own prompt.
        repeats: comparisons of each; medians are reported.
        answer_tokens: of the two answers, at most.
    """

    cases: tuple[str, ...] = tuple(_TITLES)
    repeats: int = 5
    answer_tokens: int = 96

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes some seconds."""
        return cls(repeats=1, answer_tokens=24)


def measure(work: Work[CaseRow], settings: Settings) -> None:
    """Compare both ways on each application and each backend."""
    for backend in work.backends:
        todo = [name for name in settings.cases if work.section.row(f"{backend}/{name}") is None]
        if todo:
            with work.engine(backend) as engine:
                for index, name in enumerate(todo):
                    work.progress(index, len(todo), f"{backend}: {name}")
                    work.section.add(measure_case(engine, name, settings))
        work.progress(len(todo), len(todo), f"{backend}: done")


def measure_case(engine: Engine, name: str, settings: Settings) -> CaseRow:
    """One application: encode its schema, compare both ways several times, and answer both ways."""
    encoded = engine.encode(schemas.path(name))
    prompt = load_prompt(schemas.prompt_path(name))
    comparisons = [engine.compare(prompt) for _ in range(settings.repeats)]
    sampling = Sampling(max_tokens=settings.answer_tokens)
    cached, full = (engine.generate(prompt, sampling, Serving(use_cache=use_cache)) for use_cache in (True, False))
    samples = {
        "full_ttft_ms": tuple(round(each.full_ttft_ms, 3) for each in comparisons),
        "cached_ttft_ms": tuple(round(each.cached_ttft_ms, 3) for each in comparisons),
    }
    return CaseRow(
        key=f"{engine.backend.name}/{name}",
        backend=engine.backend.name,
        case=name,
        title=_TITLES.get(name, name),
        question=" ".join(piece.text.strip() for piece in prompt.free_text),
        modules=tuple(module.path for module in cached.stats.modules),
        prompt_tokens=cached.stats.prompt_tokens,
        cached_tokens=cached.stats.cached_tokens,
        computed_tokens=cached.stats.computed_tokens,
        encoded_tokens=encoded.tokens,
        encode_ms=round(encoded.seconds * 1e3, 1),
        samples_ms=samples,
        full_ttft_ms=median(samples["full_ttft_ms"]),
        cached_ttft_ms=median(samples["cached_ttft_ms"]),
        kl=comparisons[0].kl,
        same_first_token=comparisons[0].same_first_token,
        same_answer=cached.token_ids == full.token_ids,
        full=_answer(full),
        cached=_answer(cached),
    )


def _answer(result: Result) -> CaseAnswer:
    return CaseAnswer(result.text.strip(), result.stats.new_tokens, result.stop)


def tables(rows: Sequence[CaseRow]) -> list[Table]:
    """Times both ways, and both answers."""
    columns = {
        "backend": lambda row: TITLES[row.backend],
        "case": lambda row: row.title,
        "> cached + computed": lambda row: f"{row.cached_tokens} + {row.computed_tokens}",
        "> full (ms)": lambda row: milliseconds(row.full_ttft_ms),
        "> reuse (ms)": lambda row: milliseconds(row.cached_ttft_ms),
        "> speed-up": lambda row: f"{row.speed_up:.1f} ×",
        "> KL": lambda row: f"{row.kl:.3f}",
        "answer, full prefill": lambda row: row.full.text,
        "answer, reuse": lambda row: row.cached.text,
    }
    return [Table.of("Times, and both answers", rows, columns)]


BENCH = Bench(
    title="Applications",
    row=CaseRow,
    settings=Settings,
    measure=measure,
    tables=tables,
)
