"""`bench fidelity`: how far reuse is from full prefill, and under which conditions it stays close.

Prompts are continued both ways from the same tokens. Conditions vary one thing at a time: how documents are cut into
modules, how modules are encoded, gaps in the positions, where free text begins, what stands in a parameter's slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge_pc.bench.arrange import Arrangement, ask_all, subset
from edge_pc.bench.datasets import Item, dataset_name, read_items
from edge_pc.bench.fidelity_summary import summarize
from edge_pc.bench.lab import Lab, LaidOut, Variant, open_lab
from edge_pc.bench.observe import Agreement, Observation, agreement, observe
from edge_pc.bench.questions import Question, question_of
from edge_pc.bench.report import Progress, Report, Row, Section, no_progress
from edge_pc.bench.setup import BenchOptions, chosen_backends
from edge_pc.bench.templates import parameter_prompts
from edge_pc.compose.choices import ENCODING_RULES, PLACEHOLDERS, TAILS
from edge_pc.errors import ContextLengthError, PMLError
from edge_pc.pml.model import Schema, Selection

SECTION = "fidelity"

# An item with at least this many documents gives `SUBSET` of them; smaller ones are arranged with all they have.
ALL_DOCUMENTS, SUBSET = 15, 5


@dataclass(frozen=True, slots=True)
class FidelitySettings:
    """What `bench fidelity` measures.

    Attributes:
        items: of each data set, from the first on.
        module_counts: modules that the documents of an item are put into.
        gaps: sizes of a gap in the middle, in positions.
        spread: numbers of gaps that share `spread_gap` positions.
        answer_tokens: of the greedy answers that are compared.
        templates: prompts with parameters, at most; None: all.
    """

    items: int = 20
    module_counts: tuple[int, ...] = (1, 2, 5, 10)
    gaps: tuple[int, ...] = (0, 64, 256, 1024, 3000, 6000)
    spread: tuple[int, ...] = (3, 9)
    spread_gap: int = 1024
    answer_tokens: int = 16
    templates: int | None = None

    @classmethod
    def quick(cls) -> FidelitySettings:
        """A size that takes about a minute."""
        return cls(items=2, module_counts=(5,), gaps=(0, 1024), spread=(3,), answer_tokens=8, templates=4)

    def of_a_row(self) -> dict[str, Any]:
        """What a row depends on; items can be added to a section later."""
        return {name: value for name, value in asdict(self).items() if name not in ("items", "templates")}


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing to measure on an item: its group and name in tables, and how the prompt is made."""

    group: str
    name: str
    schema: Schema
    selection: Selection
    variant: Variant


@dataclass(frozen=True, slots=True)
class Subject:
    """An item with everything that is measured on it; `answer` is its right answer, empty where there is none."""

    key: str
    answer: str
    conditions: tuple[Condition, ...]


def run_fidelity(
    report: Report,
    options: BenchOptions,
    settings: FidelitySettings,
    progress: Progress = no_progress,
    *,
    datasets: Sequence[Path] = (),
    command: Sequence[str] = (),
    restart: bool = False,
) -> Section:
    """Fill the section `fidelity` and return it.

    Args:
        datasets: questions about several documents; without any, only prompts with parameters are measured.

    Raises:
        OptionError: a file is malformed, or the section was begun with other settings.
    """
    backend = chosen_backends(options)[0]
    items = [(f"{dataset_name(path)}/{i.key}", i) for path in datasets for i in read_items(path)[: settings.items]]
    section = report.section(SECTION, settings.of_a_row() | {"backend": backend}, command=command, restart=restart)
    with open_lab(options, backend) as lab:
        templates = list(parameter_subjects(lab.has_unk))[: settings.templates]
        total = len(items) + len(templates)
        for done, subject in enumerate(templates):
            progress(done, total, subject.key)
            measure(section, lab, subject, settings)
        for done, (key, item) in enumerate(items, start=len(templates)):
            progress(done, total, key)
            measure(section, lab, item_subject(lab, key, item, settings), settings)
    progress(total, total, "done")
    section.summarize(summarize(section.rows))
    return section


def measure(section: Section, lab: Lab, subject: Subject, settings: FidelitySettings) -> None:
    """Fill the rows of one item."""
    keyed = {f"{each.group}/{each.name}/{subject.key}": each for each in subject.conditions}
    todo = {key: condition for key, condition in keyed.items() if not section.row_done(key)}
    both_ways = _BothWays(lab, lab.tokenizer.encode(subject.answer), settings.answer_tokens)
    for key, condition in todo.items():
        row: Row = {"group": condition.group, "condition": condition.name, "item": subject.key}
        try:
            laid_out = lab.lay_out(
                condition.schema, condition.selection, condition.variant, answer_tokens=settings.answer_tokens
            )
        except (ContextLengthError, PMLError) as exc:  # too long for this model's positions, or for a slot
            section.add(key, row | {"skipped": exc.message.splitlines()[0]})
            continue
        row |= {"tokens": laid_out.prompt.tokens, "end": laid_out.prompt.end}
        section.add(key, row | both_ways.compare(laid_out).as_row())
    if todo:
        lab.forget()


