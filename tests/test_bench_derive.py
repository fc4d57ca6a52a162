"""What is concluded from times: fits, break-even, repeats; all on numbers whose answer is known."""

from __future__ import annotations

from pathlib import Path

import bench_tools
import numpy as np
import pytest

from edge_pc.bench.derive import break_even, growth, uses_to_pay
from edge_pc.bench.explain import demand, fit, loads_of
from edge_pc.bench.paper_models import PAPER_MODELS
from edge_pc.bench.timing import Sample, Way, affordable_rounds, describe_samples, interleave


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.4, 2.0])
def test_growth_finds_the_exponent(exponent: float) -> None:
    lengths = [1024, 2048, 4096, 8000]
    found = growth(lengths, [3 * n**exponent for n in lengths])
    assert found is not None
    assert found.exponent == pytest.approx(exponent, abs=1e-3)
    assert found.points == 4


def test_growth_says_how_well_it_fits() -> None:
    straight, crooked = growth([1, 2, 4], [1, 2, 4]), growth([1, 2, 4], [1, 4, 2])
    assert straight is not None
    assert crooked is not None
    assert straight.r2 == 1
    assert crooked.r2 < 0.5
    assert growth([5, 5], [1, 2]) is None


def test_break_even_lies_where_the_lines_cross() -> None:
    # On logarithmic axes full/cached goes from 1/2 at 16 to 2 at 64: they meet in the middle.
    found = break_even([16, 64, 256], [2, 2, 2], [1, 4, 16])
    assert found is not None
    assert found.verdict == "from"
    assert found.tokens == pytest.approx(32, abs=0.1)


def test_break_even_takes_the_last_crossing() -> None:
    found = break_even([1, 2, 4, 8], [1, 1, 1, 1], [2, 0.5, 2, 2])
    assert found is not None
    assert found.tokens == pytest.approx(2 * 2**0.5, abs=0.1)


@pytest.mark.parametrize(("full", "verdict"), [([2, 2], "always"), ([0.5, 0.5], "never"), ([2, 0.5], "never")])
def test_break_even_outside_of_what_was_measured(full: list[float], verdict: str) -> None:
    found = break_even([16, 64], [1, 1], full)
    assert found is not None
    assert (found.tokens, found.verdict, found.shortest) == (None, verdict, 16)


def test_break_even_of_nothing() -> None:
    assert break_even([], [], []) is None


@pytest.mark.parametrize(
    ("encode", "cached", "full", "uses"),
    [(100, 10, 110, 2), (99, 10, 110, 1), (250, 10, 110, 3), (100, 110, 110, None), (100, 120, 110, None)],
)
def test_uses_to_pay(encode: float, cached: float, full: float, uses: int | None) -> None:
    assert uses_to_pay(encode, cached, full) == uses
    if uses is not None:
        assert encode + uses * cached < uses * full
        assert uses == 1 or encode + (uses - 1) * cached >= (uses - 1) * full


def _recorder(log: list[str], name: str) -> Way:
    def way() -> Sample:
        log.append(name)
        return {"ttft": float(len(log))}

    return way


def test_ways_take_turns_and_another_comes_first_each_round() -> None:
    log: list[str] = []
    ways = {name: _recorder(log, name) for name in "abc"}
    samples = interleave(ways, dict.fromkeys("abc", 3))
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"
    assert [len(taken) for taken in samples.values()] == [3, 3, 3]
    assert samples["a"][0] == {"ttft": 4.0}, "the warm-up is not counted"


def test_a_slow_way_takes_part_in_some_rounds_and_is_not_warmed_up() -> None:
    log: list[str] = []
    samples = interleave({"fast": _recorder(log, "f"), "slow": _recorder(log, "s")}, {"fast": 6, "slow": 2})
    assert len(samples["slow"]) == 2
    assert log.count("s") == 2
    assert "".join(log) == "f" + "ff" + "fs"[::1] + "f" + "f" + "sf"


def test_affordable_rounds() -> None:
    assert affordable_rounds(9, 10, 25, 2) == 9
    assert affordable_rounds(9, 5000, 25, 2) == 5
    assert affordable_rounds(9, 60_000, 25, 2) == 2
    assert affordable_rounds(1, 60_000, 25, 2) == 1


