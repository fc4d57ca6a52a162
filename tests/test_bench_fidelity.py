"""Conditions of the fidelity bench on the tiny model: same tokens, positions as meant, and what must come out exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import bench_tools
import numpy as np
import pytest
from roomy import export_roomy

from benchmarks import fidelity
from benchmarks.arrange import Arrangement, ask_all, subset
from benchmarks.benches import EXPERIMENTS
from benchmarks.datasets import Document, Item
from benchmarks.fidelity import Settings, item_subject, parameter_subjects
from benchmarks.fidelity_tables import CLOSE_KL, choices, conditions, tables
from benchmarks.lab import Lab
from benchmarks.questions import Question, question_of
from benchmarks.rows import Agreement, FidelityRow
from benchmarks.templates import TEMPLATES, parameter_prompts
from edge_pc.bench.report import Report, Section
from edge_pc.bench.work import BenchOptions
from edge_pc.compose.choices import ENCODING_RULES
from edge_pc.compose.composer import ComposeOptions
from edge_pc.compose.laid_out import LaidOut, Tail
from edge_pc.errors import OptionError

DOCUMENTS = tuple(Document(f"T{number}", f"Text number {number}, of some length.") for number in range(6))
ITEM = Item("x", "musique", "Which?", DOCUMENTS, ("number 3",), gold=3)
SETTINGS = Settings(items=1, module_counts=(1, 3), gaps=(0, 100), spread=(2,), spread_gap=100, answer_tokens=4)


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_roomy(tmp_path_factory.mktemp("roomy"))


@pytest.fixture(scope="module")
def lab(roomy_model: Path) -> Iterator[Lab]:
    with Lab(roomy_model) as lab:
        yield lab


@pytest.fixture(scope="module")
def question(lab: Lab) -> Question:
    return question_of(ITEM, lab)


def laid_out(lab: Lab, question: Question, arrangement: Arrangement, *, tail: Tail = "imported") -> LaidOut:
    schema = arrangement.schema(question, chat=lab.chat)
    return lab.lay_out(schema, ask_all(question, schema, chat=lab.chat), ComposeOptions(tail=tail))


def positions(found: LaidOut) -> list[int]:
    parts = [encoding.kept_position_ids for encoding in found.encodings]
    return sorted(np.concatenate([*parts, found.position_ids]).tolist())


def holes(found: LaidOut) -> list[int]:
    """The sizes of the gaps in a prompt's positions."""
    steps = np.diff(positions(found)) - 1
    return [int(step) for step in steps if step]


