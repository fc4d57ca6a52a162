"""Conditions of the fidelity bench on the tiny model: same tokens, positions as meant, and what must come out exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from roomy import export_roomy

from edge_pc.bench import fidelity
from edge_pc.bench.arrange import Arrangement, ask_all, subset
from edge_pc.bench.datasets import Document, Item
from edge_pc.bench.fidelity import FidelitySettings, item_subject, parameter_subjects, run_fidelity
from edge_pc.bench.fidelity_summary import CLOSE_KL, findings, summarize
from edge_pc.bench.lab import Lab, LaidOut, Variant
from edge_pc.bench.questions import Question, question_of
from edge_pc.bench.report import Report, Section
from edge_pc.bench.setup import BenchOptions
from edge_pc.bench.templates import TEMPLATES, parameter_prompts
from edge_pc.compose.choices import Tail
from edge_pc.errors import OptionError

DOCUMENTS = tuple(Document(f"T{number}", f"Text number {number}, of some length.") for number in range(6))
ITEM = Item("x", "musique", "Which?", DOCUMENTS, ("number 3",), gold=3)
SETTINGS = FidelitySettings(items=1, module_counts=(1, 3), gaps=(0, 100), spread=(2,), spread_gap=100, answer_tokens=4)


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
    return lab.lay_out(schema, ask_all(question, schema, chat=lab.chat), Variant(tail=tail))


def positions(found: LaidOut) -> list[int]:
    parts = [encoding.kept_position_ids for encoding in found.prompt.encodings]
    return sorted(np.concatenate([*parts, found.prompt.position_ids]).tolist())


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
    expected = laid_out(lab, question, Arrangement(6)).prompt.in_position_order()
    found = laid_out(lab, question, arrangement)
    np.testing.assert_array_equal(found.prompt.in_position_order(), expected)
    assert holes(found) == [arrangement.gap // len(arrangement.places) for _ in arrangement.places]


@pytest.mark.parametrize(("modules", "encodings"), [(0, 1), (1, 1), (2, 3), (6, 7)])
def test_documents_are_put_into_as_many_modules(lab: Lab, question: Question, modules: int, encodings: int) -> None:
    # One for the anonymous text; a single module is encoded together with it.
    assert len(laid_out(lab, question, Arrangement(modules)).prompt.encodings) == encodings


def test_a_gap_before_the_question_is_seen_by_the_schema_tail_alone(lab: Lab, question: Question) -> None:
    arrangement = Arrangement(6, 90, (6,))
    assert holes(laid_out(lab, question, arrangement)) == []
    assert holes(laid_out(lab, question, arrangement, tail="schema")) == [90]


@pytest.mark.parametrize("arrangement", [Arrangement(0), Arrangement(1), Arrangement(3, scaffold=True)], ids=str)
def test_documents_that_see_each_other_are_full_prefill(lab: Lab, question: Question, arrangement: Arrangement) -> None:
    found = laid_out(lab, question, arrangement)
    full = lab.greedy(lab.full(found.prompt), 1).logits[0]
    np.testing.assert_allclose(lab.greedy(lab.cached(found), 1).logits[0], full, rtol=0, atol=1e-4)


def test_gaps_and_modules_each_change_the_logits(lab: Lab, question: Question) -> None:
    found = laid_out(lab, question, Arrangement(0))
    full = lab.greedy(lab.full(found.prompt), 1).logits[0]
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
    assert [condition.group for condition in subject.conditions] == ["subset"] * 4
    found = lab.lay_out(subject.conditions[0].schema, subject.conditions[0].selection)
    assert len(found.prompt.schema.modules) == 1 + fidelity.ALL_DOCUMENTS
    assert len(found.prompt.modules) == 1 + fidelity.SUBSET
    assert "text 17" in lab.tokenizer.decode(found.prompt.in_position_order())


def test_every_prompt_with_parameters_is_one(smollm2: Path) -> None:
    with Lab(smollm2) as lab:
        prompts = list(parameter_prompts())
        assert len({key for key, _, _, _ in prompts}) == len(prompts) == 6 * len(TEMPLATES) + 3
        for key, schema, selection, answer in prompts:
            found = lab.lay_out(schema, selection)
            text = lab.tokenizer.decode(found.prompt.in_position_order())
            assert answer.lower() in text.lower(), key
            assert all(f" {value}" in text for value in selection.arguments.values() if value), key
            assert holes(found), key  # slots are longer than most arguments
        assert lab.has_unk


def new_report(tmp_path: Path) -> Report:
    return Report.create(tmp_path / "report.json", command=["edge-pc"], machine={}, settings={})


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


def run(report: Report, model: Path, *datasets: Path) -> Section:
    options = BenchOptions(model=str(model), backends=("onnx",))
    return run_fidelity(report, options, SETTINGS, datasets=datasets)


def test_a_run_fills_every_condition_and_resumes(
    tmp_path: Path, roomy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "parameter_subjects", lambda has_unk: iter(()))
    path = write(tmp_path / "six.jsonl", ITEM)
    section = run(new_report(tmp_path), roomy_model, path)
    rows = {row["condition"]: row for row in section.rows}
    assert set(rows) == {
        *(f"{count} module(s), {rule}" for count in (1, 3) for rule in ("guaranteed", "isolated")),
        "3 modules, scaffold",
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
    for exact in ("1 module(s), guaranteed", "3 modules, scaffold", "one text, 0 in the middle"):
        assert rows[exact]["kl"] == pytest.approx(0, abs=1e-6)
        assert rows[exact]["edit_similarity"] == 1
        assert rows[exact]["gold_full"] == pytest.approx(rows[exact]["gold_cached"], abs=1e-4)
    assert rows["3 module(s), guaranteed"]["kl"] > 1e-4
    assert rows["3 modules, 100 in the middle"]["end"] == rows["3 modules, 0 in the middle"]["end"] + 100

    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    gone = data["sections"]["fidelity"]["rows"].pop()
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    saved = Report.load(tmp_path / "report.json")
    measured: list[str] = []
    add = Section.add
    monkeypatch.setattr(Section, "add", lambda self, key, row: (measured.append(key), add(self, key, row))[0])
    resumed = run(saved, roomy_model, path)
    assert measured == [gone["key"]]
    assert {row["key"]: row for row in resumed.rows} == {row["key"]: row for row in section.rows}


def test_items_can_be_added_later(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "parameter_subjects", lambda has_unk: iter(()))
    options = BenchOptions(model=str(tiny_model), backends=("onnx",))
    path = write(tmp_path / "six.jsonl", ITEM, replace(ITEM, key="another"))
    for items in (1, 2):
        settings = replace(SETTINGS, items=items, module_counts=(2,), gaps=(0,), spread=())
        report = Report.load(tmp_path / "report.json") if items > 1 else new_report(tmp_path)
        section = run_fidelity(report, options, settings, datasets=[path])
        assert {row["item"] for row in section.rows} == {"six/x", "six/another"} if items > 1 else {"six/x"}
    with pytest.raises(OptionError, match="answer_tokens was 4, now 5"):
        run_fidelity(report, options, replace(settings, answer_tokens=5), datasets=[path])


def test_what_is_too_long_for_the_model_is_skipped(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "SECTION", "fidelity")
    settings = FidelitySettings(items=1, module_counts=(2,), gaps=(0, 3000), spread=(), spread_gap=16, answer_tokens=2)
    options = BenchOptions(model=str(tiny_model), backends=("onnx",))
    path = write(tmp_path / "six.jsonl", ITEM)
    monkeypatch.setattr(fidelity, "parameter_subjects", lambda has_unk: iter(()))
    section = run_fidelity(new_report(tmp_path), options, settings, datasets=[path])
    skipped = [row["condition"] for row in section.rows if "skipped" in row]
    assert skipped == ["one text, 3000 in the middle", "2 modules, 3000 in the middle"]
    assert "3000" not in " ".join(found["condition"] for found in section.summary["conditions"])


def test_parameter_prompts_come_with_each_rule_and_placeholder() -> None:
    with_unk, without = next(parameter_subjects(True)), next(parameter_subjects(False))
    assert len(with_unk.conditions) == 6
    assert [condition.name for condition in without.conditions] == [
        "guaranteed, nothing",
        "guaranteed, default",
        "isolated, nothing",
        "isolated, default",
    ]


def made_row(group: str, condition: str, item: str, kl: float, loss: float | None) -> dict[str, Any]:
    gold = {"gold_full": None, "gold_cached": None} if loss is None else {"gold_full": -1.0, "gold_cached": -1.0 - loss}
    name = {"group": group, "condition": condition, "item": item}
    return name | {"kl": kl, "same_first_token": kl < 0.2, "edit_similarity": 1.0 if kl < 0.2 else 0.5} | gold


def test_the_summary_has_the_envelope_and_paired_choices() -> None:
    rows = [made_row("parameters", "guaranteed, nothing", f"i{n}", 0.01, None if n else 0.01) for n in range(8)]
    rows += [made_row("parameters", "guaranteed, unk", f"i{n}", 0.5, None if n else 0.3) for n in range(1, 8)]
    rows += [{"group": "gaps", "condition": "one text, 6000", "item": "i1", "skipped": "too long"}]
    summary = summarize(rows)
    nothing, unk = summary["conditions"]
    assert (nothing["items"], nothing["close"], nothing["same_first_token"]) == (8, True, 1)
    assert nothing["kl"]["mean"] == pytest.approx(0.01)
    assert nothing["kl"]["mean"] < CLOSE_KL < unk["kl"]["mean"]
    assert nothing["loss_nats_per_token"]["mean"] == pytest.approx(0.01)
    assert (unk["items"], unk["close"], unk["same_answer"]) == (7, False, 0)
    assert unk["loss_nats_per_token"] is None
    (choice,) = summary["choices"]
    assert (choice["default"], choice["other"], choice["items"]) == ("guaranteed, nothing", "guaranteed, unk", 7)
    assert choice["kl"]["difference"]["mean"] == pytest.approx(0.49)
    assert choice["kl"]["p_value"] == pytest.approx(2 / 2**7)
    lines = findings(summary)
    assert len(lines) == 1 + 2 + 1 + 1
    assert all(len(line) < 150 for line in lines)


def test_modules_are_compared_with_isolated_ones_and_a_scaffold() -> None:
    names = ("10 module(s), guaranteed", "10 module(s), isolated", "10 modules, scaffold")
    rows = [made_row("modules", name, "i", 0.1, 0.0) for name in names]
    assert [choice["other"] for choice in summarize(rows)["choices"]] == [names[1], names[2]]