class _BothWays:
    """Compares many ways to reuse states with full prefills, each of which is computed once."""

    def __init__(self, lab: Lab, gold: list[int], answer_tokens: int) -> None:
        self._lab = lab
        self._gold = gold[:answer_tokens]
        self._answer_tokens = answer_tokens
        self._full: dict[bytes, Observation] = {}

    def compare(self, laid_out: LaidOut) -> Agreement:
        tokens = laid_out.prompt.in_position_order().tobytes()
        if tokens not in self._full:
            self._full[tokens] = observe(self._lab, self._lab.full(laid_out.prompt), self._gold, self._answer_tokens)
        cached = observe(self._lab, self._lab.cached(laid_out), self._gold, self._answer_tokens)
        return agreement(self._full[tokens], cached)


def parameter_subjects(has_unk: bool) -> Iterator[Subject]:
    """Prompts with parameters, under each rule and with each placeholder."""
    for key, schema, selection, answer in parameter_prompts():
        conditions = [
            Condition("parameters", f"{rule}, {placeholder}", schema, selection, Variant(rule, placeholder))
            for rule in ENCODING_RULES
            for placeholder in PLACEHOLDERS
            if has_unk or placeholder != "unk"
        ]
        yield Subject(key, answer, tuple(conditions))


def item_subject(lab: Lab, key: str, item: Item, settings: FidelitySettings) -> Subject:
    """A question about documents: some of many of them, or all of few in every arrangement."""
    many = len(item.documents) >= ALL_DOCUMENTS
    question = question_of(_first_documents(item) if many else item, lab)
    if many:
        conditions = list(_subset_conditions(question, seed=key, chat=lab.chat))
    else:
        conditions = [
            *_module_conditions(question, settings, chat=lab.chat),
            *_gap_conditions(question, settings, chat=lab.chat),
        ]
    return Subject(key, item.answers[0], tuple(conditions))


def _first_documents(item: Item) -> Item:
    """The item with `ALL_DOCUMENTS` documents; the one with the answer takes the last place if it comes later."""
    documents, gold = item.documents[:ALL_DOCUMENTS], item.gold
    if gold is not None and gold >= ALL_DOCUMENTS:
        documents, gold = (*documents[:-1], item.documents[gold]), ALL_DOCUMENTS - 1
    return replace(item, documents=documents, gold=gold)


def _subset_conditions(question: Question, *, seed: str, chat: bool) -> Iterator[Condition]:
    shuffled, places = subset(question, question.item.gold, SUBSET, seed)
    schema = Arrangement(len(shuffled.parts)).schema(shuffled, chat=chat)
    paths = list(schema.modules())
    selection = shuffled.ask([paths[place] for place in places], chat=chat)
    for rule in ENCODING_RULES:
        for tail in TAILS:
            variant = Variant(rule, tail=tail)
            yield Condition("subset", f"{rule}, tail={tail}", schema, selection, variant)


def _module_conditions(question: Question, settings: FidelitySettings, *, chat: bool) -> Iterator[Condition]:
    """The documents in one and more modules; each with its own encoding rule."""
    for count in settings.module_counts:
        for rule in ENCODING_RULES:
            yield _condition("modules", f"{count} module(s), {rule}", Arrangement(count), question, Variant(rule), chat)
    most = max(settings.module_counts)
    if most > 1:
        arrangement = Arrangement(most, scaffold=True)
        yield _condition("modules", f"{most} modules, scaffold", arrangement, question, Variant(), chat)


def _gap_conditions(question: Question, settings: FidelitySettings, *, chat: bool) -> Iterator[Condition]:
    """Gaps between documents that see each other (what gaps alone do), and between modules."""
    size = settings.spread_gap
    for name, count in (("one text", 0), (f"{max(settings.module_counts)} modules", max(settings.module_counts))):
        pieces = Arrangement(count).pieces(len(question.parts))
        for gap in settings.gaps:
            arrangement = Arrangement(count, gap, (pieces // 2,))
            yield _condition("gaps", f"{name}, {gap} in the middle", arrangement, question, Variant(), chat)
        for number in settings.spread:
            places = tuple(dict.fromkeys(pieces * (index + 1) // (number + 1) for index in range(number)))
            arrangement = Arrangement(count, size, places)
            yield _condition("gaps", f"{name}, {size} in {number} gaps", arrangement, question, Variant(), chat)
        front, end = Arrangement(count, size, (0,)), Arrangement(count, size, (pieces,))
        yield _condition("gaps", f"{name}, {size} before the documents", front, question, Variant(), chat)
        behind = Variant(tail="schema")
        yield _condition("gaps", f"{name}, {size} before the question", end, question, behind, chat)


def _condition(
    group: str, name: str, arrangement: Arrangement, question: Question, variant: Variant, chat: bool
) -> Condition:
    schema = arrangement.schema(question, chat=chat)
    return Condition(group, name, schema, ask_all(question, schema, chat=chat), variant)