def test_samples_are_kept_beside_median_and_quartiles() -> None:
    described = describe_samples([{"ttft": value} for value in (5.0, 1.0, 3.0, 2.0, 4.0)])
    assert described == {
        "samples_ms": {"ttft": [5.0, 1.0, 3.0, 2.0, 4.0]},
        "median_ms": {"ttft": 3.0},
        "quartiles_ms": {"ttft": [2.0, 4.0]},
    }


def test_figures_of_the_papers_table_come_out() -> None:
    assert {model.name: model.paper_mb for model in PAPER_MODELS} == {m.name: m.figure for m in PAPER_MODELS}
    by_name = {model.name: model for model in PAPER_MODELS}
    assert by_name["Llama 70B"].stored_bytes * 8 == by_name["Llama 70B"].paper_bytes
    assert by_name["Llama 7B"].stored_bytes == by_name["Llama 7B"].paper_bytes == 512 * 1024


def test_demand_of_a_forward_pass() -> None:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32, "vocab_size": 100}
    facts = {"weight_bytes": 1000, "matmul_parameters": 500}
    row = {"way": "cached", "reused_tokens": 10, "computed_tokens": 2}
    nbytes, operations = demand(row, "onnx", facts, sizes)
    assert nbytes == 1000 + (2 * 2 * 2 * 8 * 4) * (10 + 1)
    # Two tokens attend to 10 cells each, and to 1 and 2 of their own.
    assert operations == 2 * 500 * 2 + 2 * 100 * 32 + 4 * 2 * 4 * 8 * 23
    full_bytes, _ = demand(row | {"way": "full", "reused_tokens": 1000}, "onnx", facts, sizes)
    # 1002 tokens take 4 chunks of 256.
    assert full_bytes == 4 * (1000 + (2 * 2 * 2 * 8 * 4) * 501)


def _with_times(path: Path, rates: float) -> bench_tools.Report:
    """A report whose times are exactly 5 ms + 2 × bytes + 1.5 × operations at its machine's rates."""
    report = bench_tools.made_up_report(path, rates=rates)
    for load, row in zip(loads_of(report, "onnx"), _fitted_rows(report), strict=True):
        row["median_ms"]["ttft"] = 5 + 1e3 * (2 * load.bytes_s + 1.5 * load.operations_s)
    return report


def _fitted_rows(report: bench_tools.Report) -> list[dict[str, object]]:
    return [
        row
        for row in report.sections["ttft"].rows
        if row["backend"] == "onnx" and row["way"] in ("cached", "full") and row["pages"] == "warm" and row["axes"]
        and set(row["axes"]) & {"length", "new", "share"}
    ]  # fmt: skip


def test_the_model_of_ttft_finds_its_coefficients(tmp_path: Path) -> None:
    reports = [_with_times(tmp_path / "a.json", 1.0), _with_times(tmp_path / "b.json", 0.5)]
    found = fit(reports, "onnx")
    assert found is not None
    assert (found.a_ms, found.b, found.c) == (pytest.approx(5, abs=0.05), pytest.approx(2), pytest.approx(1.5))
    assert found.worst_error < 0.01
    assert found.explained == pytest.approx(1)


def test_the_model_says_when_it_explains_nothing(tmp_path: Path) -> None:
    """Equal rates cannot explain why the second machine takes three times as long."""
    same, slower = _with_times(tmp_path / "a.json", 1.0), _with_times(tmp_path / "b.json", 1.0)
    for row in _fitted_rows(slower):
        row["median_ms"]["ttft"] *= 3  # type: ignore[index]
    found = fit([same, slower], "onnx")
    assert found is not None
    assert found.explained == pytest.approx(0, abs=0.01)
    assert found.median_error > 0.2


def test_the_model_has_no_negative_coefficient(tmp_path: Path) -> None:
    report = bench_tools.made_up_report(tmp_path / "a.json")
    rng = np.random.default_rng(0)
    for row in _fitted_rows(report):
        row["median_ms"]["ttft"] = float(rng.uniform(1, 100))  # type: ignore[index]
    found = fit([report], "onnx")
    assert found is not None
    assert min(found.a_ms, found.b, found.c) >= 0
    assert found.explained is None
