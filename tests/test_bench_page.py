"""Pages and pictures from made-up reports, and the commands that write them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_tools
import pytest

from benchmarks.__main__ import experiments
from benchmarks.benches import EXPERIMENTS
from edge_pc.bench import charts, facts, ttft_pictures, ttft_tables, work
from edge_pc.bench.comparison import compare
from edge_pc.bench.document import Document, Part, page
from edge_pc.bench.plain import from_plain, to_plain
from edge_pc.bench.report import Report
from edge_pc.bench.rows import Row, TtftRow
from edge_pc.bench.tables import Table
from edge_pc.cli import main
from edge_pc.cli.bench import write
from edge_pc.errors import OptionError

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
    text = page(Report.load(made_up)).html()
    reader = _Reader(text)
    assert reader.open == []
    assert "http" not in text, "nothing is loaded from elsewhere"
    assert "url(" not in text
    assert "<script" not in text
    assert len(reader.images) == 2
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.loaded)
    assert all(reader.images), "every picture says in words what it shows"


def test_a_page_says_where_reuse_is_worse_and_what_is_timed(made_up: Path) -> None:
    text = page(Report.load(made_up)).html()
    titles = _Reader(text).titles
    assert {"Where reuse is worse", "Slower than full prefill", "Machine"} <= set(titles)
    assert "runs from the submission of a prompt to its first token" in text
    worse = text.split("Where reuse is worse", 1)[1].split("</table>", 1)[0]
    assert re.search(r">16</td><td [^>]*>32</td>", worse)
    assert "20 to 70 ×" in text


def test_a_page_shows_sections_that_nobody_here_knows_and_puts_what_is_worse_together(tmp_path: Path) -> None:
    report = bench_tools.made_up_report(tmp_path / "r.json")
    section = report.section("weather", Row, "The weather", {}, about="What it was like.")
    section.show([Table("Sun", ("place",), (("Rome",),)), Table("Rain", ("place",), (("Oslo",),), worse=True)])
    text = page(report).html()
    mine = text.split("<h2>The weather</h2>", 1)[1].split("<h2>", 1)[0]
    assert "What it was like." in mine
    assert "Rome" in mine
    assert "Oslo" not in mine
    assert "Oslo" in text.split("<h2>Where reuse is worse</h2>", 1)[1].split("<h2>", 1)[0]


def test_a_page_of_an_interrupted_report(tmp_path: Path) -> None:
    data = json.loads(bench_tools.made_up_report(tmp_path / "r.json").path.read_text(encoding="utf-8"))
    section = data["sections"]["ttft"]
    section["rows"] = [row for row in section["rows"] if row["backend"] == "onnx"][:25]
    kept = [from_plain(TtftRow, row) for row in section["rows"]]
    section["tables"] = [to_plain(table) for table in ttft_tables.tables(kept)]
    section["pictures"] = [to_plain(picture) for picture in ttft_pictures.pictures(kept)]
    (tmp_path / "r.json").write_text(json.dumps(data), encoding="utf-8")
    assert "ONNX Runtime: time to first token" in page(Report.load(tmp_path / "r.json")).html()


def test_text_from_a_report_is_shown_as_it_is() -> None:
    table = Table("<b>", ("> a & b",), (("<script>x</script>",),), "1 < 2")
    html = Document("t", "", [Part("p", tables=[table])]).html()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
    markdown = Table("t", ("a", "> b"), (("x|y", "1\n2"),)).markdown()
    assert "| x\\|y | 1 2 |" in markdown
    assert "| --- | ---: |" in markdown


def test_machines_side_by_side(tmp_path: Path) -> None:
    reports = [
        bench_tools.made_up_report(tmp_path / "a.json"),
        bench_tools.made_up_report(tmp_path / "b.json", slowness=2.0, rates=0.5),
    ]
    html, markdown_file = tmp_path / "out" / "machines.html", tmp_path / "out" / "machines.md"
    write(compare(reports), html, markdown_file)
    markdown = markdown_file.read_text(encoding="utf-8")
    row = next(line for line in markdown.splitlines() if line.startswith("| 4096 |"))
    assert row.endswith("| 0.50 | 0.50 |"), "A takes half the time of B, both ways"
    assert "](machines.png)" in markdown
    assert "http" not in html.read_text(encoding="utf-8")
    assert _Reader(html.read_text(encoding="utf-8")).open == []
    assert markdown_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one, two = (bench_tools.made_up_report(tmp_path / f"{name}.json") for name in "ab")
    with pytest.raises(OptionError, match="one report alone"):
        compare([one])
    two.settings["model"]["name"] = "other"
    with pytest.raises(OptionError, match="another model"):
        compare([one, two])
    empty = bench_tools.new_report(tmp_path / "c.json")
    with pytest.raises(OptionError, match="no times to first token"):
        compare([one, empty])


def test_that_matplotlib_is_missing_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    path = tmp_path / "r.json"
    assert main(["bench", "all", "--quick", "-o", str(path)]) == 3
    said = capsys.readouterr().err
    assert "need matplotlib, which is not installed" in said
    assert 'pip install "edge-prompt-cache[plot]"' in said
    assert not path.exists()


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
    monkeypatch.setattr(facts, "machine_facts", lambda: bench_tools.MACHINE)
    common = ["--model", str(tiny_model), "--backend", "onnx", "--quick", "-q", "--bench-dir", str(tmp_path / "states")]
    path = tmp_path / "r.json"
    assert main(["bench", "encode", *common, "-o", str(path)]) == 0
    assert "full prefill (tokens/s)" in capsys.readouterr().out
    assert str(tmp_path) not in path.read_text(encoding="utf-8"), "no folder of a person in the report"
    monkeypatch.setattr(facts, "machine_facts", lambda: bench_tools.MACHINE | {"cpu": "Imaginary 8"})
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
    taken = []

    def fill(name: str, bench: Any, report: Report, options: Any, settings: Any, *rest: Any, **more: Any) -> None:
        taken.append((settings.items, settings.datasets))

    monkeypatch.setattr(work, "fill", fill)
    monkeypatch.setattr(work, "open_report", lambda path, *_: bench_tools.new_report(path))
    assert main([*words, "data.jsonl", "-o", str(tmp_path / "r.json")], group=experiments, name="benchmarks") == 0
    assert taken == [(items, (Path("data.jsonl"),))]


@pytest.mark.parametrize("name", ["accuracy", "fidelity"])
def test_help_states_the_default_number_of_items(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"], group=experiments, name="benchmarks") == 0
    default = EXPERIMENTS[name].load().settings().items
    assert f"[default: {default}" in " ".join(capsys.readouterr().out.split())


def test_a_report_that_was_interrupted_before_its_second_backend_is_shown_and_compared(tmp_path: Path) -> None:
    """Of llama.cpp there is only the search for its baseline."""
    report = bench_tools.made_up_report(tmp_path / "report.json")
    section = report.data["sections"]["ttft"]
    section["rows"] = [row for row in section["rows"] if row["backend"] == "onnx"]
    rows = report.rows("ttft", TtftRow)
    section["tables"] = [to_plain(table) for table in ttft_tables.tables(rows)]
    section["pictures"] = [to_plain(picture) for picture in ttft_pictures.pictures(rows)]
    assert "<html" in page(report).html()
    whole = bench_tools.made_up_report(tmp_path / "whole.json")
    tables = compare([report, whole]).markdown("x.png")
    assert "ONNX Runtime: time to first token" in tables
    assert "llama.cpp: time" not in tables
