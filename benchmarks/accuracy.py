"""`python -m benchmarks accuracy`: are answers with reused states as right as those of full prefill, on real questions?

Each item is answered greedily in full and at each level of fidelity, scored, and written into the report; after an
interruption the next item follows, and data sets can be added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import accuracy_tables
from benchmarks.datasets import Item, dataset_name, read_items
from benchmarks.lab import Lab, open_lab
from benchmarks.metrics import METRICS, best
from benchmarks.observe import Observation, agreement, observe, parting
from benchmarks.questions import Question, lay_out, question_of, task_of
from benchmarks.rows import AccuracyRow, Compared, ScoredAnswer
from edge_pc.bench.work import Bench, Work
from edge_pc.errors import ContextLengthError, OptionError
from edge_pc.runtime.serving import Fidelity

# Counted for every data set, beside its own metric.
WORD_METRICS = ("f1", "substring", "rouge_l")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        datasets: files as `read_items` takes them; their names, without endings, name their rows.
        items: of each data set, from the first on.
        levels: of fidelity.
    """

    datasets: tuple[Path, ...] = field(default=(), metadata={"adds_rows": True})
    items: int = field(default=100, metadata={"adds_rows": True})
    levels: tuple[Fidelity, ...] = field(default=("fast", "balanced"), metadata={"adds_rows": True})

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes about a minute."""
        return cls(items=4)


def measure(work: Work[AccuracyRow], settings: Settings) -> None:
    """Answer all items both ways; every file is read and checked before the first.

    Raises:
        OptionError: a file is malformed, two have one name, or its answers cannot be scored.
    """
    keyed = _keyed_items(settings)
    todo = {key: [x for x in settings.levels if work.section.row(f"{key}/{x}") is None] for key in keyed}
    todo = {key: levels for key, levels in todo.items() if levels}
    if todo:
        with open_lab(work) as lab:
            for done, (key, levels) in enumerate(todo.items(), start=len(keyed) - len(todo)):
                work.progress(done, len(keyed), key)
                for row in measure_item(lab, keyed[key], key, levels):
                    work.section.add(row)
    work.progress(len(keyed), len(keyed), "done")


def _keyed_items(settings: Settings) -> dict[str, Item]:
    keyed: dict[str, Item] = {}
    for path in settings.datasets:
        name = dataset_name(path)
        for item in read_items(path)[: settings.items]:
            task_of(item)
            key = f"{name}/{item.key}"
            if key in keyed:
                raise OptionError(f"two data sets are called {name!r}", hint="rename one of the files")
            keyed[key] = item
    return keyed


def measure_item(lab: Lab, item: Item, key: str, levels: Sequence[Fidelity]) -> list[AccuracyRow]:
    """One item in full and at each level."""
    compared: Sequence[Compared | None] = [None] * len(levels)
    skipped = ""
    try:
        compared = _compare(lab, question_of(item, lab), levels)
    except ContextLengthError as exc:
        skipped = exc.message.splitlines()[0]
    return [
        AccuracyRow(
            key=f"{key}/{level}",
            dataset=key.partition("/")[0],
            fidelity=level,
            question=item.question,
            right=item.answers,
            compared=each,
            skipped=skipped,
        )
        for level, each in zip(levels, compared, strict=True)
    ]


def _compare(lab: Lab, question: Question, levels: Sequence[Fidelity]) -> list[Compared]:
    most = question.task.max_tokens
    gold = lab.tokenizer.encode(question.item.answers[0])[:most]
    prompt = lay_out(question, lab)
    full = observe(lab, lab.full(prompt), gold, most)
    found = []
    for level in levels:
        ready = lab.cached(prompt, level)
        cached = observe(lab, ready, gold, most, follow=full)
        found.append(
            Compared(
                metric=question.task.metric,
                documents=len(question.parts),
                prompt_tokens=prompt.tokens,
                computed_tokens=len(ready.plan.token_ids),
                cut_tokens=question.cut_tokens,
                full=_answer(lab, question, full),
                cached=_answer(lab, question, cached),
                agreement=agreement(full, cached),
                parting=parting(full.answer, cached.answer, lab.tokenizer),
            )
        )
    lab.forget()
    return found


def _answer(lab: Lab, question: Question, observation: Observation) -> ScoredAnswer:
    """The text of an answer, and its scores."""
    text = lab.tokenizer.decode(observation.answer.token_ids).strip()
    # A model that goes on after its answer goes on in a new line; LongBench cuts there for short answers.
    scored = text if question.task.metric == "rouge_l" else text.partition("\n")[0]
    names = dict.fromkeys([question.task.metric, *WORD_METRICS])
    return ScoredAnswer(text, {name: round(best(METRICS[name], scored, question.item.answers), 5) for name in names})


BENCH = Bench(
    title="Accuracy",
    row=AccuracyRow,
    settings=Settings,
    measure=measure,
    tables=accuracy_tables.tables,
    one_backend=True,
)
