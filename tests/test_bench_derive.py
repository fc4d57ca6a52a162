"""What is concluded from times: fits, break-even, repeats; all on numbers whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import bench_tools
import numpy as np
import pytest

from benchmarks import explain
from benchmarks.benches import EXPERIMENTS
from benchmarks.explain import demand, fit, points_of
from benchmarks.paper_models import calculated
from benchmarks.rates import measure_rates
from benchmarks.rows import Rates, RatesRow
from benchmarks.weights import weights
from edge_pc.bench.report import Report
from edge_pc.bench.rows import TimedRow, TtftRow, samples_of
from edge_pc.bench.timing import Sample, Way, affordable_rounds, interleave
from edge_pc.bench.ttft_tables import break_even, growth, uses_to_pay
from edge_pc.bench.work import BenchOptions


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.4, 2.0])
def test_growth_finds_the_exponent(exponent: float) -> None:
    lengths = [1024, 2048, 4096, 8000]
    found = growth(lengths, [3 * n**exponent for n in lengths])
    assert found == (pytest.approx(exponent), pytest.approx(1))


def test_growth_says_how_well_it_fits() -> None:
    crooked = growth([1, 2, 4], [1, 4, 2])
    assert crooked is not None
    assert crooked[1] < 0.5
    assert growth([5, 5], [1, 2]) is None
    assert growth([5], [1]) is None


def test_break_even_lies_where_the_lines_cross() -> None:
    # On logarithmic axes full/cached goes from 1/2 at 16 to 2 at 64: they meet in the middle.
    assert break_even([(16, 2, 1), (64, 2, 4), (256, 2, 16)]) == pytest.approx(32)


def test_break_even_takes_the_last_crossing() -> None:
    assert break_even([(1, 1, 2), (2, 1, 0.5), (4, 1, 2), (8, 1, 2)]) == pytest.approx(2 * 2**0.5)


@pytest.mark.parametrize(("full", "tokens"), [((2, 2), 0), ((0.5, 0.5), math.inf), ((2, 0.5), math.inf)])
def test_break_even_outside_of_what_was_measured(full: tuple[float, float], tokens: float) -> None:
    assert break_even([(16, 1, full[0]), (64, 1, full[1])]) == tokens


def test_break_even_of_nothing() -> None:
    assert break_even([]) is None


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


def test_median_and_quartiles_follow_from_the_samples() -> None:
    row = TimedRow(key="", backend="", samples_ms=samples_of([{"ttft": value} for value in (5.0, 1.0, 3.0, 2.0, 4.0)]))
    assert row.samples_ms == {"ttft": (5.0, 1.0, 3.0, 2.0, 4.0)}
    assert (row.median("ttft"), *row.quartiles("ttft")) == (3.0, 2.0, 4.0)
    single = TimedRow(key="", backend="", samples_ms={"ttft": (7.0,)})
    assert single.quartiles("ttft") == (7.0, 7.0)


def test_figures_of_the_papers_table_come_out() -> None:
    rows = {row.model: row for row in calculated()}
    assert len(rows) == 8
    assert all(row.calculated_mb == row.figure_mb for row in rows.values())
    assert rows["Llama 70B"].stored_bytes_per_token * 8 == rows["Llama 70B"].bytes_per_token
    assert rows["Llama 7B"].stored_bytes_per_token == rows["Llama 7B"].bytes_per_token == 512 * 1024


def test_demand_of_a_forward_pass() -> None:
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32, "vocab_size": 100}
    facts = RatesRow(
        key="", backend="", rates=Rates(1, 1, 1, 1), weight_bytes=1000, matmul_parameters=500, kv_number_bytes=4
    )
    row = TtftRow(
        key="", backend="onnx", way="cached", axes=(), cached_tokens=10, new_tokens=2, modules=1,
        reused_tokens=10, computed_tokens=2, samples_ms={},
    )  # fmt: skip
    nbytes, operations = demand(row, facts, sizes)
    assert nbytes == 1000 + (2 * 2 * 2 * 8 * 4) * (10 + 1)
    # Two tokens attend to 10 cells each, and to 1 and 2 of their own.
    assert operations == 2 * 500 * 2 + 2 * 100 * 32 + 4 * 2 * 4 * 8 * 23
    full_bytes, _ = demand(replace(row, way="full", reused_tokens=1000), facts, sizes)
    # 1002 tokens take 4 chunks of 256.
    assert full_bytes == 4 * (1000 + (2 * 2 * 2 * 8 * 4) * 501)


def _with_times(report: Report, times: Callable[[explain.Point], float]) -> Report:
    """The report with other times to first token on ONNX Runtime, in seconds."""
    wanted = {point.name: times(point) for point in points_of(report, "onnx")}
    for row in report.data["sections"]["ttft"]["rows"]:
        name = (row["way"], row["cached_tokens"], row["new_tokens"], row["modules"])
        if row["backend"] == "onnx" and row.get("pages") != "cold" and name in wanted:
            row["samples_ms"]["ttft"] = [1e3 * wanted[name]]
    return report


def _modelled(path: Path, rates: float, slowness: float = 1.0) -> Report:
    """A report whose times are exactly 5 ms + 2 × bytes + 1.5 × operations at its machine's rates."""

    def times(point: explain.Point) -> float:
        return slowness * (0.005 + 2 * point.bytes_s + 1.5 * point.operations_s)

    return _with_times(bench_tools.made_up_report(path, rates=rates), times)


