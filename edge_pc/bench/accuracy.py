"""`bench accuracy`: are answers with reused states as right as those of full prefill, on real questions?

Each item is answered greedily both ways, scored, and written into the report; a bench that was interrupted goes on
with the next item, and data sets can be added later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_pc.bench.datasets import Item, dataset_name, read_items
from edge_pc.bench.lab import Lab, open_lab
from edge_pc.bench.metrics import METRICS, best
from edge_pc.bench.observe import Observation, agreement, observe, parting
from edge_pc.bench.questions import Question, lay_out, question_of, task_of
from edge_pc.bench.report import Progress, Report, Row, Section, no_progress
from edge_pc.bench.setup import BenchOptions, chosen_backends
from edge_pc.bench.statistics import mean_interval, paired_test
from edge_pc.errors import ContextLengthError, OptionError

SECTION = "accuracy"

# Counted for every data set, beside its own metric.
WORD_METRICS = ("f1", "substring", "rouge_l")

# In `findings`: the items that lost most are shown, the rest is in the report.
_SHOWN = 5
_SHOWN_CHARACTERS = 90


@dataclass(frozen=True, slots=True)
class AccuracySettings:
    """What `bench accuracy` measures.

    Attributes:
        items: of each data set, from the first on.
    """

    items: int = 100

    @classmethod
    def quick(cls) -> AccuracySettings:
        """A size that takes about a minute."""
        return cls(items=4)


def run_accuracy(
    report: Report,
    options: BenchOptions,
    settings: AccuracySettings,
    progress: Progress = no_progress,
    *,
    datasets: Sequence[Path],
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `accuracy` and return it.

    Args:
        datasets: files as `read_items` takes them; their names, without endings, name their rows.

    Raises:
        OptionError: a file is malformed, two have one name, or its answers cannot be scored.
    """
    backend = chosen_backends(options)[0]
    work = _work(datasets, settings)
    section = report.section(SECTION, {"backend": backend}, command=command, restart=restart)
    todo = [(key, item) for key, item in work if not section.row_done(key)]
    if todo:
        with open_lab(options, backend) as lab:
            for done, (key, item) in enumerate(todo, start=len(work) - len(todo)):
                progress(done, len(work), key)
                section.add(key, measure(lab, item, dataset=key.partition("/")[0]))
    progress(len(work), len(work), "done")
    section.summarize(summarize(section.rows))
    return section


def _work(datasets: Sequence[Path], settings: AccuracySettings) -> list[tuple[str, Item]]:
    """(row key, item) of all items; every file is read and checked before the first item is measured."""
    work: dict[str, Item] = {}
    for path in datasets:
        name = dataset_name(path)
        for item in read_items(path)[: settings.items]:
            task_of(item)
            key = f"{name}/{item.key}"
            if key in work:
                raise OptionError(f"two data sets are called {name!r}", hint="rename one of the files")
            work[key] = item
    return list(work.items())


def measure(lab: Lab, item: Item, dataset: str) -> Row:
    """One item both ways."""
    row: Row = {"dataset": dataset, "question": item.question, "right": list(item.answers)}
    try:
        question = question_of(item, lab)
    except ContextLengthError as exc:
        return row | {"skipped": exc.message.splitlines()[0]}
    gold = lab.tokenizer.encode(item.answers[0])[: question.task.max_tokens]
    laid_out = lay_out(question, lab)
    full = observe(lab, lab.full(laid_out.prompt), gold, question.task.max_tokens)
    cached = observe(lab, lab.cached(laid_out), gold, question.task.max_tokens)
    lab.forget()
    row |= {
        "metric": question.task.metric,
        "documents": len(question.parts),
        "prompt_tokens": laid_out.prompt.tokens,
        "computed_tokens": len(laid_out.prompt.token_ids),
        "cut_tokens": question.cut_tokens,
    }
    row |= {"full": _answer(lab, question, full), "cached": _answer(lab, question, cached)}
    return row | {"parting": parting(full.answer, cached.answer, lab.tokenizer)} | agreement(full, cached).as_row()


def _answer(lab: Lab, question: Question, observation: Observation) -> Row:
    """The text of an answer, and its scores."""
    text = lab.tokenizer.decode(observation.answer.token_ids).strip()
    # A model that goes on after its answer goes on in a new line; LongBench cuts there for short answers.
    scored = text if question.task.metric == "rouge_l" else text.partition("\n")[0]
    names = dict.fromkeys([question.task.metric, *WORD_METRICS])
    scores = {name: round(best(METRICS[name], scored, question.item.answers), 5) for name in names}
    return {"text": text, "scores": scores}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """For each data set: every metric both ways with intervals, the paired test, and the items that lost most."""
    names = dict.fromkeys(row["dataset"] for row in rows)
    return {name: _summarize_dataset([row for row in rows if row["dataset"] == name]) for name in names}


