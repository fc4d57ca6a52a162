"""Tables about answers: how right they are, how close to full prefill, and where they are worse.

They are made from a section's rows, not from its summary, so that an interrupted bench shows what it has.
"""

from __future__ import annotations

from typing import Any

from edge_pc.bench import accuracy, fidelity_summary
from edge_pc.bench.report import Report, Section
from edge_pc.bench.tables import Table

# Of the items that lost, those that lost most are shown for each data set; the others are in the report.
_SHOWN = 3
_SHOWN_CHARACTERS = 400


def accuracy_tables(section: Section) -> list[Table]:
    """Right answers both ways, agreement of all answers, and the items that lost most."""
    summary = accuracy.summarize(section.rows)
    return [_right_table(summary), _agreement_table(summary), _lost_table(section, summary)]


def _right_table(summary: dict[str, Any]) -> Table:
    """Each data set's metrics both ways."""
    lines = []
    for name, found in summary.items():
        for metric, score in found.get("scores", {}).items():
            own = " (its own, %)" if metric == found["metric"] else " (%)"
            lines.append((name, str(found["items"]), metric + own, *_both_ways(score, 100, 1)))
        if found.get("gold_nats_per_token"):
            cells = _both_ways(found["gold_nats_per_token"], 1, 2)
            lines.append((name, str(found["items"]), "likelihood of the right answer (nats per token)", *cells))
    columns = ("data set", "> items", "metric", "> full prefill", "> reuse", "> difference", "> p")
    note = "With 95 % bootstrap intervals; p of a paired sign-flip test."
    return Table("Right answers, both ways", columns, lines, note)


def _agreement_table(summary: dict[str, Any]) -> Table:
    """How far the same answers agree, whether right or not."""
    lines = [
        (
            name, str(found["items"]), f"{found['mean_prompt_tokens']:,}", _interval(found["kl"], 1, 3),
            f"{found['same_first_token']:.0%}", f"{found['same_answer']:.0%}",
        )
        for name, found in summary.items()
        if found["items"]
    ]  # fmt: skip
    columns = ("data set", "> items", "> tokens of a prompt", "> KL of the first token (nats)", "> same first token")
    return Table("Agreement with full prefill", (*columns, "> same answer"), lines)


def _lost_table(section: Section, summary: dict[str, Any]) -> Table:
    """Of each data set the items that lost most on its own metric, and where the two answers part."""
    lines = []
    for found in summary.values():
        for key in found.get("worse", [])[:_SHOWN]:
            row = section.row(key)
            if row is not None:
                texts = (row["question"], " | ".join(row["right"]), row["full"]["text"], row["cached"]["text"])
                parting = accuracy.describe_parting(row["parting"]) if row["parting"] else ""
                lines.append((key, *map(_short, texts), parting))
    columns = ("item", "question", "right", "full prefill", "reuse", "where they part")
    note = (
        "The items that lost most on their data set's own metric. Where full prefill itself was nearly undecided, the "
        "difference is chance; where it was sure, reuse has lost something."
    )
    return Table("Where reuse answers worse", columns, lines, note)


def fidelity_table(section: Section) -> Table:
    """The operating envelope."""
    lines = []
    for found in fidelity_summary.summarize(section.rows)["conditions"]:
        loss = found["loss_nats_per_token"]
        lines.append(
            (
                found["group"], found["condition"], str(found["items"]), _interval(found["kl"], 1, 3),
                _interval(loss, 1, 3) if loss else "", f"{found['same_first_token']:.0%}",
                f"{found['same_answer']:.0%}", "yes" if found["close"] else "no",
            )
        )  # fmt: skip
    columns = ("group", "condition", "> items", "> KL (nats)", "> loss (nats per token)")
    note = "Against full prefill; 95 % intervals. Loss: log-likelihood per token that the right answer loses."
    return Table("Operating envelope", (*columns, "> same first token", "> same answer", "close"), lines, note)


def losses(report: Report) -> list[str]:
    """Where answers are worse with reuse, in sentences: data sets and conditions, as far as they were measured."""
    lines = []
    found_sections = report.sections
    if "accuracy" in found_sections:
        for name, found in accuracy.summarize(found_sections["accuracy"].rows).items():
            test = found["scores"][found["metric"]]["test"] if found["items"] else None
            if test and test["difference"]["mean"] < 0:
                lines.append(
                    f"{name}: {found['metric']} changes by {_interval(test['difference'], 100, 1, sign='+')} points "
                    f"(p = {test['p_value']:.2f}); worse on {test['worse']} items, better on {test['better']}"
                )
    if "fidelity" in found_sections:
        lines += [
            f"{found['group']}, {found['condition']}: KL {_interval(found['kl'], 1, 3)} to full prefill"
            for found in fidelity_summary.summarize(found_sections["fidelity"].rows)["conditions"]
            if not found["close"]
        ]
    return lines


def _both_ways(score: dict[str, Any], factor: float, digits: int) -> tuple[str, ...]:
    test = score["test"]
    ways = (_interval(score[way], factor, digits) for way in ("full", "cached"))
    return (*ways, _interval(test["difference"], factor, digits, sign="+"), f"{test['p_value']:.2f}")


def _interval(interval: dict[str, float], factor: float, digits: int, sign: str = "") -> str:
    mean, low, high = (f"{factor * interval[name]:{sign}.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
