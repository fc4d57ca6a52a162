"""The paper's applications: both answers, medians, and that ready schemas carry a prompt each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bench_tools
import pytest
from roomy import export_roomy

from benchmarks import cases
from benchmarks.benches import EXPERIMENTS
from benchmarks.cases import Settings
from benchmarks.rows import CaseRow
from edge_pc import schemas
from edge_pc.bench.work import BenchOptions
from edge_pc.engine import Engine
from edge_pc.runtime.compare import Comparison


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_roomy(tmp_path_factory.mktemp("roomy"))


# The tiny model's tokens are bytes, so arguments do not fit their parameters: a schema without any.
SETTINGS = Settings(cases=("documents",), repeats=3, answer_tokens=5)


def run(tmp_path: Path, model: Path, settings: Settings) -> list[CaseRow]:
    report = bench_tools.new_report(tmp_path / "report.json")
    options = BenchOptions(model=str(model), backends=("onnx",))
    return bench_tools.measured(EXPERIMENTS["cases"], report, options, settings, name="cases")


def test_all_applications_have_a_schema_and_a_prompt() -> None:
    assert set(Settings().cases) <= set(schemas.names())
    assert {"code", "tutoring", "travel"} <= set(Settings().cases)
    assert all(schemas.prompt_path(name).is_file() for name in Settings().cases)


def test_a_case_is_measured_both_ways(
    tmp_path: Path, roomy_model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(
        needed="fast",
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
    (row,) = run(tmp_path, roomy_model, SETTINGS)
    assert row.key == "onnx/documents"
    assert (row.full_ttft_ms, row.cached_ttft_ms, row.speed_up) == (900.0, 30.0, 30.0)
    assert row.samples_ms["full_ttft_ms"] == (900.0, 1e6, 900.0)
    assert row.modules == ("documents", "timetable", "harbour-report", "engine-report")
    assert row.question.startswith("Could I have taken my car")
    assert 0 < row.computed_tokens < row.prompt_tokens
    assert row.cached_tokens + row.computed_tokens == row.prompt_tokens
    assert row.full.tokens <= 5
    (table,) = cases.tables([row])
    assert table.rows[0][3:6] == ("900", "30.0", "30.0 ×")
    # Nothing is left.
    assert not list(home.glob("**/*.npy"))


def test_real_comparisons_fill_the_row(tmp_path: Path, roomy_model: Path) -> None:
    (row,) = run(tmp_path, roomy_model, replace(SETTINGS, repeats=2))
    assert len(row.samples_ms["cached_ttft_ms"]) == 2
    assert row.kl >= 0
    assert row.encoded_tokens > row.cached_tokens
