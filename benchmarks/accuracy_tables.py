"""Tables of `accuracy`: how right answers are, how far both ways agree, and where reuse is worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.rows import AccuracyRow, Agreement, Compared
from benchmarks.statistics import mean_interval, paired_test
from edge_pc.bench.tables import Table

# Of the items that lost, those that lost most are shown for each data set; the others are in the report.
_SHOWN = 3
_SHOWN_CHARACTERS = 400

_POINTS = 100.0  # scores are shown in percent


def tables(rows: Sequence[AccuracyRow]) -> list[Table]:
    """Right answers both ways, agreement of all answers, data sets that lose, and the items that lost most."""
    by_dataset: dict[str, list[AccuracyRow]] = {}
    for row in rows:
        by_dataset.setdefault(f"{row.dataset}, {row.fidelity}" if row.fidelity else row.dataset, []).append(row)
    found = [(name, rows, compared) for name, rows in by_dataset.items() if (compared := _compared(rows))]
    return [_right(found), _agreement(found), _losses(found), _lost(found)]


# A data set's name and level, its rows, and those of them that were compared.
DataSet = tuple[str, Sequence[AccuracyRow], Sequence[Compared]]


def _compared(rows: Sequence[AccuracyRow]) -> list[Compared]:
    return [row.compared for row in rows if row.compared is not None]


def _scores(compared: Sequence[Compared], metric: str) -> tuple[list[float], list[float]]:
    """The scores of full prefill, and those of reuse."""
    return [item.full.scores[metric] for item in compared], [item.cached.scores[metric] for item in compared]


def _right(found: Sequence[DataSet]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, _, compared in found:
        for metric in compared[0].full.scores:
            own = " (its own, %)" if metric == compared[0].metric else " (%)"
            full, cached = _scores(compared, metric)
            rows.append((name, str(len(compared)), metric + own, *_both_ways(full, cached, 1, _POINTS)))
        known = [item.agreement for item in compared if item.agreement.loss is not None]
        if known:
            full, cached = [a.gold_full or 0.0 for a in known], [a.gold_cached or 0.0 for a in known]
            title = "likelihood of the right answer (nats per token)"
            rows.append((name, str(len(compared)), title, *_both_ways(full, cached, 2, 1.0)))
    columns = ("data set", "> items", "metric", "> full prefill", "> reuse", "> difference", "> p")
    note = "With 95 % bootstrap intervals; p of a paired sign-flip test."
    return Table("Right answers, both ways", columns, tuple(rows), note)


def _both_ways(full: Sequence[float], cached: Sequence[float], digits: int, factor: float) -> Iterator[str]:
    test = paired_test(full, cached)
    yield from (mean_interval(way).text(digits, factor=factor) for way in (full, cached))
    yield test.difference.text(digits, factor=factor, sign="+")
    yield f"{test.p_value:.2f}"


def _agreement(found: Sequence[DataSet]) -> Table:
    columns: dict[str, Callable[[DataSet], str]] = {
        "data set": lambda line: line[0],
        "> items": lambda line: str(len(line[2])),
        "> skipped": lambda line: str(len(line[1]) - len(line[2])),
        "> cut to the model's positions": lambda line: str(sum(item.cut_tokens > 0 for item in line[2])),
        "> tokens of a prompt": lambda line: f"{_mean([item.prompt_tokens for item in line[2]]):,.0f}",
        "> computed": lambda line: f"{_mean([item.computed_tokens / item.prompt_tokens for item in line[2]]):.0%}",
        "> KL of the answer (nats)": lambda line: _known(line[2], lambda a: a.answer_kl, 3, 1.0),
        "> same likeliest tokens (%)": lambda line: _known(line[2], lambda a: a.same_tops, 1, _POINTS),
        "> KL of the first token (nats)": lambda line: mean_interval([i.agreement.kl for i in line[2]]).text(3),
        "> same first token": lambda line: f"{_mean([i.agreement.same_first_token for i in line[2]]):.0%}",
        "> same answer": lambda line: f"{_mean([i.agreement.edit_similarity == 1 for i in line[2]]):.0%}",
    }
    return Table.of("Agreement with full prefill", found, columns)


def _known(compared: Sequence[Compared], value: Callable[[Agreement], float | None], digits: int, factor: float) -> str:
    """The mean of a value that older reports lack."""
    values = [found for item in compared if (found := value(item.agreement)) is not None]
    return mean_interval(values).text(digits, factor=factor) if values else ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _losses(found: Sequence[DataSet]) -> Table:
    rows = []
    for name, _, compared in found:
        metric = compared[0].metric
        test = paired_test(*_scores(compared, metric))
        if test.difference.mean < 0:
            change = test.difference.text(1, factor=_POINTS, sign="+")
            rows.append((name, metric, change, f"{test.p_value:.2f}", str(test.worse), str(test.better)))
    columns = ("data set", "metric", "> change (points)", "> p", "> items worse", "> items better")
    note = "" if rows else "No data set loses on its own metric."
    return Table("Data sets that reuse answers worse", columns, tuple(rows), note, worse=True)


def _lost(found: Sequence[DataSet]) -> Table:
    """Of each data set the items that lost most on its own metric, and where the two answers part."""
    shown = []
    for _, rows, _ in found:
        lost = [row for row in rows if row.compared is not None and row.compared.lost > 0]
        shown += sorted(lost, key=lambda row: -row.compared.lost if row.compared else 0.0)[:_SHOWN]
    lines = [(row, row.compared) for row in shown if row.compared is not None]
    columns: dict[str, Callable[[tuple[AccuracyRow, Compared]], str]] = {
        "item": lambda line: line[0].key,
        "question": lambda line: _short(line[0].question),
        "right": lambda line: _short(" | ".join(line[0].right)),
        "full prefill": lambda line: _short(line[1].full.text),
        "reuse": lambda line: _short(line[1].cached.text),
        "where they part": lambda line: str(line[1].parting or ""),
    }
    note = (
        "The items that lost most on their data set's own metric. Where full prefill itself was nearly undecided, the "
        "difference is chance; where it was sure, reuse has lost something."
    )
    return Table.of("Where reuse answers worse", lines, columns, note, worse=True)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
