"""The documents say what is true: examples run, tables are those of the commands, links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.explain import compare
from edge_pc.bench.report import Report
from edge_pc.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def script(name: str) -> ModuleType:
    """A script that `make docs` runs."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("make_cli_reference")


@pytest.fixture
def trip(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with README's schema and prompt; commands run there, on the tiny model."""
    schema, prompt = blocks("xml")
    (tmp_path / "trip.xml").write_text(schema, encoding="utf-8")
    (tmp_path / "prompt.xml").write_text(prompt, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGE_PC_MODEL", str(tiny_model))
    monkeypatch.setenv("EDGE_PC_MAX_TOKENS", "4")
    return tmp_path


def test_the_command_reference_is_up_to_date(reference: ModuleType) -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == reference.reference(), "run: make docs"
    assert reference.with_table(README) == README, "run: make docs"
    assert README.count("| `edge-pc ") == len(reference.all_commands())


def test_the_picture_shows_the_points_of_the_report() -> None:
    picture = script("make_picture")
    svg = picture.PICTURE.read_text(encoding="utf-8")
    assert picture.stated(svg) == picture.source(), "run: make docs"
    assert 0 < README.index("(docs/ttft.svg)") < README.index("```"), "it stands before the first command"
    assert len(svg) < 100_000
    rows = json.loads(picture.REPORT.read_text(encoding="utf-8"))["sections"]["ttft"]["rows"]
    for tokens, *times in picture.points():
        for way, ms in zip(("full", "cached"), times, strict=True):
            (row,) = (row for row in rows if row["key"] == f"onnx/cached={tokens}/new=32/modules=1/warm/{way}")
            assert ms == pytest.approx(statistics.median(row["samples_ms"]["ttft"]), abs=0.06)


def test_the_tables_of_the_results_are_those_of_the_reports() -> None:
    results = script("make_results")
    text = results.README.read_text(encoding="utf-8")
    assert len(results.BLOCK.findall(text)) == text.count("<!-- results: ") > 0
    assert results.with_tables(text) == text, "run: make docs"


def test_the_losses_under_limits_are_those_of_the_report() -> None:
    report = Report.load(ROOT / "docs" / "results" / "levels" / "report.json")
    (table,) = (table for table in report.tables("accuracy") if table.title.startswith("Right answers"))
    found = {row[0].partition(", ")[2]: row[3:6] for row in table.rows if row[2].startswith("substring")}
    limits = " ".join(README.partition("## Limits")[2].partition("## ")[0].split())
    said = re.search(
        r"answered (\d+) % right in full, (\d+) % with `--fidelity fast` "
        r"\(difference −(\d+), from −(\d+) to −(\d+)\) and (\d+) % with `balanced` \(−(\d+), from −(\d+) to \+(\d+)\)",
        limits,
    )
    assert said is not None
    full, fast, lost, lowest, highest, balanced, less, low, high = said.groups()
    assert found["fast"][0].startswith(f"{full}.0 ")
    assert found["fast"][1].startswith(f"{fast}.0 ")
    assert found["fast"][2] == f"-{lost}.0 [-{lowest}.0, -{highest}.0]"
    assert found["balanced"][1].startswith(f"{balanced}.0 ")
    assert found["balanced"][2] == f"-{less}.0 [-{low}.0, +{high}.0]"


def test_the_comparison_of_machines_is_that_of_the_reports(tmp_path: Path) -> None:
    """The picture is not compared: matplotlib may draw it differently elsewhere."""
    results = ROOT / "docs" / "results"
    reports = [Report.load(results / machine / "report.json") for machine in ("intel-xeon", "amd-epyc")]
    stands = (results / "machines.md").read_text(encoding="utf-8")
    assert compare(reports).markdown("machines.png") == stands, "run the command that docs/results/README.md names"


def test_the_commands_on_the_schema_work(trip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("") if "edge-pc schema show trip.xml" in block]
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "edge-pc"
        assert main(words[1:]) == 0, line + capsys.readouterr().err


def test_the_python_example_works(trip: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for block in blocks("python") if "Engine(" in block]
    names: dict[str, Any] = {}
    exec(compile(code.replace('"smollm2"', repr(str(tiny_model))), "README.md", "exec"), names)
    stats = names["result"].stats
    printed = f"{stats.cached_tokens} {stats.computed_tokens} {stats.ttft_ms}\n"
    assert capsys.readouterr().out.endswith(printed)
    assert stats.cached_tokens > stats.computed_tokens > 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    documents = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", documents, re.MULTILINE))
    assert {"demo", "test", "lint", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
