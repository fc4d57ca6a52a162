"""What follows from the rows of `bench fidelity`: a table of conditions, the operating envelope, and the choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from edge_pc.bench.report import Row
from edge_pc.bench.statistics import mean_interval, paired_test

# Reuse is called close to full prefill up to here: on average the first token's distribution moves by less than what
# 4-bit weights do to it (DESIGN.md: 0.21 to 0.39), and the right answer loses at most 5 % of its likelihood per token.
CLOSE_KL = 0.1
CLOSE_LOSS = 0.05

# Paired comparisons that decide defaults: group, the default's condition, and what it is set against. A condition
# that was not measured is left out.
_CHOICES = (
    ("parameters", "guaranteed, nothing", ("guaranteed, default", "guaranteed, unk", "isolated, nothing")),
    ("parameters", "isolated, nothing", ("isolated, default", "isolated, unk")),
    ("subset", "guaranteed, tail=imported", ("guaranteed, tail=schema", "isolated, tail=imported")),
    ("subset", "isolated, tail=imported", ("isolated, tail=schema",)),
)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """`conditions`: numbers of each; `choices`: paired comparisons, in nats of KL and of likelihood per token."""
    measured = [row for row in rows if "skipped" not in row]
    names = dict.fromkeys((row["group"], row["condition"]) for row in measured)
    by_name = {name: [row for row in measured if (row["group"], row["condition"]) == name] for name in names}
    conditions = [
        {"group": group, "condition": condition, **_numbers(found)} for (group, condition), found in by_name.items()
    ]
    return {"conditions": conditions, "choices": _choices(by_name), "close": {"kl": CLOSE_KL, "loss": CLOSE_LOSS}}


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    losses = [_loss(row) for row in rows if row["gold_full"] is not None]
    kl = mean_interval([row["kl"] for row in rows])
    loss = mean_interval(losses) if losses else None
    count = len(rows)
    return {
        "items": count,
        "kl": asdict(kl),
        "median_kl": median(row["kl"] for row in rows),
        "same_first_token": sum(row["same_first_token"] for row in rows) / count,
        "loss_nats_per_token": asdict(loss) if loss else None,
        "same_answer": sum(row["edit_similarity"] == 1 for row in rows) / count,
        "edit_similarity": sum(row["edit_similarity"] for row in rows) / count,
        "close": kl.mean <= CLOSE_KL and (loss is None or loss.mean <= CLOSE_LOSS),
    }


def _choices(by_name: dict[tuple[str, str], list[Row]]) -> list[dict[str, Any]]:
    pairs = [(group, default, other) for group, default, others in _CHOICES for other in others]
    counts = [name for group, name in by_name if group == "modules" and name.endswith(", guaranteed")]
    for name in counts:
        size = name.split()[0]
        pairs += [("modules", name, f"{name.split(',')[0]}, isolated"), ("modules", name, f"{size} modules, scaffold")]
    return [
        _choice(group, default, other, by_name[group, default], by_name[group, other])
        for group, default, other in pairs
        if (group, default) in by_name and (group, other) in by_name
    ]


def _choice(group: str, default: str, other: str, rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """The other condition against the default, on the items that both have."""
    found = {row["item"]: row for row in others}
    pairs = [(row, found[row["item"]]) for row in rows if row["item"] in found]
    gold = [(mine, theirs) for mine, theirs in pairs if mine["gold_full"] is not None]
    likelihood = paired_test([_loss(mine) for mine, _ in gold], [_loss(theirs) for _, theirs in gold]) if gold else None
    return {
        "group": group,
        "default": default,
        "other": other,
        "items": len(pairs),
        "kl": asdict(paired_test([mine["kl"] for mine, _ in pairs], [theirs["kl"] for _, theirs in pairs])),
        "loss": asdict(likelihood) if likelihood else None,
    }


def _loss(row: Row) -> float:
    """Log-likelihood per token that the right answer loses, in nats; negative where it gains."""
    return float(row["gold_full"] - row["gold_cached"])


def findings(summary: dict[str, Any]) -> list[str]:
    """The operating envelope as a table, and what the defaults were compared with, for people."""
    lines = [
        "group       condition                              items  KL [95 %]              loss/token [95 %]      "
        "same 1st  same answer  close"
    ]
    for found in summary["conditions"]:
        kl, loss = _interval(found["kl"]), _interval(found["loss_nats_per_token"], signed=True)
        lines.append(
            f"{found['group']:<11} {found['condition']:<38} {found['items']:>5}  {kl:<22} {loss:<22} "
            f"{found['same_first_token']:>8.0%}  {found['same_answer']:>11.0%}  {'yes' if found['close'] else 'no'}"
        )
    close = summary["close"]
    lines.append(f"close: KL at most {close['kl']} nats and at most {close['loss']} nats lost per token of the answer")
    for choice in summary["choices"]:
        kl = choice["kl"]
        lines.append(
            f"{choice['group']}: {choice['other']} against {choice['default']}: KL "
            f"{_interval(kl['difference'], signed=True)}, p = {kl['p_value']:.4f}, larger on {kl['better']} of "
            f"{choice['items']}"
        )
    return lines


def _interval(interval: dict[str, float] | None, *, signed: bool = False) -> str:
    if interval is None:
        return "-"
    sign = "+" if signed else ""
    return f"{interval['mean']:{sign}.3f} [{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"
