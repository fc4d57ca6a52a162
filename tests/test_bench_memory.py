"""`bench memory` and `bench encode` on the tiny model."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path

import bench_tools
import pytest

from edge_pc.bench import encode, held, memory
from edge_pc.bench.held import available_bytes, memory_of_this_process
from edge_pc.bench.report import Report
from edge_pc.bench.rows import MemoryRow
from edge_pc.bench.texts import Shape
from edge_pc.bench.work import BenchOptions, Work
from edge_pc.errors import EdgePCError

linux = pytest.mark.skipif(memory_of_this_process() is None, reason="this system has no smaps_rollup")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return bench_tools.new_report(tmp_path / "r.json")


def _options(model: Path, tmp_path: Path) -> BenchOptions:
    return BenchOptions(str(model), None, ("onnx",), threads=1, cache_dir=tmp_path / "states")


@linux
def test_memory_of_this_process() -> None:
    before = memory_of_this_process()
    block = mmap.mmap(-1, 32 << 20)  # a bytearray may get memory that was dirty before
    block.write(b"x" * len(block))
    after = memory_of_this_process()
    assert before is not None
    assert after is not None
    assert after["private_dirty"] - before["private_dirty"] > len(block) // 2
    assert after["rss"] >= after["pss"]
    assert (available_bytes() or 0) > 0


def test_where_the_system_does_not_count_memory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_ROLLUP", Path("/no/such/file"))
    monkeypatch.setattr(held, "_MEMINFO", Path("/no/such/file"))
    assert memory_of_this_process() is None
    assert available_bytes() is None


@linux
def test_memory_of_prompts_held_open(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    settings = memory.Settings(tokens=900, new_tokens=4, prompts=(1, 2))
    rows = bench_tools.measured("memory", report, _options(tiny_model, tmp_path), settings)
    assert [(row.kind, row.prompts) for row in rows] == [
        ("one process", 0), ("one process", 1), ("one process", 2), ("processes", 2)
    ]  # fmt: skip
    _, _, two, both = rows
    # Float32 K and V of 2 layers × 2 KV heads × 16, and the padding up to whole pages.
    assert two.states_bytes / two.tokens == pytest.approx(2 * 2 * 2 * 16 * 4, rel=0.1)
    assert two.file_bytes > two.states_bytes
    assert both.rss > two.rss > 0, "two processes have the model twice"
    prompts, added, states = report.tables("memory")
    assert [row[2] for row in prompts.rows] == ["0", "1", "2", "2"]
    assert [row[1] for row in added.rows] == ["1", "2"]
    assert len(states.rows) == 1
    # Nothing is measured again, and no process is started.
    assert bench_tools.measured("memory", report, _options(tiny_model, tmp_path), settings) == rows


def test_processes_that_would_not_fit_are_not_started(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    section = bench_tools.new_section(report, MemoryRow, "memory")
    states = {"tokens": 9, "dtype": "float32", "states_bytes": 9, "file_bytes": 9, "disk_bytes": 9}
    one = MemoryRow(
        key="onnx/one process/1", backend="onnx", kind="one process", prompts=1, private_dirty=1 << 20, **states
    )
    section.add(one)
    work = Work(report, section, BenchOptions(), ["onnx"], tmp_path)
    many = MemoryRow(key="", backend="onnx", kind="processes", prompts=16, **states)
    assert memory.in_processes(work, Shape(9, 1), many) == []
    assert "memory" in memory.counted(many, []).skipped
    assert "this system" in memory.counted(many, [None]).skipped


def test_encoding_is_timed_from_nothing(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    settings = encode.Settings(lengths=(64,), modules=(1, 2), repeats=2)
    rows = bench_tools.measured("encode", report, _options(tiny_model, tmp_path), settings)
    assert [(row.way, row.modules) for row in rows] == [
        (way, modules) for modules in (1, 2) for way in ("encode", "write", "prefill")
    ]
    assert all(len(row.samples_ms["total"]) == 2 for row in rows)
    assert all(min(row.samples_ms["total"]) > 0 for row in rows)
    (table,) = report.tables("encode")
    assert [row[:3] for row in table.rows] == [("ONNX Runtime", "64", "1"), ("ONNX Runtime", "64", "2")]
    assert bench_tools.measured("encode", report, _options(tiny_model, tmp_path), settings) == rows


def test_a_process_that_holds_prompts_and_is_killed_is_an_error_in_words(tiny_model: Path, tmp_path: Path) -> None:
    options = {"model": tiny_model, "cache_dir": tmp_path / "states", "threads": 1}

    def hold_after_a_kill() -> None:
        with held.holder(Shape(0, 4), options) as holder:
            (child,) = multiprocessing.active_children()
            child.kill()
            child.join()
            holder.hold(1)

    with pytest.raises(EdgePCError, match="ended early"):
        hold_after_a_kill()
    assert multiprocessing.active_children() == []
