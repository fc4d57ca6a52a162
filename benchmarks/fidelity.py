"""`python -m benchmarks fidelity`: how far reuse is from full prefill, and under which conditions it stays close.

Prompts are continued both ways from the same tokens. Conditions vary one thing at a time: how documents are cut into
modules, how modules are encoded, gaps in the positions, where free text begins, what stands in a parameter's slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import fidelity_tables
from benchmarks.arrange import Arrangement, ask_all, subset
from benchmarks.datasets import Item, dataset_name, read_items
from benchmarks.lab import Lab, open_lab
from benchmarks.observe import Observation, agreement, observe
from benchmarks.questions import Question, question_of
from benchmarks.rivals import Way, ready
from benchmarks.rows import Agreement, FidelityRow
from benchmarks.templates import parameter_prompts
from edge_pc.bench.report import Section
from edge_pc.bench.work import Bench, Work
from edge_pc.compose.choices import ENCODING_RULES, PLACEHOLDERS, TAILS
from edge_pc.compose.composer import ComposeOptions
from edge_pc.compose.laid_out import LaidOut
from edge_pc.errors import ContextLengthError, PMLError
from edge_pc.pml.model import Schema, Selection

# An item with at least this many documents gives `SUBSET` of them; smaller ones are arranged with all they have.
ALL_DOCUMENTS, SUBSET = 15, 5


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes:
        datasets: questions about several documents; without any, only prompts with parameters are measured.
        items: of each data set, from the first on.
        templates: prompts with parameters, at most; None: all.
        module_counts: modules that the documents of an item are put into.
        gaps: sizes of a gap in the middle, in positions.
        spread: numbers of gaps that share `spread_gap` positions.
        answer_tokens: of the greedy answers that are compared.
    """

    datasets: tuple[Path, ...] = field(default=(), metadata={"adds_rows": True})
    items: int = field(default=20, metadata={"adds_rows": True})
    templates: int | None = field(default=None, metadata={"adds_rows": True})
    module_counts: tuple[int, ...] = (1, 2, 5, 10)
    gaps: tuple[int, ...] = (0, 64, 256, 1024, 3000, 6000)
    spread: tuple[int, ...] = (3, 9)
    spread_gap: int = 1024
    answer_tokens: int = 16

    @classmethod
    def quick(cls) -> Settings:
        """A size that takes about a minute."""
        return cls(items=2, module_counts=(5,), gaps=(0, 1024), spread=(3,), answer_tokens=8, templates=4)


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing to measure on an item: its group and name in tables, how the prompt is made, how states serve it."""

    group: str
    name: str
    schema: Schema
    selection: Selection
    options: ComposeOptions
    way: Way = "fast"


@dataclass(frozen=True, slots=True)
class Subject:
    """An item with everything that is measured on it; `answer` is its right answer, empty where there is none."""

    key: str
    answer: str
    conditions: tuple[Condition, ...]


def measure(work: Work[FidelityRow], settings: Settings) -> None:
    """Measure every condition on every prompt with parameters, and on every item.

    Raises:
        OptionError: a file is malformed.
    """
    items = {
        f"{dataset_name(path)}/{i.key}": i for path in settings.datasets for i in read_items(path)[: settings.items]
    }
    with open_lab(work) as lab:
        templates = list(parameter_subjects(lab.has_unk))[: settings.templates]
        total = len(items) + len(templates)
        for done, subject in enumerate(templates):
            work.progress(done, total, subject.key)
            measure_subject(work.section, lab, subject, settings)
        for done, (key, item) in enumerate(items.items(), start=len(templates)):
            work.progress(done, total, key)
            measure_subject(work.section, lab, item_subject(lab, key, item, settings), settings)
    work.progress(total, total, "done")


def measure_subject(section: Section[FidelityRow], lab: Lab, subject: Subject, settings: Settings) -> None:
    """Fill the rows of one item."""
    keyed = {f"{each.group}/{each.name}/{subject.key}": each for each in subject.conditions}
    todo = {key: condition for key, condition in keyed.items() if section.row(key) is None}
    both_ways = _BothWays(lab, lab.tokenizer.encode(subject.answer), settings.answer_tokens)
    for key, condition in todo.items():
        row = FidelityRow(key=key, group=condition.group, condition=condition.name, item=subject.key)
        try:
            prompt = lab.lay_out(
                condition.schema, condition.selection, condition.options, answer_tokens=settings.answer_tokens
            )
        except (ContextLengthError, PMLError) as exc:  # too long for this model's positions, or for a slot
            section.add(replace(row, skipped=exc.message.splitlines()[0]))
            continue
        section.add(
            replace(row, tokens=prompt.tokens, end=prompt.end, agreement=both_ways.compare(prompt, condition.way))
        )
    if todo:
        lab.forget()


class _BothWays:
    """Compares many ways to reuse states with full prefills, each of which is computed once."""

    def __init__(self, lab: Lab, gold: list[int], answer_tokens: int) -> None:
        self._lab = lab
        self._gold = gold[:answer_tokens]
        self._answer_tokens = answer_tokens
        self._full: dict[bytes, Observation] = {}

    def compare(self, prompt: LaidOut, way: Way) -> Agreement:
        tokens = prompt.in_position_order().tobytes()
        if tokens not in self._full:
            self._full[tokens] = observe(self._lab, self._lab.full(prompt), self._gold, self._answer_tokens)
        full, cached = self._full[tokens], ready(self._lab, prompt, way)
        return agreement(full, observe(self._lab, cached, self._gold, self._answer_tokens, follow=full))


def parameter_subjects(has_unk: bool) -> Iterator[Subject]:
    """Prompts with parameters, under each rule and with each placeholder."""
    for key, schema, selection, answer in parameter_prompts():
        conditions = [
            Condition("parameters", f"{rule}, {placeholder}", schema, selection, ComposeOptions(rule, placeholder))
            for rule in ENCODING_RULES
            for placeholder in PLACEHOLDERS
            if has_unk or placeholder != "unk"
        ]
        yield Subject(key, answer, tuple(conditions))


def item_subject(lab: Lab, key: str, item: Item, settings: Settings) -> Subject:
    """A question about documents: some of many of them, or all of few in every arrangement."""
    many = len(item.documents) >= ALL_DOCUMENTS
    question = question_of(_first_documents(item) if many else item, lab)
    if many:
        conditions = list(_subset_conditions(question, seed=key, chat=lab.chat))
    else:
        conditions = [
            *_module_conditions(question, settings, chat=lab.chat),
            *_level_conditions(question, settings, lab),
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
            options = ComposeOptions(rule, tail=tail)
            yield Condition("subset", f"{rule}, tail={tail}", schema, selection, options)


def _module_conditions(question: Question, settings: Settings, *, chat: bool) -> Iterator[Condition]:
    """The documents in one and more modules; each with its own encoding rule."""
    for count in settings.module_counts:
        for rule in ENCODING_RULES:
            yield _condition(
                "modules", f"{count} module(s), {rule}", Arrangement(count), question, ComposeOptions(rule), chat
            )
    most = max(settings.module_counts)
    if most > 1:
        arrangement = Arrangement(most, scaffold=True)
        yield _condition("modules", f"{most} modules, scaffold", arrangement, question, ComposeOptions(), chat)


def _level_conditions(question: Question, settings: Settings, lab: Lab) -> Iterator[Condition]:
    """What is computed again of many modules, and how it is chosen."""
    ways: dict[Way, ComposeOptions] = {"fast": ComposeOptions(), "balanced": ComposeOptions()}
    if lab.backend.name == "onnx":  # the others' ways need to read states
        ways |= {"EPIC": ComposeOptions("isolated"), "CacheBlend": ComposeOptions("isolated")}
    schema = Arrangement(max(settings.module_counts)).schema(question, chat=lab.chat)
    selection = ask_all(question, schema, chat=lab.chat)
    for way, options in ways.items():
        yield Condition("levels", way, schema, selection, options, way)


def _gap_conditions(question: Question, settings: Settings, *, chat: bool) -> Iterator[Condition]:
    """Gaps between documents that see each other (what gaps alone do), and between modules."""
    size, kept = settings.spread_gap, ComposeOptions(tail="imported")
    for name, count in (("one text", 0), (f"{max(settings.module_counts)} modules", max(settings.module_counts))):
        pieces = Arrangement(count).pieces(len(question.parts))
        for gap in settings.gaps:
            arrangement = Arrangement(count, gap, (pieces // 2,))
            yield _condition("gaps", f"{name}, {gap} in the middle", arrangement, question, kept, chat)
        for number in settings.spread:
            places = tuple(dict.fromkeys(pieces * (index + 1) // (number + 1) for index in range(number)))
            arrangement = Arrangement(count, size, places)
            yield _condition("gaps", f"{name}, {size} in {number} gaps", arrangement, question, kept, chat)
        front, end = Arrangement(count, size, (0,)), Arrangement(count, size, (pieces,))
        yield _condition("gaps", f"{name}, {size} before the documents", front, question, kept, chat)
        whole = ComposeOptions(tail="schema")
        yield _condition("gaps", f"{name}, {size} before the question", end, question, whole, chat)


def _condition(
    group: str, name: str, arrangement: Arrangement, question: Question, options: ComposeOptions, chat: bool
) -> Condition:
    schema = arrangement.schema(question, chat=chat)
    return Condition(group, name, schema, ask_all(question, schema, chat=chat), options)


BENCH = Bench(
    title="Fidelity",
    row=FidelityRow,
    settings=Settings,
    measure=measure,
    tables=fidelity_tables.tables,
    one_backend=True,
)
