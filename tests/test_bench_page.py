"""Pages and pictures from made-up reports, and the commands that write them."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_tools
import pytest

from edge_pc.bench.accuracy import AccuracySettings
from edge_pc.bench.fidelity import FidelitySettings
from edge_pc.bench.machines import compare_machines
from edge_pc.bench.page import page, table_html
from edge_pc.bench.report import Report
from edge_pc.bench.tables import Table
from edge_pc.cli import main
from edge_pc.errors import MissingDependencyError, OptionError

pytest.importorskip("matplotlib")


class _Reader(HTMLParser):
    """Collects what a page would load, and checks that its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.images: list[str] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag == "img":
            self.images.append(dict(attrs).get("alt") or "")
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "h3"):
            self.titles.append(data)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench_tools.made_up_report(tmp_path_factory.mktemp("report") / "r.json").path


def test_a_page_has_everything_inside(made_up: Path) -> None:
    text = page(Report.load(made_up))
    reader = _Reader(text)
    assert reader.open == []
    assert "http" not in text, "nothing is loaded from elsewhere"
    assert "url(" not in text
    assert "<script" not in text
    assert len(reader.images) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.loaded)
    assert all(reader.images), "every picture says in words what it shows"


def test_a_page_says_where_reuse_is_worse_and_what_is_timed(made_up: Path) -> None:
    text = page(Report.load(made_up))
    titles = _Reader(text).titles
    assert {"Where reuse is worse", "Slower than full prefill", "What is timed", "Machine"} <= set(titles)
    worse = text.split("Where reuse is worse", 1)[1].split("</table>", 1)[0]
    assert re.search(r">16</td><td [^>]*>32</td>", worse)
    assert "20 to 70 ×" in text


def answered(question: str, full: float, cached: float) -> dict[str, Any]:
    """A row of `bench accuracy` with these scores."""
    parting = {
        "token": 2, "full_chose": " left", "cached_chose": " right",
        "full_probabilities": [0.9, 0.05], "cached_probabilities": [0.4, 0.6],
    }  # fmt: skip
    ways = {way: {"text": f"{way} says", "scores": {"f1": f1}} for way, f1 in (("full", full), ("cached", cached))}
    return {
        "dataset": "quiz", "question": question, "right": ["yes"], "metric": "f1", "documents": 2, "cut_tokens": 0,
        "prompt_tokens": 1000, "computed_tokens": 20, "parting": parting, "kl": 0.25, "same_first_token": True,
        "gold_full": -1.0, "gold_cached": -1.5, "edit_similarity": 0.5, **ways,
    }  # fmt: skip


def test_a_page_says_where_answers_are_worse_also_of_a_bench_that_is_not_through(tmp_path: Path) -> None:
    report = bench_tools.made_up_report(tmp_path / "r.json")
    accuracy, fidelity = report.section("accuracy", {}), report.section("fidelity", {})
    for number, (full, cached) in enumerate([(1.0, 0.0), (0.5, 0.5), (0.5, 1.0), (0.5, 0.25)]):
        accuracy.add(f"quiz/{number}", answered(f"Question {number}?", full, cached))
    for condition, kl in (("6000", 0.9), ("0", 0.01)):
        row = {"group": "gaps", "condition": condition, "kl": kl, "gold_full": None, "gold_cached": None}
        fidelity.add(condition, row | {"item": "x", "same_first_token": True, "edit_similarity": 1.0})
    text = page(report)
    worse = text.split("Worse answers", 1)[1].split("</ul>", 1)[0]
    assert "quiz: f1 changes by -18.8 [" in worse
    assert "worse on 2 items, better on 1" in worse
    assert "gaps, 6000: KL 0.900" in worse
    assert "gaps, 0:" not in worse
    assert "-0.50 [-0.50, -0.50]" in text, "likelihood of the right answers"
    assert ">0.250 [0.250, 0.250]</td>" in text
    lost = text.split("Where reuse answers worse", 1)[1].split("</table>", 1)[0]
    assert re.findall(r"quiz/\d", lost) == ["quiz/0", "quiz/3"], "the most lost first"
    assert "token 3: full &#x27; left&#x27; (90%) before &#x27; right&#x27; (5%); cached 60% against 40%" in lost


def test_a_page_of_an_interrupted_report(tmp_path: Path) -> None:
    data = json.loads(bench_tools.made_up_report(tmp_path / "r.json").path.read_text(encoding="utf-8"))
    section = data["sections"]["ttft"]
    section["rows"] = [row for row in section["rows"] if row["backend"] == "onnx"][:25]
    section["summary"] = {}
    (tmp_path / "r.json").write_text(json.dumps(data), encoding="utf-8")
    assert "ONNX Runtime: time to first token" in page(Report.load(tmp_path / "r.json"))


def test_text_from_a_report_is_shown_as_it_is() -> None:
    html = table_html(Table("<b>", ("> a & b",), [("<script>x</script>",)], "1 < 2"))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
    markdown = Table("t", ("a", "> b"), [("x|y", "1\n2")]).markdown()
    assert "| x\\|y | 1 2 |" in markdown
    assert "| --- | ---: |" in markdown


