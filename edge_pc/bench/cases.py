"""`bench cases`: the paper's three applications on the ready schemas: code from several source files, personalised
tutoring, travel plans with parameters; and a persona put together from traits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from edge_pc import schemas
from edge_pc.bench.report import Progress, Report, Row, Section, no_progress
from edge_pc.bench.setup import BenchOptions, chosen_backends, open_engine, states_folder
from edge_pc.engine import Engine
from edge_pc.pml import Prompt
from edge_pc.pml.prompt import load_prompt
from edge_pc.runtime.compare import Comparison
from edge_pc.runtime.prefill import Serving
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.stats import Result

SECTION = "cases"

_TITLES = {
    "code": "code from several source files",
    "tutoring": "personalised tutoring",
    "travel": "a travel plan with parameters",
    "persona": "a persona put together from traits",
}


@dataclass(frozen=True, slots=True)
class CasesSettings:
    """What `bench cases` measures.

    Attributes:
        cases: ready schemas, each with its own prompt.
        repeats: comparisons of each; medians are reported.
        answer_tokens: of the two answers, at most.
    """

    cases: tuple[str, ...] = tuple(_TITLES)
    repeats: int = 5
    answer_tokens: int = 96

    @classmethod
    def quick(cls) -> CasesSettings:
        """A size that takes some seconds."""
        return cls(repeats=1, answer_tokens=24)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_cases(
    report: Report,
    options: BenchOptions,
    settings: CasesSettings,
    progress: Progress = no_progress,
    *,
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `cases` and return it."""
    backends = chosen_backends(options)
    asked = settings.as_dict() | {"backends": backends, "threads": options.threads}
    section = report.section(SECTION, asked, command=command, restart=restart)
    total = len(backends) * len(settings.cases)
    with states_folder(options) as folder:
        for number, backend in enumerate(backends):
            todo = [name for name in settings.cases if not section.row_done(f"{backend}/{name}")]
            if not todo:
                continue
            with open_engine(options, backend, folder) as engine:
                for name in todo:
                    progress(number * len(settings.cases) + settings.cases.index(name), total, f"{backend}: {name}")
                    section.add(f"{backend}/{name}", {"backend": backend} | measure(engine, name, settings))
    progress(total, total, "done")
    section.summarize(summarize(section.rows))
    return section


def measure(engine: Engine, name: str, settings: CasesSettings) -> Row:
    """One application: encode its schema, compare both ways several times, and answer both ways."""
    encoded = engine.encode(engine.load_schema(schemas.path(name)))
    prompt = load_prompt(schemas.prompt_path(name))
    comparisons = [engine.compare(prompt) for _ in range(settings.repeats)]
    sampling = Sampling(max_tokens=settings.answer_tokens)
    cached, full = (engine.generate(prompt, sampling, Serving(use_cache=use_cache)) for use_cache in (True, False))
    stats = cached.stats
    return {
        "case": name,
        "title": _TITLES.get(name, name),
        "question": _question(prompt),
        "modules": [module.path for module in stats.modules],
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "computed_tokens": stats.computed_tokens,
        "encoded_tokens": encoded.tokens,
        "encode_ms": round(encoded.seconds * 1e3, 1),
        **_times(comparisons),
        "kl": comparisons[0].kl,
        "same_first_token": comparisons[0].same_first_token,
        "same_answer": cached.token_ids == full.token_ids,
        "full": _answer(full),
        "cached": _answer(cached),
    }


def _question(prompt: Prompt) -> str:
    return " ".join(piece.text.strip() for piece in prompt.free_text)


def _times(comparisons: Sequence[Comparison]) -> Row:
    samples = {
        "full_ttft_ms": [each.full_ttft_ms for each in comparisons],
        "cached_ttft_ms": [each.cached_ttft_ms for each in comparisons],
    }
    medians = {name: round(median(times), 3) for name, times in samples.items()}
    return {
        **medians,
        "speed_up": round(medians["full_ttft_ms"] / medians["cached_ttft_ms"], 2),
        "samples_ms": {name: [round(time, 3) for time in times] for name, times in samples.items()},
    }


def _answer(result: Result) -> Row:
    return {"text": result.text.strip(), "tokens": result.stats.new_tokens, "stop": result.stop}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """For each backend, the speed-up of each application and the smallest of all."""
    summary: dict[str, Any] = {}
    for row in rows:
        found = summary.setdefault(row["backend"], {"speed_up": {}})
        found["speed_up"][row["case"]] = row["speed_up"]
    for found in summary.values():
        found["least_speed_up"] = min(found["speed_up"].values())
    return summary


def findings(section: Section) -> list[str]:
    """The rows as text, the two answers one under the other."""
    lines = []
    for row in section.rows:
        same = "the same" if row["same_first_token"] else "another"
        lines += [
            f"{row['backend']}: {row['title']}: {row['cached_tokens']} tokens cached, {row['computed_tokens']} new",
            f"  TTFT {row['full_ttft_ms']:.0f} ms in full, {row['cached_ttft_ms']:.0f} ms cached: "
            f"{row['speed_up']:.1f} x; KL {row['kl']:.3f}, first token {same}",
            f"  {row['question']}",
            f"  full:   {' '.join(row['full']['text'].split())}",
            f"  cached: {' '.join(row['cached']['text'].split())}",
        ]
    return lines