ARRANGEMENTS = (
    Arrangement(0),
    Arrangement(1),
    Arrangement(2),
    Arrangement(6),
    Arrangement(3, scaffold=True),
    Arrangement(0, 90, (3,)),
    Arrangement(6, 90, (1, 2, 5)),
    Arrangement(4, 90, (0, 2)),
)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_whatever_the_arrangement_the_tokens_are_the_same(
    lab: Lab, question: Question, arrangement: Arrangement
) -> None:
    expected = laid_out(lab, question, Arrangement(6)).in_position_order()
    found = laid_out(lab, question, arrangement)
    np.testing.assert_array_equal(found.in_position_order(), expected)
    assert holes(found) == [arrangement.gap // len(arrangement.places) for _ in arrangement.places]


@pytest.mark.parametrize(("modules", "encodings"), [(0, 1), (1, 2), (2, 3), (6, 7)])
def test_documents_are_put_into_as_many_modules(lab: Lab, question: Question, modules: int, encodings: int) -> None:
    # One for the anonymous text.
    assert len(laid_out(lab, question, Arrangement(modules)).encodings) == encodings


def test_a_gap_before_the_question_is_seen_by_the_schema_tail_alone(lab: Lab, question: Question) -> None:
    arrangement = Arrangement(6, 90, (6,))
    assert holes(laid_out(lab, question, arrangement)) == []
    assert holes(laid_out(lab, question, arrangement, tail="schema")) == [90]


@pytest.mark.parametrize("arrangement", [Arrangement(0), Arrangement(1), Arrangement(3, scaffold=True)], ids=str)
def test_documents_that_see_each_other_are_full_prefill(lab: Lab, question: Question, arrangement: Arrangement) -> None:
    found = laid_out(lab, question, arrangement)
    full = lab.greedy(lab.full(found), 1).logits[0]
    np.testing.assert_allclose(lab.greedy(lab.cached(found), 1).logits[0], full, rtol=0, atol=1e-4)


def test_gaps_and_modules_each_change_the_logits(lab: Lab, question: Question) -> None:
    found = laid_out(lab, question, Arrangement(0))
    full = lab.greedy(lab.full(found), 1).logits[0]
    for arrangement in (Arrangement(0, 3000, (3,)), Arrangement(6)):
        changed = lab.greedy(lab.cached(laid_out(lab, question, arrangement)), 1).logits[0]
        assert np.abs(changed - full).max() > 0.01, arrangement


def test_a_subset_has_the_right_document_and_the_same_one_each_time(lab: Lab) -> None:
    question = question_of(ITEM, lab)
    for seed in "abcdefgh":
        shuffled, places = subset(question, 3, 2, seed)
        assert (shuffled, places) == subset(question, 3, 2, seed)
        assert sorted(shuffled.parts) == sorted(question.parts)
        assert len(set(places)) == 2
        assert question.parts[3] in [shuffled.parts[place] for place in places]
    assert len({subset(question, 3, 2, seed)[1] for seed in "abcdefgh"}) > 2


def test_an_item_with_many_documents_gives_some_of_them(lab: Lab) -> None:
    documents = tuple(Document("", f"text {number}") for number in range(20))
    item = Item("many", "nq_multidoc", "Which?", documents, ("text 17",), gold=17)
    subject = item_subject(lab, "many", item, SETTINGS)
    assert [condition.group for condition in subject.conditions] == ["subset"] * 9
    found = lab.lay_out(subject.conditions[0].schema, subject.conditions[0].selection)
    assert len(found.schema.modules) == 1 + fidelity.ALL_DOCUMENTS
    assert len(found.modules) == 1 + fidelity.SUBSET
    assert "text 17" in lab.tokenizer.decode(found.in_position_order())


def test_every_prompt_with_parameters_is_one(smollm2: Path) -> None:
    with Lab(smollm2) as lab:
        prompts = list(parameter_prompts())
        assert len({key for key, _, _, _ in prompts}) == len(prompts) == 6 * len(TEMPLATES) + 3
        for key, schema, selection, answer in prompts:
            found = lab.lay_out(schema, selection)
            text = lab.tokenizer.decode(found.in_position_order())
            assert answer.lower() in text.lower(), key
            assert all(f" {value}" in text for value in selection.arguments.values() if value), key
            assert holes(found), key  # slots are longer than most arguments
        assert lab.has_unk


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return bench_tools.new_report(tmp_path / "report.json")


def write(path: Path, *items: Item) -> Path:
    rows = [
        {
            "id": item.key,
            "dataset": item.dataset,
            "input": item.question,
            "docs": [{"title": document.title, "text": document.text} for document in item.documents],
            "answers": list(item.answers),
            "gold_doc": item.gold,
        }
        for item in items
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(report: Report, model: Path, *datasets: Path, settings: Settings = SETTINGS) -> list[FidelityRow]:
    options = BenchOptions(model=str(model), backends=("onnx",))
    settings = replace(settings, datasets=datasets)
    return bench_tools.measured(EXPERIMENTS["fidelity"], report, options, settings, name="fidelity")


@pytest.fixture
def no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "parameter_subjects", lambda has_unk: iter(()))


@pytest.mark.usefixtures("no_parameters")
def test_a_run_fills_every_condition_and_resumes(
    tmp_path: Path, roomy_model: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "six.jsonl", ITEM)
    measured = run(report, roomy_model, path)
    rows = {row.condition: row for row in measured}
    assert set(rows) == {
        *(f"{count} module(s), {rule}" for count in (1, 3) for rule in ENCODING_RULES),
        "3 modules, scaffold",
        *("fast", "balanced", "EPIC", "CacheBlend"),
        *(
            f"{how}, {what}"
            for how in ("one text", "3 modules")
            for what in (
                "0 in the middle",
                "100 in the middle",
                "100 in 2 gaps",
                "100 before the documents",
                "100 before the question",
            )
        ),
    }
    agreed = {name: row.agreement for name, row in rows.items() if row.agreement is not None}
    assert agreed.keys() == rows.keys()
    for exact in (
        "1 module(s), neutral",
        "1 module(s), guaranteed",
        "3 modules, scaffold",
        "one text, 0 in the middle",
    ):
        assert agreed[exact].kl == pytest.approx(0, abs=1e-6)
        assert agreed[exact].edit_similarity == 1
        assert agreed[exact].loss == pytest.approx(0, abs=1e-4)
    assert agreed["3 module(s), guaranteed"].kl > 1e-4
    assert agreed["3 module(s), neutral"].kl > 1e-4
    assert rows["3 modules, 100 in the middle"].end == rows["3 modules, 0 in the middle"].end + 100

    gone = report.data["sections"]["fidelity"]["rows"].pop()
    keys: list[str] = []
    add = Section.add
    monkeypatch.setattr(Section, "add", lambda self, row: (keys.append(row.key), add(self, row))[0])
    assert {row.key: row for row in run(report, roomy_model, path)} == {row.key: row for row in measured}
    assert keys == [gone["key"]]


@pytest.mark.usefixtures("no_parameters")
def test_items_can_be_added_later(tmp_path: Path, tiny_model: Path, report: Report) -> None:
    path = write(tmp_path / "six.jsonl", ITEM, replace(ITEM, key="another"))
    few = replace(SETTINGS, module_counts=(2,), gaps=(0,), spread=())
    assert {row.item for row in run(report, tiny_model, path, settings=few)} == {"six/x"}
    rows = run(report, tiny_model, path, settings=replace(few, items=2))
    assert {row.item for row in rows} == {"six/x", "six/another"}
    with pytest.raises(OptionError, match="answer_tokens was 4, now 5"):
        run(report, tiny_model, path, settings=replace(few, answer_tokens=5))


@pytest.mark.usefixtures("no_parameters")
def test_what_is_too_long_for_the_model_is_skipped(tmp_path: Path, tiny_model: Path, report: Report) -> None:
    settings = Settings(items=1, module_counts=(2,), gaps=(0, 3000), spread=(), spread_gap=16, answer_tokens=2)
    rows = run(report, tiny_model, write(tmp_path / "six.jsonl", ITEM), settings=settings)
    skipped = [row.condition for row in rows if row.skipped]
    assert skipped == ["one text, 3000 in the middle", "2 modules, 3000 in the middle"]
    assert "3000" not in " ".join(row[1] for row in report.tables("fidelity")[0].rows)


def test_parameter_prompts_come_with_each_rule_and_placeholder() -> None:
    with_unk, without = next(parameter_subjects(True)), next(parameter_subjects(False))
    assert len(with_unk.conditions) == 9
    assert [condition.name for condition in without.conditions] == [
        "neutral, nothing",
        "neutral, default",
        "guaranteed, nothing",
        "guaranteed, default",
        "isolated, nothing",
        "isolated, default",
    ]


def made_row(group: str, condition: str, item: str, kl: float, loss: float | None) -> FidelityRow:
    gold = (None, None) if loss is None else (-1.0, -1.0 - loss)
    agreement = Agreement(kl, kl < 0.2, 4, 4, 1.0 if kl < 0.2 else 0.5, *gold)
    key = f"{group}/{condition}/{item}"
    return FidelityRow(key=key, group=group, condition=condition, item=item, agreement=agreement)


def test_the_tables_have_the_envelope_paired_choices_and_what_is_not_close() -> None:
    rows = [made_row("parameters", "guaranteed, nothing", f"i{n}", 0.01, None if n else 0.01) for n in range(8)]
    rows += [made_row("parameters", "guaranteed, unk", f"i{n}", 0.5, None if n else 0.3) for n in range(1, 8)]
    rows += [FidelityRow(key="x", group="gaps", condition="one text, 6000", item="i1", skipped="too long")]
    nothing, unk = found = conditions(rows)
    assert (len(nothing.items), nothing.close) == (8, True)
    assert nothing.kl.mean == pytest.approx(0.01)
    assert nothing.kl.mean < CLOSE_KL < unk.kl.mean
    assert nothing.loss is not None
    assert nothing.loss.mean == pytest.approx(0.01)
    assert (len(unk.items), unk.close, unk.loss) == (7, False, None)
    ((default, other, test),) = choices(found)
    assert (default.name, other.name) == ("guaranteed, nothing", "guaranteed, unk")
    assert test.difference.mean == pytest.approx(0.49)
    assert test.p_value == pytest.approx(2 / 2**7)
    envelope, against, worse = tables(rows)
    assert [row[-3:] for row in envelope.rows] == [("100%", "100%", "yes"), ("0%", "0%", "no")]
    assert against.rows[0][-1] == "7"
    assert [row[1] for row in worse.rows] == ["guaranteed, unk"]
    assert worse.worse


def test_modules_are_compared_with_looser_rules_and_a_scaffold() -> None:
    neutral, guaranteed, isolated = (f"10 module(s), {rule}" for rule in ENCODING_RULES)
    scaffold = "10 modules, scaffold"
    found = conditions([made_row("modules", name, "i", 0.1, 0.0) for name in (neutral, guaranteed, isolated, scaffold)])
    assert [(one.name, other.name) for one, other, _ in choices(found)] == [
        (neutral, guaranteed),
        (neutral, isolated),
        (neutral, scaffold),
        (guaranteed, isolated),
        (guaranteed, scaffold),
    ]
