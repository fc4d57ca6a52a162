"""Tables of `fidelity`: the operating envelope, what speaks for the defaults, and the conditions that are not close."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.rows import Agreement, FidelityRow
from benchmarks.statistics import Interval, PairedTest, mean_interval, paired_test
from edge_pc.bench.tables import Table
from edge_pc.compose.choices import ENCODING_RULES

# Reuse is called close to full prefill up to here: on average the first token's distribution moves by less than what
# 4-bit weights do to it (DESIGN.md: 0.21 to 0.39), and the right answer loses at most 5 % of its likelihood per token.
CLOSE_KL = 0.1
CLOSE_LOSS = 0.05

# Paired comparisons that decide defaults: group, the default's condition, and what it is set against. A condition
# that was not measured is left out.
_CHOICES = (
    (
        "parameters",
        "neutral, nothing",
        ("neutral, default", "neutral, unk", "guaranteed, nothing", "isolated, nothing"),
    ),
    (
        "subset",
        "neutral, tail=packed",
        ("neutral, tail=imported", "neutral, tail=schema", "guaranteed, tail=packed", "isolated, tail=packed"),
    ),
    ("parameters", "guaranteed, nothing", ("guaranteed, default", "guaranteed, unk", "isolated, nothing")),
    ("parameters", "isolated, nothing", ("isolated, default", "isolated, unk")),
    ("subset", "guaranteed, tail=imported", ("guaranteed, tail=schema", "isolated, tail=imported")),
    ("subset", "isolated, tail=imported", ("isolated, tail=schema",)),
)


class Condition:
    """One condition on all items that it was measured on.

    Attributes:
        group, name: what is set.
        items: item → agreement.
        kl, loss: means; the loss is None without right answers.
        answer_kl: as `kl`, over whole answers; None in older reports.
    """

    def __init__(self, group: str, name: str, items: dict[str, Agreement]) -> None:
        self.group = group
        self.name = name
        self.items = items
        self.kl = mean_interval([agreement.kl for agreement in items.values()])
        losses = [agreement.loss for agreement in items.values() if agreement.loss is not None]
        self.loss: Interval | None = mean_interval(losses) if losses else None
        answers = [agreement.answer_kl for agreement in items.values() if agreement.answer_kl is not None]
        self.answer_kl: Interval | None = mean_interval(answers) if answers else None

    @property
    def close(self) -> bool:
        return self.kl.mean <= CLOSE_KL and (self.loss is None or self.loss.mean <= CLOSE_LOSS)

    def share(self, holds: Callable[[Agreement], bool]) -> str:
        return f"{sum(map(holds, self.items.values())) / len(self.items):.0%}"


def conditions(rows: Sequence[FidelityRow]) -> list[Condition]:
    """All conditions that were measured, in order."""
    found: dict[tuple[str, str], dict[str, Agreement]] = {}
    for row in rows:
        if row.agreement is not None:
            found.setdefault((row.group, row.condition), {})[row.item] = row.agreement
    return [Condition(group, name, items) for (group, name), items in found.items()]


def tables(rows: Sequence[FidelityRow]) -> list[Table]:
    """The envelope, the paired comparisons, and what is not close."""
    found = conditions(rows)
    return [_envelope(found), _choices(found), _not_close(found)]


def _envelope(found: Sequence[Condition]) -> Table:
    columns: dict[str, Callable[[Condition], str]] = {
        "group": lambda each: each.group,
        "condition": lambda each: each.name,
        "> items": lambda each: str(len(each.items)),
        "> KL (nats)": lambda each: each.kl.text(3),
        "> KL of the answer (nats)": lambda each: each.answer_kl.text(3) if each.answer_kl else "",
        "> loss (nats per token)": lambda each: each.loss.text(3) if each.loss else "",
        "> same first token": lambda each: each.share(lambda agreement: agreement.same_first_token),
        "> same answer": lambda each: each.share(lambda agreement: agreement.edit_similarity == 1),
        "close": lambda each: "yes" if each.close else "no",
    }
    note = (
        "Against full prefill; 95 % intervals. Loss: log-likelihood per token that the right answer loses. "
        f"Close: KL at most {CLOSE_KL} and loss at most {CLOSE_LOSS}."
    )
    return Table.of("Operating envelope", found, columns, note)


def choices(found: Sequence[Condition]) -> Iterator[tuple[Condition, Condition, PairedTest]]:
    """(default, other condition, the other's KL against the default's on the items that both have)."""
    by_name = {(each.group, each.name): each for each in found}
    pairs = [(group, default, other) for group, default, others in _CHOICES for other in others]
    for each in found:
        modules, _, rule = each.name.partition(", ")
        if each.group == "modules" and rule in ("neutral", "guaranteed"):
            looser = ENCODING_RULES[ENCODING_RULES.index(rule) + 1 :]
            others = [*(f"{modules}, {other}" for other in looser), f"{modules.split()[0]} modules, scaffold"]
            pairs += [("modules", each.name, other) for other in others]
    for group, default, other in pairs:
        one, another = by_name.get((group, default)), by_name.get((group, other))
        if one and another:
            items = [item for item in one.items if item in another.items]
            yield one, another, paired_test([one.items[i].kl for i in items], [another.items[i].kl for i in items])


def _choices(found: Sequence[Condition]) -> Table:
    columns: dict[str, Callable[[tuple[Condition, Condition, PairedTest]], str]] = {
        "group": lambda line: line[0].group,
        "condition": lambda line: line[1].name,
        "against": lambda line: line[0].name,
        "> KL more (nats)": lambda line: line[2].difference.text(3, sign="+"),
        "> p": lambda line: f"{line[2].p_value:.4f}",
        "> larger on items": lambda line: str(line[2].better),
    }
    return Table.of(
        "Conditions against each other", choices(found), columns, "On the same items; paired sign-flip test."
    )


def _not_close(found: Sequence[Condition]) -> Table:
    columns: dict[str, Callable[[Condition], str]] = {
        "group": lambda each: each.group,
        "condition": lambda each: each.name,
        "> KL to full prefill (nats)": lambda each: each.kl.text(3),
    }
    return Table.of("Conditions under which reuse is not close", [e for e in found if not e.close], columns, worse=True)
