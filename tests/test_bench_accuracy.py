"""Answers both ways, scored and resumed, on the tiny model; and that the lab answers as the engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_tools
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import accuracy
from benchmarks.accuracy import Settings
from benchmarks.accuracy_tables import tables
from benchmarks.benches import EXPERIMENTS
from benchmarks.datasets import Document, Item
from benchmarks.lab import Continuation, Lab, log_probability
from benchmarks.observe import Observation, agreement, observe, parting
from benchmarks.questions import lay_out, question_of
from benchmarks.rows import AccuracyRow, Agreement, Compared, Parting, ScoredAnswer
from edge_pc.bench.report import Report
from edge_pc.bench.work import BenchOptions
from edge_pc.engine import Engine
from edge_pc.errors import OptionError
from edge_pc.pml import build_prompt
from edge_pc.progress import Progress
from edge_pc.runtime.sampling import Sampling
from edge_pc.runtime.serving import Fidelity, Serving

ITEM = Item("x", "musique", "Who of them?", (Document("A", "Ann and Bob."), Document("", "Cy is in town.")), ("Ann",))


@pytest.fixture(scope="module")
def lab(tiny_model: Path) -> Iterator[Lab]:
    with Lab(tiny_model) as lab:
        yield lab


def write(path: Path, count: int = 3, **changes: Any) -> Path:
    row = {"dataset": "musique", "input": "who?", "answers": ["Ann"]}
    docs = [{"title": "", "text": "Ann is here."}, {"title": "B", "text": "Bob is there."}]
    rows = [row | {"id": f"i{number}", "docs": docs, "input": f"who is {number}?"} | changes for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(report: Report, model: Path, *datasets: Path, **more: Any) -> list[AccuracyRow]:
    options = BenchOptions(model=str(model), backends=("onnx",))
    settings = Settings(datasets=datasets, items=more.pop("items", 100))
    return bench_tools.measured(EXPERIMENTS["accuracy"], report, options, settings, name="accuracy", **more)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return bench_tools.new_report(tmp_path / "report.json")


@pytest.mark.parametrize("backend", ["onnx", "llamacpp"])
def test_full_prefill_in_two_steps_gives_the_logits_of_one(backend: str, tiny_model: Path, tiny_gguf: Path) -> None:
    if backend == "llamacpp":
        pytest.importorskip("llama_cpp")
    with Lab(tiny_model if backend == "onnx" else tiny_gguf, backend=backend) as lab:
        # Two prompts of one length: what a backend remembers of the first must not serve the second.
        for question in ("Who of them?", "Why of them?"):
            prompt = lay_out(question_of(replace(ITEM, question=question, answers=(question,)), lab), lab)
            ready = lab.full(prompt)
            assert ready.plan.spans  # the case at hand is the one with states in memory
            assert ready.end == prompt.tokens
            context = lab.backend.new_context(prompt.tokens)
            once = context.prefill(prompt.full_plan()).logits
            context.close()
            np.testing.assert_allclose(lab.greedy(ready, 1).logits[0], once, rtol=0, atol=1e-4)


def test_the_lab_answers_as_the_engine_does(lab: Lab, tiny_model: Path) -> None:
    question = question_of(ITEM, lab)
    schema, selection = question.schema(chat=True)
    laid_out = lay_out(question, lab)
    ways = {True: lab.cached(laid_out), False: lab.full(laid_out)}
    prompt = build_prompt(schema, selection.modules, {}, selection.free_text[0].text)
    with Engine(tiny_model) as engine:
        engine.load_schema(schema)
        for use_cache, ready in ways.items():
            result = engine.generate(prompt, Sampling(max_tokens=12), Serving(use_cache, fidelity="fast"))
            answer = lab.greedy(ready, 12)
            assert answer.token_ids == result.token_ids
            assert len(answer.logits) == len(answer.token_ids) + (result.stop == "eos")
    # Both ways are at work: modules do not see each other, and that shows.
    assert np.abs(lab.greedy(ways[True], 1).logits[0] - lab.greedy(ways[False], 1).logits[0]).max() > 0.01


def test_a_continuation_can_be_repeated_in_any_order(lab: Lab) -> None:
    laid_out = lay_out(question_of(ITEM, lab), lab)
    full, cached = lab.full(laid_out), lab.cached(laid_out)
    first = lab.greedy(full, 6)
    likelihoods = lab.log_likelihoods(cached, first.token_ids)
    again = lab.greedy(full, 6)
    assert again.token_ids == first.token_ids
    np.testing.assert_array_equal(again.logits, first.logits)
    assert lab.log_likelihoods(cached, first.token_ids) == likelihoods


def test_likelihoods_are_those_of_each_token_after_the_ones_before(lab: Lab) -> None:
    ready = lab.full(lay_out(question_of(ITEM, lab), lab))
    answer = lab.greedy(ready, 5)
    expected = [log_probability(logits, token) for logits, token in zip(answer.logits, answer.token_ids, strict=False)]
    assert lab.log_likelihoods(ready, answer.token_ids) == pytest.approx(expected, abs=1e-6)
    assert np.exp(log_probability(np.float32([0, 0, 0, 0]), 2)) == pytest.approx(0.25)
    assert log_probability(np.float32([1000, 0]), 0) == pytest.approx(0)


def test_agreement_of_a_prompt_with_itself_is_complete(lab: Lab) -> None:
    ready = lab.full(lay_out(question_of(ITEM, lab), lab))
    one, other = observe(lab, ready, [5, 6], 6), observe(lab, ready, [5, 6], 6)
    same = agreement(one, other)
    assert same.kl == 0
    assert same.same_first_token
    assert same.gold_full == same.gold_cached
    assert same.same_tokens == same.answer_tokens == len(one.answer.token_ids)
    assert same.edit_similarity == 1
    assert parting(one.answer, other.answer, lab.tokenizer) is None
    assert observe(lab, ready, [], 2).gold_nats is None


def test_parting_tells_how_sure_each_way_was(lab: Lab) -> None:
    def logits(*probabilities: float) -> NDArray[np.float32]:
        return np.log(np.array(probabilities, dtype=np.float32))

    full = Continuation((1, 2), (logits(0.1, 0.8, 0.1), logits(0.1, 0.3, 0.6)))
    cached = Continuation((1, 1), (logits(0.2, 0.7, 0.1), logits(0.05, 0.75, 0.2)))
    expected = Parting(1, lab.tokenizer.decode([2]), lab.tokenizer.decode([1]), (0.6, 0.3), (0.2, 0.75))
    assert parting(full, cached, lab.tokenizer) == expected
    # One ends where the other goes on: the token that ends it is one that was chosen.
    ended = Continuation((1,), (logits(0.1, 0.8, 0.1), logits(0.9, 0.05, 0.05)))
    part = parting(full, ended, lab.tokenizer)
    assert part is not None
    assert part.cached_probabilities == (0.05, 0.9)


def test_every_item_is_measured_once_and_data_sets_can_be_added(
    tmp_path: Path, tiny_model: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    original = accuracy.measure_item

    def counting(lab: Lab, item: Item, key: str, levels: Sequence[Fidelity]) -> list[AccuracyRow]:
        if len(measured) == 2:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(key)
        return original(lab, item, key, levels)

    monkeypatch.setattr(accuracy, "measure_item", counting)
    first = write(tmp_path / "first.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(report, tiny_model, first)
    saved = Report.load(tmp_path / "report.json")
    assert [row.key for row in saved.rows("accuracy", AccuracyRow)] == [
        f"first/{item}/{level}" for item in ("i0", "i1") for level in ("fast", "balanced")
    ]
    assert saved.tables("accuracy")[0].rows[0][:2] == ("first, fast", "2"), "an interrupted bench shows what it has"

    second = write(tmp_path / "second.jsonl", dataset="qmsum")
    shown: list[Progress] = []
    run(saved, tiny_model, first, second, items=3, on_progress=shown.append)
    assert measured == ["first/i0", "first/i1", "interrupted", "first/i2", "second/i0", "second/i1", "second/i2"]
    assert shown[0] == Progress(2, 6, "first/i2")
    assert shown[-1] == Progress(6, 6, "done")
    right = {(row[0], row[1], row[2]) for row in saved.tables("accuracy")[0].rows}
    assert ("first, balanced", "3", "f1 (its own, %)") in right
    assert ("second, balanced", "3", "rouge_l (its own, %)") in right
    assert ("second, balanced", "3", "substring (%)") in right

    # Nothing is left to do: the model is not even opened.
    monkeypatch.setattr(accuracy, "open_lab", None)
    again = Report.load(tmp_path / "report.json")
    assert len(run(again, tiny_model, first)) == 12
    assert not list(Path(tmp_path).glob("**/edge-pc-bench-*"))


def test_rows_say_what_was_measured(tmp_path: Path, tiny_model: Path, report: Report) -> None:
    path = write(tmp_path / "long.jsonl", 1, docs=[{"title": "", "text": "Ann is here. " * 200}])
    fast, row = run(report, tiny_model, path)
    assert (fast.fidelity, row.fidelity) == ("fast", "balanced")
    assert row.right == ("Ann",)
    assert row.compared is not None
    assert row.compared.cut_tokens > 0
    assert row.compared.prompt_tokens <= 1024 - 32
    assert row.compared.computed_tokens < 100
    # One document sees everything before it: reuse is full prefill.
    assert row.compared.agreement.kl == pytest.approx(0, abs=1e-6)
    assert row.compared.agreement.answer_kl == pytest.approx(0, abs=1e-6)
    assert row.compared.agreement.same_tops == 1
    assert row.compared.full == row.compared.cached
    assert row.compared.parting is None
    assert report.tables("accuracy")[1].rows[0][:4] == ("long, fast", "1", "0", "1"), "one item, none skipped, one cut"


def test_an_item_that_cannot_fit_is_counted_and_the_bench_goes_on(
    tmp_path: Path, tiny_model: Path, report: Report
) -> None:
    row, _ = run(report, tiny_model, write(tmp_path / "a.jsonl", 1, input="why " * 500))
    assert "the model has room for 1024" in row.skipped
    assert row.compared is None
    assert all(not table.rows for table in report.tables("accuracy"))


def test_faults_are_found_before_anything_is_measured(tmp_path: Path, tiny_model: Path, report: Report) -> None:
    good, bad = write(tmp_path / "good.jsonl"), tmp_path / "bad.jsonl"
    bad.write_text("{}\n", encoding="utf-8")
    with pytest.raises(OptionError, match=r"bad\.jsonl:1"):
        run(report, tiny_model, good, bad)
    (tmp_path / "other").mkdir()
    with pytest.raises(OptionError, match="two data sets are called 'good'"):
        run(report, tiny_model, good, write(tmp_path / "other" / "good.jsonl"))
    with pytest.raises(OptionError, match="cannot be scored"):
        run(report, tiny_model, write(tmp_path / "t.jsonl", dataset="trec"))
    assert report.rows("accuracy", AccuracyRow) == []


def made_row(key: str, full: float, cached: float, parting: Parting | None = None) -> AccuracyRow:
    answers = (ScoredAnswer(way, {"f1": score}) for way, score in (("full", full), ("cached", cached)))
    same = Agreement(0.1, True, 3, 3, 1.0, gold_full=-1.0, gold_cached=-1.5)
    compared = Compared("f1", 2, 10, 5, 0, *answers, same, parting)
    return AccuracyRow(key=key, dataset="d", question="q?", right=("r",), compared=compared)


def test_the_tables_compare_pairs_and_list_what_lost_most_first() -> None:
    part = Parting(3, " Ann", " Bob", (0.4, 0.3), (0.2, 0.5))
    rows = [made_row("same", 1, 1), made_row("worse", 1, 0.5), made_row("better", 0, 1), made_row("worst", 1, 0, part)]
    right, agreed, losses, lost = tables(rows)
    score, likelihood = right.rows
    assert score[:3] == ("d", "4", "f1 (its own, %)")
    assert [cell.split()[0] for cell in score[3:6]] == ["75.0", "62.5", "-12.5"]
    assert likelihood[5] == "-0.50 [-0.50, -0.50]"
    assert agreed.rows[0][-1] == "100%"
    assert losses.rows[0][2].startswith("-12.5 [")
    assert losses.rows[0][-2:] == ("2", "1")
    assert [row[0] for row in lost.rows] == ["worst", "worse"]
    assert lost.rows[0][-1] == "token 4: full ' Ann' (40%) before ' Bob' (30%); cached 50% against 20%"
    assert [table.worse for table in (right, agreed, losses, lost)] == [False, False, True, True]


def test_skipped_items_are_counted() -> None:
    skipped = AccuracyRow(key="x", dataset="d", question="q?", right=("r",), skipped="too long")
    assert tables([made_row("same", 1, 1), skipped])[1].rows[0][:3] == ("d", "1", "1")


def test_observations_keep_what_they_were_made_of(lab: Lab) -> None:
    ready = lab.full(lay_out(question_of(ITEM, lab), lab))
    seen = observe(lab, ready, [7], 1)
    assert isinstance(seen, Observation)
    assert seen.gold_nats == pytest.approx(log_probability(seen.answer.logits[0], 7))