def test_the_model_of_ttft_finds_its_coefficients(tmp_path: Path) -> None:
    reports = [_modelled(tmp_path / "a.json", 1.0), _modelled(tmp_path / "b.json", 0.5)]
    found = fit(reports, "onnx")
    assert found is not None
    assert (found.a_ms, found.b, found.c) == (pytest.approx(5, abs=0.05), pytest.approx(2), pytest.approx(1.5))
    assert found.worst_error < 0.01
    assert found.explained == pytest.approx(1)
    shown = explain.compare(reports).parts[-1].tables
    assert shown[0].rows[0][-1] == "100%"
    assert [table.rows[0][1] for table in shown[1:]] == ["10.0", "5.0"]


def test_the_model_says_when_it_explains_nothing(tmp_path: Path) -> None:
    """Equal rates cannot explain why the second machine takes three times as long."""
    found = fit([_modelled(tmp_path / "a.json", 1.0), _modelled(tmp_path / "b.json", 1.0, slowness=3)], "onnx")
    assert found is not None
    assert found.explained == pytest.approx(0, abs=0.01)
    assert found.median_error > 0.2


def test_the_model_has_no_negative_coefficient(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = fit([_with_times(bench_tools.made_up_report(tmp_path / "a.json"), lambda _: rng.uniform(1, 100))], "onnx")
    assert found is not None
    assert min(found.a_ms, found.b, found.c) >= 0
    assert found.explained is None


def test_rates_are_measured_once_and_the_model_is_fitted_to_what_is_there(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = measure_rates(memory_bytes=64 << 20)
    assert min(asdict(few).values()) > 0
    monkeypatch.setattr(explain, "measure_rates", lambda memory_bytes: few)
    report = bench_tools.made_up_report(tmp_path / "r.json")
    del report.sections["rates"]
    options = BenchOptions(str(tiny_model), None, ("onnx",), cache_dir=tmp_path / "states")
    (row,) = bench_tools.measured(EXPERIMENTS["rates"], report, options, explain.Settings(), name="rates")
    assert row.rates == few
    # 2 layers of 64 × 64 q and o, 32 × 64 k and v, and three of 96 × 64.
    assert row.matmul_parameters == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    assert row.fit is not None
    assert row.fit.points > 4
    monkeypatch.setattr(explain, "measure_rates", None)
    assert bench_tools.measured(EXPERIMENTS["rates"], report, options, explain.Settings(), name="rates") == [row]


def test_weights_of_both_kinds_of_model_are_counted_alike(tiny_model: Path, tiny_gguf: Path) -> None:
    assert weights(tiny_gguf)[1] == weights(tiny_model)[1]
    assert weights(tiny_gguf)[0] == tiny_gguf.stat().st_size
