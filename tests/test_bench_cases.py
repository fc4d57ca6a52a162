"""The paper's applications: both answers, medians, and that ready schemas carry a prompt each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from roomy import export_roomy

from edge_pc import schemas
from edge_pc.bench import cases
from edge_pc.bench.cases import CasesSettings, findings, run_cases, summarize
from edge_pc.bench.report import Report
from edge_pc.bench.setup import BenchOptions
from edge_pc.engine import Engine
from edge_pc.runtime.compare import Comparison


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_roomy(tmp_path_factory.mktemp("roomy"))


# The tiny model's tokens are bytes, so arguments do not fit their parameters: a schema without any.
SETTINGS = CasesSettings(cases=("documents",), repeats=3, answer_tokens=5)


def new_report(tmp_path: Path) -> Report:
    return Report.create(tmp_path / "report.json", command=["edge-pc"], machine={}, settings={})


def test_all_applications_have_a_schema_and_a_prompt() -> None:
    assert set(CasesSettings().cases) <= set(schemas.names())
    assert {"code", "tutoring", "travel"} <= set(CasesSettings().cases)
    assert all(schemas.prompt_path(name).is_file() for name in CasesSettings().cases)


def test_a_case_is_measured_both_ways(
    tmp_path: Path, roomy_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(
        full_ttft_ms=900.0,
        cached_ttft_ms=30.0,
        in_place_ttft_ms=29.0,
        ttft_ratio=30.0,
        max_abs_logit_diff=0.1,
        kl=0.01,
        same_first_token=True,
    )
    clock = iter([comparison, replace(comparison, full_ttft_ms=1e6), replace(comparison, cached_ttft_ms=20.0)])
    monkeypatch.setattr(Engine, "compare", lambda self, prompt: next(clock))
    options = BenchOptions(model=str(roomy_model), backends=("onnx",))
    section = run_cases(new_report(tmp_path), options, SETTINGS)
    (row,) = section.rows
    assert row["key"] == "onnx/documents"
    assert (row["full_ttft_ms"], row["cached_ttft_ms"], row["speed_up"]) == (900.0, 30.0, 30.0)
    assert row["samples_ms"]["full_ttft_ms"] == [900.0, 1e6, 900.0]
    assert row["modules"] == ["documents", "timetable", "harbour-report", "engine-report"]
    assert row["question"].startswith("Could I have taken my car")
    assert 0 < row["computed_tokens"] < row["prompt_tokens"]
    assert row["cached_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
    assert row["full"]["tokens"] <= 5
    assert section.summary == {"onnx": {"speed_up": {"documents": 30.0}, "least_speed_up": 30.0}}
    lines = findings(section)
    assert len(lines) == 5
    assert "900 ms in full, 30 ms cached: 30.0 x" in lines[1]
    # Nothing is left behind, and nothing is measured again.
    assert not list(home.glob("**/*.npy"))
    monkeypatch.setattr(cases, "measure", None)
    assert run_cases(Report.load(tmp_path / "report.json"), options, SETTINGS).rows == section.rows


def test_real_comparisons_fill_the_row(tmp_path: Path, roomy_model: Path) -> None:
    options = BenchOptions(model=str(roomy_model), backends=("onnx",))
    (row,) = run_cases(new_report(tmp_path), options, replace(SETTINGS, repeats=2)).rows
    assert len(row["samples_ms"]["cached_ttft_ms"]) == 2
    assert row["kl"] >= 0
    assert row["encoded_tokens"] > row["cached_tokens"]


def test_the_summary_names_the_smallest_speed_up_of_each_backend() -> None:
    rows = [{"backend": "b", "case": name, "speed_up": value} for name, value in (("x", 8.0), ("y", 3.0))]
    assert summarize(rows) == {"b": {"speed_up": {"x": 8.0, "y": 3.0}, "least_speed_up": 3.0}}