def _summarize_dataset(all_rows: Sequence[Row]) -> dict[str, Any]:
    rows = [row for row in all_rows if "skipped" not in row]
    summary: dict[str, Any] = {
        "items": len(rows),
        "skipped": len(all_rows) - len(rows),
        "cut_items": sum(row["cut_tokens"] > 0 for row in rows),
        "cut_tokens": sum(row["cut_tokens"] for row in rows),
    }
    if not rows:
        return summary
    metric = rows[0]["metric"]
    scores = {name: _both_ways(rows, _score(name)) for name in rows[0]["full"]["scores"]}
    gold = [row for row in rows if row["gold_full"] is not None]
    lost = sorted((row for row in rows if _loss(row) > 0), key=_loss, reverse=True)
    return summary | {
        "mean_prompt_tokens": round(sum(row["prompt_tokens"] for row in rows) / len(rows)),
        "metric": metric,
        "scores": scores,
        "gold_nats_per_token": _both_ways(gold, lambda row, way: float(row[f"gold_{way}"])) if gold else None,
        "kl": asdict(mean_interval([row["kl"] for row in rows])),
        "same_first_token": sum(row["same_first_token"] for row in rows) / len(rows),
        "same_answer": sum(row["edit_similarity"] == 1 for row in rows) / len(rows),
        "worse": [row["key"] for row in lost],
    }


def _both_ways(rows: Sequence[Row], value: Callable[[Row, str], float]) -> dict[str, Any]:
    full, cached = ([value(row, way) for row in rows] for way in ("full", "cached"))
    test = paired_test(full, cached)
    return {"full": asdict(mean_interval(full)), "cached": asdict(mean_interval(cached)), "test": asdict(test)}


def _score(name: str) -> Callable[[Row, str], float]:
    return lambda row, way: float(row[way]["scores"][name])


def _loss(row: Row) -> float:
    """How much worse reuse does on the data set's own metric."""
    value = _score(row["metric"])
    return value(row, "full") - value(row, "cached")


def findings(section: Section) -> list[str]:
    """The summary in sentences, and the items that lost most with what happened to them."""
    lines = []
    for name, found in section.summary.items():
        lines.append(_counts(name, found))
        if found["items"]:
            lines += [f"  {line}" for line in _scores(found)]
            lost = [section.row(key) for key in found["worse"]]
            lines += [f"  {line}" for row in lost[:_SHOWN] if row is not None for line in explain(row)]
            if len(lost) > _SHOWN:
                lines.append(f"  … and {len(lost) - _SHOWN} more items in the report")
    return lines


def _counts(name: str, found: dict[str, Any]) -> str:
    text = f"{name}: {found['items']} items"
    if found["cut_items"]:
        text += f", {found['cut_items']} of them cut to the model's positions ({found['cut_tokens']} tokens left out)"
    return text + (f", {found['skipped']} skipped" if found["skipped"] else "")


def _scores(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, score in found["scores"].items():
        test, own = score["test"], " (its own metric)" if name == found["metric"] else ""
        change = test["difference"]
        lines.append(
            f"{name}{own}: full {_percent(score['full'])}, cached {_percent(score['cached'])}, "
            f"difference {100 * change['mean']:+.1f} [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}], "
            f"p = {test['p_value']:.2f}, better on {test['better']}, worse on {test['worse']}"
        )
    return lines


def _percent(interval: dict[str, float]) -> str:
    return f"{100 * interval['mean']:.1f} [{100 * interval['low']:.1f}, {100 * interval['high']:.1f}]"


def explain(row: Row) -> list[str]:
    """What happened to an item: the answers, and where they part."""
    lines = [f"worse: {row['key']}: {_short(row['question'])}", f"  right:  {_short(' | '.join(row['right']))}"]
    lines += [f"  {way + ':':7} {_short(row[way]['text'])}" for way in ("full", "cached")]
    return lines + ([f"  they part at {describe_parting(row['parting'])}"] if row["parting"] else [])


def describe_parting(part: dict[str, Any]) -> str:
    """Where two answers part, given a row's `parting`: what each way chose there, and how sure it was."""
    (mine, others), (theirs, own) = part["full_probabilities"], part["cached_probabilities"]
    return (
        f"token {part['token'] + 1}: full {part['full_chose']!r} ({mine:.0%}) before {part['cached_chose']!r} "
        f"({others:.0%}); cached {own:.0%} against {theirs:.0%}"
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
