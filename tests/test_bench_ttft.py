"""`bench ttft`: which points are measured, what an interruption costs, and the real ways on the tiny model."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import bench_tools
import numpy as np
import pytest
from bench_tools import SMALL, StubWays, points

from benchmarks.benches import EXPERIMENTS
from edge_pc.bench import pagecache, ttft_tables
from edge_pc.bench.baseline import best_of, thread_counts
from edge_pc.bench.report import Report, Section
from edge_pc.bench.rows import BaselineRow, TtftRow
from edge_pc.bench.texts import OWN_TEXT, Shape, Texts
from edge_pc.bench.ttft import Settings, axes
from edge_pc.bench.ways import EngineWays
from edge_pc.bench.work import BenchOptions, states_folder
from edge_pc.engine import Engine
from edge_pc.models.tokenizer import Tokenizer

TINY = Settings(
    lengths=(16, 64), new_tokens=(1, 8), shares=(0, 100), modules=(1, 2), base_cached=64, base_new=8, repeats=2,
    cold_repeats=1, budget_s=0.1, least_repeats=1, search_tokens=32, search_repeats=1,
)  # fmt: skip


def _section(path: Path) -> Section[TtftRow]:
    return bench_tools.new_section(bench_tools.new_report(path), TtftRow)


def test_axes_vary_one_thing_at_a_time() -> None:
    found = axes(Settings(), 8192)
    assert [shape.cached for shape in found["length"]] == [16, 32, 64, 128, 512, 1024, 2048, 4096, 8000]
    assert {shape.new for shape in found["length"]} == {32}
    assert [shape.new for shape in found["new"]] == [1, 8, 32, 128]
    assert [shape.cached for shape in found["share"]] == [0, 1024, 2048, 3072, 3686, 4096]
    assert {shape.tokens for shape in found["share"]} == {4096}
    assert [shape.modules for shape in found["modules"]] == [1, 4, 16]


def test_what_the_model_cannot_take_is_capped_once() -> None:
    found = axes(Settings(), 1024)
    longest = max(shape.tokens for shapes in found.values() for shape in shapes)
    assert longest + 8 < 1024
    assert len(found["length"]) == len(set(found["length"])) == 6


@pytest.mark.parametrize("modules", [1, 3, 16])
def test_modules_share_the_cached_tokens(modules: int) -> None:
    sizes = Shape(100, 1, modules).sizes()
    assert sum(sizes) == 100
    assert max(sizes) - min(sizes) <= 1


def test_every_point_has_its_ways_and_full_prefill_fewer_samples(tmp_path: Path) -> None:
    section = _section(tmp_path / "r.json")
    points(section, "onnx", StubWays()).measure()
    rows = {row.key: row for row in section.rows}
    full = rows["onnx/cached=8000/new=32/modules=1/warm/full"]
    cached = rows["onnx/cached=8000/new=32/modules=1/warm/cached"]
    assert len(full.samples_ms["ttft"]) == 2
    assert len(cached.samples_ms["ttft"]) == SMALL.repeats
    assert cached.axes == ("length",)
    assert [row.point[::2] for row in section.rows if row.way == "encode"].count((8000, 1)) == 1
    assert rows["onnx/cached=4096/new=32/modules=1/warm/cached"].axes == ("length", "new", "modules")


@pytest.mark.parametrize("after", [0, 5, 40, 90])
def test_an_interrupted_bench_goes_on_where_it_stopped(tmp_path: Path, after: int) -> None:
    whole = _section(tmp_path / "whole.json")
    points(whole, "onnx", StubWays()).measure()
    section = _section(tmp_path / "r.json")
    with pytest.raises(KeyboardInterrupt):
        points(section, "onnx", StubWays(interrupt_after=after)).measure()
    resumed = Section(Report.load(tmp_path / "r.json"), "ttft", TtftRow)
    measured = [row.key for row in resumed.rows]
    points(resumed, "onnx", StubWays()).measure()

    def ways(section: Section[TtftRow]) -> set[str]:
        return {row.key for row in section.rows if row.way != "encode"}  # encoded again where it went on

    kept = [row.key for row in resumed.rows if row.key in measured]
    assert kept == [key for key in measured if key in kept]
    assert ways(resumed) == ways(whole)
    again = StubWays()
    points(resumed, "onnx", again).measure()
    assert again.calls == []


def test_the_tables_say_what_the_made_up_machine_does(tmp_path: Path) -> None:
    report = bench_tools.made_up_report(tmp_path / "r.json")
    onnx, llamacpp, between, stages, worse = report.tables("ttft")
    full, cached = 8032 + 8032**2 / 10_000, 20 + 80 + 32 + 1
    columns = [name for name, _ in onnx.headings]
    by_length = {row[0]: dict(zip(columns, row, strict=True)) for row in onnx.rows}
    assert by_length["8000"]["speed-up"] == f"{full / cached:.2f} ×"
    assert by_length["8000"]["reuse / limit"] == f"{1 / 0.95:.2f} ×"
    assert by_length["16"]["break-even uses"] == "never"
    assert by_length["8000"]["break-even uses"] == "2"
    # At 16 cached tokens reuse takes 69.16 ms, full prefill 48.23 ms.
    found = re.search(r"from about (\d+) cached tokens on", onnx.note)
    assert found is not None
    assert 16 < int(found[1]) < 1024
    powers = re.findall(r"of (\d\.\d\d) \(", onnx.note)
    assert float(powers[0]) < 0.7
    assert 1.2 < float(powers[1]) < 2
    assert dict(between.rows)["4096"] == "0.50"
    assert ("16", "32") in [row[1:3] for row in worse.rows]
    assert ("0", "4096") not in [row[1:3] for row in worse.rows]
    assert worse.worse
    assert not onnx.worse
    assert "cold" in [row[4] for row in stages.rows]
    assert llamacpp.title.startswith("llama.cpp")


def test_cold_pages_that_stayed_in_memory_are_said(tmp_path: Path) -> None:
    rows = bench_tools.made_up_report(tmp_path / "r.json").rows("ttft", TtftRow)
    kept = [replace(row, resident_share=0.9) if row.pages == "cold" else row for row in rows]
    stages = ttft_tables.tables(kept)[-2]
    assert {row[4] for row in stages.rows} == {"warm", "cold: 90% stayed in memory"}


def _tried(threads: int, chunk: int, ms: float) -> BaselineRow:
    settings = {"threads": threads, "chunk_tokens": chunk}
    return BaselineRow(key="", backend="onnx", settings=settings, tokens=100, samples_ms={"forward": (ms,)})


def test_the_search_keeps_the_engines_own_unless_others_are_clearly_faster() -> None:
    own, halved = _tried(4, 256, 100.0), _tried(2, 256, 99.0)
    assert best_of([own, halved]).settings == own.settings
    assert best_of([own, _tried(4, 512, 99.0)]).own
    found = best_of([own, halved, _tried(4, 512, 90.0)])
    assert (found.settings["chunk_tokens"], found.own, found.ms_per_token) == (512, False, 0.9)
    # The number of threads comes first, and everything else is set against it.
    faster = [own, _tried(2, 256, 50.0), _tried(2, 512, 49.5)]
    assert best_of(faster).settings == {"threads": 2, "chunk_tokens": 256}
    assert best_of(faster).own


def test_threads_to_try() -> None:
    assert thread_counts(None, 8) == [8, 4]
    assert thread_counts(None, 1) == [1]
    assert thread_counts(3, 8) == [3]


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_text_has_exactly_as_many_tokens_as_wanted(tiny_model: Path, tokens: int) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    texts = Texts(tokenizer)
    assert len(tokenizer.encode(texts.text(tokens, 1))) == tokens
    assert texts.text(tokens, 1) == texts.text(tokens, 1)


@pytest.mark.parametrize("shape", [Shape(64, 8, 3), Shape(0, 8), Shape(64, 0), Shape(5, 1, 2)])
def test_cases_have_their_shape(tiny_model: Path, tmp_path: Path, shape: Shape) -> None:
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        ways = EngineWays(engine)
        prepared = ways.prepare(Texts(engine.tokenizer).case(shape))
    assert len(prepared.token_ids) == shape.tokens
    assert prepared.cached_tokens + prepared.computed_tokens == shape.tokens
    assert prepared.computed_tokens == max(1, shape.new)
    assert len(prepared.files) == (shape.modules if shape.cached else 0)


def test_the_ways_of_an_engine_compute_the_same_prompt(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        ways = EngineWays(engine)
        case = Texts(engine.tokenizer).case(Shape(64, 8))
        ways.prepare(case)
        samples = {name: way() for name, way in ways.ways(case).items()}
    assert list(samples) == ["cached", "again", "in_place", "full"], "full comes last: it says that a point is whole"
    for sample in samples.values():
        assert sample["forward"] > 0
        assert sample["ttft"] >= sample["forward"]


def test_full_prefill_at_other_settings_gets_the_prompts_tokens(tiny_model: Path, tmp_path: Path) -> None:
    seen = []

    def full(token_ids: np.ndarray) -> np.ndarray:
        seen.append(token_ids)
        return np.zeros(4, dtype=np.float32)

    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        ways = EngineWays(engine, full)
        texts = Texts(engine.tokenizer)
        case = texts.case(Shape(20, 4))
        ways.prepare(case)
        ways.ways(case)["full"]()
        assert seen[0].tolist() == [*texts.token_ids(20, 0), *texts.token_ids(4, OWN_TEXT)]


@pytest.mark.skipif(not pagecache.can_drop(), reason="this system cannot drop pages")
def test_pages_of_states_are_really_dropped(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        ways = EngineWays(engine)
        case = Texts(engine.tokenizer).case(Shape(512, 8))
        prepared = ways.prepare(case)
        assert pagecache.resident_share(prepared.files) == 1
        ways.release()
        pagecache.drop(prepared.files)
        if pagecache.resident_share(prepared.files) == 1:
            pytest.skip("this file system keeps all files in memory")
        _, resident = ways.cold(case, prepared.files)
    assert resident < 0.05, "a mapping kept pages in memory"


def test_states_that_vanish_are_not_measured_as_reuse(tiny_model: Path, tmp_path: Path) -> None:
    from edge_pc.errors import CacheMissError

    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        ways = EngineWays(engine)
        case = Texts(engine.tokenizer).case(Shape(64, 8))
        prepared = ways.prepare(case)
        cached = ways.ways(case)["cached"]
        for file in prepared.files:
            os.unlink(file)
        with pytest.raises(CacheMissError, match="not found"):
            cached()


def test_states_lie_apart_and_go_at_the_end(home: Path) -> None:
    with states_folder(BenchOptions()) as folder:
        assert folder.parent == home
        (folder / "x").mkdir()
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), states_folder(BenchOptions()) as folder:
        raise KeyboardInterrupt
    assert folder.exists(), "an interrupted bench goes on with them"


def test_two_benches_at_once_would_measure_each_other(home: Path) -> None:
    from edge_pc.errors import OptionError

    with states_folder(BenchOptions()) as folder:
        (folder / "x").mkdir()
        with pytest.raises(OptionError, match="another bench"), states_folder(BenchOptions()):
            pass
        assert (folder / "x").exists()


def test_a_folder_of_ones_own_is_kept(tmp_path: Path) -> None:
    with states_folder(BenchOptions(cache_dir=tmp_path / "mine")) as folder:
        pass
    assert folder.exists()


@pytest.mark.parametrize("backend", ["onnx", "llamacpp"])
def test_the_whole_bench_on_a_tiny_model(backend: str, tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    if backend == "llamacpp" and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    options = BenchOptions(str(tiny_model), tiny_gguf, (backend,), threads=1, cache_dir=tmp_path / "states")
    report = bench_tools.new_report(tmp_path / "r.json")
    told: list[str] = []
    rows = bench_tools.measured("ttft", report, options, TINY, on_progress=lambda now: told.append(now.text))
    assert {row.way for row in rows} == {"encode", "cached", "again", "in_place", "full"}
    assert told
    lengths = report.tables("ttft")[0]
    assert [row[0] for row in lengths.rows] == ["16", "64"]
    tried = report.rows("baseline", BaselineRow)
    assert len(tried) == 4
    assert [row[-1] for row in report.tables("baseline")[0].rows].count("chosen") == 1
    assert list(report.sections["ttft"]["settings"]["weights"]) == [backend]
    assert bench_tools.measured("ttft", report, options, TINY) == rows, "nothing is measured again"


def test_llama_cpps_own_ways_on_a_tiny_model(tiny_model: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    options = BenchOptions(str(tiny_model), tiny_gguf, ("llamacpp",), threads=1, cache_dir=tmp_path / "states")
    report = bench_tools.new_report(tmp_path / "r.json")
    rows = bench_tools.measured(EXPERIMENTS["prefix"], report, options, TINY, name="prefix")
    ways = ("state_file", "load_state", "ram_cache")
    expected = [(n, flash, way) for n, flash in ((16, False), (64, False), (64, True)) for way in ways]
    assert [(row.cached_tokens, row.flash, row.way) for row in rows] == expected
    assert all(min(row.samples_ms["ttft"]) > 0 for row in rows)
    assert [row[:2] for row in report.tables("prefix")[0].rows] == [("16", "off"), ("64", "off"), ("64", "on")]


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_pc.bench import work
    from edge_pc.errors import MissingDependencyError

    monkeypatch.setattr(work, "find_spec", lambda name: None if name == "llama_cpp" else True)
    assert BenchOptions().chosen_backends() == ["onnx"]
    with pytest.raises(MissingDependencyError, match="llama-cpp-python"):
        BenchOptions(backends=("llamacpp",)).chosen_backends()
