"""`bench memory` and `bench encode` on the tiny model."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import bench_tools
import pytest

from edge_pc.bench import encode, memory
from edge_pc.bench.report import Report
from edge_pc.bench.setup import BenchOptions
from edge_pc.bench.smaps import available_bytes, memory_of

linux = pytest.mark.skipif(memory_of(os.getpid()) is None, reason="this system has no smaps_rollup")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report.create(
        tmp_path / "r.json", command=["edge-pc"], machine=bench_tools.MACHINE, settings=bench_tools.MODEL
    )


def _options(model: Path, tmp_path: Path) -> BenchOptions:
    return BenchOptions(str(model), None, ("onnx",), threads=1, cache_dir=tmp_path / "states")


@linux
def test_memory_of_this_process() -> None:
    before = memory_of(os.getpid())
    block = mmap.mmap(-1, 32 << 20)  # a bytearray may get memory that was dirty before
    block.write(b"x" * len(block))
    after = memory_of(os.getpid())
    assert before is not None
    assert after is not None
    assert after.private_dirty - before.private_dirty > len(block) // 2
    assert after.rss >= after.pss
    assert (available_bytes() or 0) > 0
    assert memory_of(2**22 + 1) is None


@linux
def test_memory_of_prompts_held_open(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    settings = memory.MemorySettings(tokens=900, new_tokens=4, prompts=(1, 2))
    section = memory.run_memory(report, _options(tiny_model, tmp_path), settings)
    states = section.row("onnx/states")
    assert states is not None
    # Float32 K and V of 2 layers × 2 KV heads × 16, and the padding up to whole pages.
    assert states["bytes_per_token"] == pytest.approx(2 * 2 * 2 * 16 * 4, rel=0.1)
    assert states["file_bytes"] > states["states_bytes"]
    kinds = [(row["kind"], row["prompts"]) for row in section.rows if "prompts" in row]
    assert kinds == [("one process", 0), ("one process", 1), ("one process", 2), ("processes", 2)]
    two, both = section.row("onnx/one process/2"), section.row("onnx/processes/2")
    assert two is not None
    assert both is not None
    assert both["rss_bytes"] > two["rss_bytes"], "two processes have the model twice"
    assert section.summary["paper_figures_come_out"]
    assert set(section.summary["onnx"]) == {"1", "2"}
    assert "2 prompt(s) at once" in "\n".join(memory.findings(section.summary))


def test_processes_that_would_not_fit_are_not_started(
    tiny_model: Path, tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    section = report.section("memory", {})
    one = {"kind": "one process", "backend": "onnx", "prompts": 1, "private_dirty_bytes": 1 << 20}
    section.add("onnx/one process/1", one)
    memory._measure_processes(section, "onnx", {}, 16)
    row = section.row("onnx/processes/16")
    assert row is not None
    assert "memory" in row["skipped"]


def test_encoding_is_timed_from_nothing(tiny_model: Path, tmp_path: Path, report: Report) -> None:
    settings = encode.EncodeSettings(lengths=(64,), modules=(1, 2), repeats=2)
    section = encode.run_encode(report, _options(tiny_model, tmp_path), settings)
    ways = [(row["way"], row["modules"]) for row in section.rows]
    assert ways == [(way, modules) for modules in (1, 2) for way in ("encode", "write", "prefill")]
    assert all(len(row["samples_ms"]["total"]) == 2 for row in section.rows)
    found = section.summary["onnx"]["64 tokens, 2 module(s)"]
    assert found["speed_ratio"] > 0
    assert found["write_share"] > 0
    assert len(encode.findings(section.summary)) == 2
    rows = len(section.rows)
    encode.run_encode(report, _options(tiny_model, tmp_path), settings)
    assert len(report.sections["encode"].rows) == rows
