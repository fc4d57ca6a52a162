"""Data sets as they come, faults with their line, and how an item becomes a prompt that fits the model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from roomy import export_roomy

from benchmarks.datasets import Document, Item, dataset_name, read_items, split_context
from benchmarks.lab import Lab
from benchmarks.questions import lay_out, question_of, task_of
from edge_pc.compose.documents import PART_CHARACTERS
from edge_pc.errors import ContextLengthError, OptionError

LONGBENCH = {
    "input": "Who wrote it?",
    "context": "Passage 1:\nA title\nSome text.\n\nPassage 2:\nText about Passage 9: not a mark.\n",
    "answers": ["Ann", "Ann Lee"],
    "length": 12,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "abc",
}
OURS = {
    "id": "nq-1",
    "dataset": "nq_multidoc",
    "input": "who?",
    "docs": [{"title": "T", "text": " one "}, {"title": "", "text": "two"}],
    "gold_doc": 1,
    "answers": ["Ann"],
}


def write(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def lab(tiny_model: Path) -> Iterator[Lab]:
    with Lab(tiny_model) as lab:
        yield lab


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "zipped-without-ending"])
def test_reads_both_formats_plain_and_zipped(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, LONGBENCH, "", OURS)
    if name.startswith("zipped"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    first, second = read_items(path)
    assert first == Item(
        "abc",
        "hotpotqa",
        "Who wrote it?",
        (Document("Passage 1", "A title\nSome text."), Document("Passage 2", "Text about Passage 9: not a mark.")),
        ("Ann", "Ann Lee"),
    )
    assert second == Item("nq-1", "nq_multidoc", "who?", (Document("T", "one"), Document("", "two")), ("Ann",), 1)


def test_what_a_line_need_not_say_comes_from_the_file(tmp_path: Path) -> None:
    rows = [{"input": "?", "context": "some text", "answers": ["a"]}] * 2
    items = read_items(write(tmp_path / "mine.v1.jsonl.gz", *rows))
    assert [(item.key, item.dataset) for item in items] == [("1", "mine.v1"), ("2", "mine.v1")]
    assert dataset_name(tmp_path / "mine.v1.jsonl.gz") == "mine.v1"


def test_documents_without_text_are_left_out_and_the_right_one_is_then_unknown(tmp_path: Path) -> None:
    docs = [{"title": "empty", "text": " "}, {"text": "full"}]
    (item,) = read_items(write(tmp_path / "a.jsonl", OURS | {"docs": docs}))
    assert item.documents == (Document("", "full"),)
    assert item.gold is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "expected an object, found list"),
        ({"context": "text", "answers": ["a"]}, "'input' is missing"),
        ({"input": "?", "answers": ["a"]}, "'context' is missing"),
        ({"input": 3, "context": "text", "answers": ["a"]}, "'input' holds int, expected text"),
        ({"input": "?", "context": "text"}, "'answers' is not a list"),
        ({"input": "?", "context": "text", "answers": "a"}, "'answers' is not a list"),
        ({"input": "?", "context": "text", "answers": []}, "'answers' is empty"),
        ({"input": "?", "context": "text", "answers": [None]}, "'answers' holds NoneType"),
        ({"input": "?", "context": "  ", "answers": ["a"]}, "no document with text"),
        ({"input": "?", "docs": "text", "answers": ["a"]}, "'docs' is not a list"),
        ({"input": "?", "docs": ["text"], "answers": ["a"]}, "each of 'docs' is an object"),
        ({"input": "?", "docs": [{"text": None}], "answers": ["a"]}, "'text' holds NoneType"),
        (OURS, "a second item has the id 'nq-1'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: Any, complaint: str) -> None:
    path = write(tmp_path / "data.jsonl", OURS, "", line)
    with pytest.raises(OptionError) as caught:
        read_items(path)
    assert f"{path}:3: " in caught.value.message
    assert complaint in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_items(tmp_path / "missing.jsonl")
    with pytest.raises(OptionError, match="holds no items"):
        read_items(write(tmp_path / "empty.jsonl"))
    whole = write(tmp_path / "cut.jsonl.gz", OURS)
    whole.write_bytes(whole.read_bytes()[:-12])
    with pytest.raises(OptionError, match="is cut off"):
        read_items(whole)
    whole.write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(OptionError, match="cannot be read"):
        read_items(whole)
    (tmp_path / "latin.jsonl").write_bytes('{"input": "é"}'.encode("latin-1"))
    with pytest.raises(OptionError, match="is not UTF-8 text"):
        read_items(tmp_path / "latin.jsonl")


def test_context_without_marks_is_one_document_and_text_before_the_first_is_kept() -> None:
    assert split_context("just text") == (Document("", "just text"),)
    assert split_context("An opening.\n\nParagraph 1: one\nParagraph 2: two") == (
        Document("", "An opening."),
        Document("Paragraph 1", "one"),
        Document("Paragraph 2", "two"),
    )
    assert split_context(" \n") == ()


def item(documents: list[str], question: str = "Who?", dataset: str = "musique") -> Item:
    return Item("x", dataset, question, tuple(Document("", text) for text in documents), ("Ann",))


def test_data_sets_decide_how_answers_are_scored() -> None:
    assert task_of(item(["a"], dataset="hotpotqa_e")).metric == "f1"
    assert task_of(item(["a"], dataset="qmsum")).metric == "rouge_l"
    assert task_of(item(["a"], dataset="nq_multidoc")).metric == "substring"
    assert task_of(item(["a"], dataset="passage_retrieval_en")).metric == "retrieval"
    assert task_of(item(["a"], dataset="my own")).metric == "f1"
    with pytest.raises(OptionError, match="trec cannot be scored"):
        task_of(item(["a"], dataset="trec"))


def test_one_module_a_document_and_the_question_after_them(lab: Lab) -> None:
    question = question_of(item(["first text", "second text"]), lab)
    prompt = lay_out(question, lab)
    schema = prompt.schema
    assert list(schema.modules) == ["", "document-1", "document-2"]
    assert all(len(e.paths) == 1 for e in prompt.encodings)
    text = lab.tokenizer.decode(prompt.in_position_order())
    places = [text.index(part) for part in ("Answer the", "first text", "second text", "Who?", "Answer with")]
    assert places == sorted(places)
    assert question.cut_tokens == 0


def test_a_long_text_alone_is_cut_at_paragraphs_into_nested_modules(tmp_path: Path) -> None:
    text = "\n\n".join(["word " * 100] * (PART_CHARACTERS // 400))
    with Lab(export_roomy(tmp_path)) as lab:
        question = question_of(item([text]), lab)
        schema, selection = question.schema(chat=lab.chat)
        assert selection.modules == tuple(schema.modules()) == ("document-1", "document-1/part-2")
        assert "".join(question.parts[0]).endswith(text)
        # One of several documents stays in one piece, however long.
        assert list(question_of(item([text, "b"]), lab).schema(chat=True)[0].modules()) == ["document-1", "document-2"]


def test_documents_are_cut_from_the_end_until_they_fit(lab: Lab) -> None:
    documents = ["ab " * 60, "cd " * 60, "ef " * 400, "gh " * 60]
    question = question_of(item(documents), lab)
    kept = ["".join(parts) for parts in question.parts]
    assert kept[0].endswith(documents[0])
    assert kept[1].endswith(documents[1])
    assert len(kept) == 3
    assert f"{documents[2]}".startswith(kept[2].partition(":\n")[2])
    whole = sum(len(lab.tokenizer.encode(f"\n\nDocument {n}:\n{text}")) for n, text in enumerate(documents, start=1))
    assert question.cut_tokens == whole - sum(len(lab.tokenizer.encode(text)) for text in kept)
    prompt = lay_out(question, lab)
    assert lab.spec.max_positions - 8 <= prompt.end + question.task.max_tokens <= lab.spec.max_positions


def test_a_cut_goes_through_no_character(lab: Lab) -> None:
    question = question_of(item(["🙂" * 2000]), lab)
    assert set(question.parts[0][0].partition(":\n")[2]) == {"🙂"}


def test_a_question_that_alone_is_too_long_is_refused(lab: Lab) -> None:
    with pytest.raises(ContextLengthError):
        question_of(item(["text"], question="why " * 600), lab)


DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "items", "documents"), [("nq_multidoc_10", 200, 10), ("nq_multidoc_20", 100, 20), ("musique", 100, 10)]
)
def test_the_data_sets_at_hand_are_read(name: str, items: int, documents: int) -> None:
    path = DATA / f"{name}.dev.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    found = read_items(path)
    assert len(found) == items
    assert {len(each.documents) for each in found} == {documents}
    if name.startswith("nq"):  # the document that is said to hold an answer does
        held = [any(a.lower() in each.documents[each.gold or 0].text.lower() for a in each.answers) for each in found]
        assert sum(held) > 0.8 * items