def test_machines_side_by_side(tmp_path: Path) -> None:
    reports = [
        bench_tools.made_up_report(tmp_path / "a.json"),
        bench_tools.made_up_report(tmp_path / "b.json", slowness=2.0, rates=0.5),
    ]
    written = compare_machines(reports, tmp_path / "out" / "machines")
    markdown = written.markdown.read_text(encoding="utf-8")
    row = next(line for line in markdown.splitlines() if line.startswith("| 4096 |"))
    assert row.endswith("| 0.50 | 0.50 |"), "A takes half the time of B, both ways"
    assert "![Time to first token](machines.png)" in markdown
    assert "of the differences between the machines" in markdown
    html = written.html.read_text(encoding="utf-8")
    assert "http" not in html
    assert _Reader(html).open == []
    assert written.png.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one, two = (bench_tools.made_up_report(tmp_path / f"{name}.json") for name in "ab")
    with pytest.raises(OptionError, match="one report alone"):
        compare_machines([one], tmp_path / "x")
    two.settings["model"]["name"] = "other"
    with pytest.raises(OptionError, match="another model"):
        compare_machines([one, two], tmp_path / "x")
    empty = Report.create(tmp_path / "c.json", command=[], machine=bench_tools.MACHINE, settings=bench_tools.MODEL)
    with pytest.raises(OptionError, match="no times to first token"):
        compare_machines([one, empty], tmp_path / "x")


def test_pictures_need_matplotlib(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="matplotlib") as caught:
        page(Report.load(made_up))
    assert "[plot]" in (caught.value.hint or "")


def test_the_command_report(made_up: Path, tmp_path: Path) -> None:
    assert main(["bench", "report", str(made_up), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["bench", "report", str(tmp_path / "none.json")]) == 2


def test_the_command_compare(made_up: Path, tmp_path: Path) -> None:
    assert main(["bench", "compare", str(made_up), str(made_up), "-o", str(tmp_path / "m")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"m.md", "m.html", "m.png"}
    assert main(["bench", "compare", str(made_up), "-o", str(tmp_path / "m")]) == 2


def test_a_bench_from_the_command_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edge_pc.bench import machine

    monkeypatch.setattr(machine, "machine_facts", lambda: bench_tools.MACHINE)
    common = ["--model", str(tiny_model), "--backend", "onnx", "--quick", "-q", "--bench-dir", str(tmp_path / "states")]
    path = tmp_path / "r.json"
    assert main(["bench", "encode", *common, "-o", str(path)]) == 0
    assert "x the speed of full prefill" in capsys.readouterr().out
    assert str(tmp_path) not in path.read_text(encoding="utf-8"), "no folder of a person in the report"
    # The made-up machine is another one.
    assert main(["bench", "encode", *common, "-o", str(path)]) == 2
    assert "another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "items"),
    [
        (["accuracy"], 100),
        (["accuracy", "--items", "7"], 7),
        (["accuracy", "--items", "7", "--quick"], 7),
        (["fidelity"], 20),
        (["fidelity", "--items", "3"], 3),
    ],
)
def test_items_of_each_data_set(words: list[str], items: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_pc.bench import fidelity_summary
    from edge_pc.cli import bench

    taken = []

    def fill(name: str, run: Any, settings: AccuracySettings | FidelitySettings, *rest: Any) -> Any:
        taken.append(settings.items)
        return SimpleNamespace(summary={})

    monkeypatch.setattr(bench, "fill", fill)
    monkeypatch.setattr(fidelity_summary, "findings", lambda summary: [])
    assert main(["bench", *words, "data.jsonl", "-o", str(tmp_path / "r.json")]) == 0
    assert taken == [items]


@pytest.mark.parametrize(("name", "settings"), [("accuracy", AccuracySettings()), ("fidelity", FidelitySettings())])
def test_help_states_the_default_number_of_items(
    name: str, settings: AccuracySettings | FidelitySettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--help"]) == 0
    assert f"[default: {settings.items}" in " ".join(capsys.readouterr().out.split())


def test_a_report_that_was_interrupted_before_its_second_backend_is_shown_and_compared(tmp_path: Path) -> None:
    """Of llama.cpp there is only the search for its baseline."""
    report = bench_tools.made_up_report(tmp_path / "report.json")
    section = report.sections["ttft"]
    rows = [row for row in section.rows if row["backend"] == "onnx" or row["way"] == "search"]
    assert any(row["backend"] == "llamacpp" for row in rows)
    section.rows[:] = rows
    assert "<html" in page(report)
    whole = bench_tools.made_up_report(tmp_path / "whole.json")
    tables = compare_machines([report, whole], tmp_path / "machines").markdown.read_text(encoding="utf-8")
    assert "ONNX Runtime: time to first token" in tables
    assert "llama.cpp: time" not in tables
