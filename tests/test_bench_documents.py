"""Experiments on questions about documents, on the tiny model."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from benchmarks import citing, long_inputs


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions about two documents each; the words of each question are in the second."""
    path = tmp_path / "qmsum.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(5):
            texts = [f"Nothing {number}. " * 20, f"The owl{number} sings at night. " * 3]
            docs = [{"title": f"T{n}", "text": text} for n, text in enumerate(texts)]
            item = {"id": str(number), "dataset": "qmsum", "input": f"When does owl{number} sing?", "docs": docs}
            file.write(json.dumps({**item, "gold_doc": 1, "answers": ["At night."]}) + "\n")
    return path


def test_a_text_longer_than_its_room(data: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long_inputs.main([str(data), "--model", str(tiny_model), "--questions", "2", "--rooms", "512", "--meetings", "3"])
    lines = [re.split("  +| rouge", line)[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{number} {way}, 512" for number in (1, 2) for way in ("picked", "first", "alone")]


def test_words_find_the_document_of_an_answer(data: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    citing.main([str(data), "--model", str(tiny_model)])
    out = capsys.readouterr().out
    assert "words, question          5 of 5\n" in out
