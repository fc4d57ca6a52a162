"""`bench ttft`: which points are measured, what an interruption costs, and the real ways on the tiny model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import bench_tools
import numpy as np
import pytest
from bench_tools import POSITIONS, SMALL, PlainTexts, StubSubject

from edge_pc.bench import pagecache
from edge_pc.bench.report import Report, Section
from edge_pc.bench.run_ttft import run_ttft
from edge_pc.bench.search import best_of, thread_counts
from edge_pc.bench.setup import BenchOptions, chosen_backends, states_folder
from edge_pc.bench.subject import EngineSubject
from edge_pc.bench.texts import Shape, Texts
from edge_pc.bench.ttft import TtftSettings, axes, measure
from edge_pc.bench.ttft_summary import findings, summarize
from edge_pc.engine import Engine
from edge_pc.models.tokenizer import Tokenizer

TINY = TtftSettings(
    lengths=(16, 64), new_tokens=(1, 8), shares=(0, 100), modules=(1, 2), base_cached=64, base_new=8, repeats=2,
    cold_repeats=1, budget_s=0.1, least_repeats=1, search_tokens=32, search_repeats=1,
)  # fmt: skip


def _section(path: Path) -> Section:
    report = Report.create(path, command=["edge-pc"], machine=bench_tools.MACHINE, settings=bench_tools.MODEL)
    return report.section("ttft", SMALL.as_dict() | {"backends": bench_tools.BACKENDS})


def _measure(section: Section, subject: StubSubject) -> None:
    measure(
        section, "onnx", subject, PlainTexts(), SMALL, max_positions=POSITIONS, full_ms_per_token=1.0  # type: ignore[arg-type]
    )  # fmt: skip


def test_axes_vary_one_thing_at_a_time() -> None:
    found = axes(TtftSettings(), 8192)
    assert [shape.cached for shape in found["length"]] == [16, 32, 64, 128, 512, 1024, 2048, 4096, 8000]
    assert {shape.new for shape in found["length"]} == {32}
    assert [shape.new for shape in found["new"]] == [1, 8, 32, 128]
    assert [shape.cached for shape in found["share"]] == [0, 1024, 2048, 3072, 3686, 4096]
    assert {shape.tokens for shape in found["share"]} == {4096}
    assert [shape.modules for shape in found["modules"]] == [1, 4, 16]


def test_what_the_model_cannot_take_is_capped_once() -> None:
    found = axes(TtftSettings(), 1024)
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
    _measure(section, StubSubject())
    full = section.row("onnx/cached=8000/new=32/modules=1/warm/full")
    cached = section.row("onnx/cached=8000/new=32/modules=1/warm/cached")
    assert full is not None
    assert cached is not None
    assert len(full["samples_ms"]["ttft"]) == 2
    assert len(cached["samples_ms"]["ttft"]) == SMALL.repeats
    assert cached["axes"] == ["length"]
    assert section.row("onnx/cached=8000/modules=1/encode")
    base = section.row("onnx/cached=4096/new=32/modules=1/warm/cached")
    assert base is not None
    assert base["axes"] == ["length", "new", "modules"]


@pytest.mark.parametrize("after", [0, 5, 40, 90])
def test_an_interrupted_bench_goes_on_where_it_stopped(tmp_path: Path, after: int) -> None:
    whole = _section(tmp_path / "whole.json")
    _measure(whole, StubSubject())
    section = _section(tmp_path / "r.json")
    with pytest.raises(KeyboardInterrupt):
        _measure(section, StubSubject(interrupt_after=after))
    resumed = Report.load(tmp_path / "r.json").sections["ttft"]
    measured = [row["key"] for row in resumed.rows]
    subject = StubSubject()
    _measure(resumed, subject)
    assert [row["key"] for row in resumed.rows[: len(measured)]] == measured, "nothing is measured twice"
    assert {row["key"] for row in resumed.rows} == {row["key"] for row in whole.rows}
    again = StubSubject()
    _measure(resumed, again)
    assert again.calls == []


def test_the_summary_says_what_the_made_up_machine_does(tmp_path: Path) -> None:
    report = bench_tools.made_up_report(tmp_path / "r.json")
    summary = report.sections["ttft"].summary
    onnx = summary["onnx"]
    full, cached = 8032 + 8032**2 / 10_000, 20 + 80 + 32 + 1
    assert onnx["speed_up"]["8000"] == pytest.approx(full / cached, abs=0.01)
    assert onnx["to_limit"]["8000"] == pytest.approx(1 / 0.95, abs=0.001)
    assert onnx["growth"]["cached"]["exponent"] < 0.7
    assert 1.2 < onnx["growth"]["full"]["exponent"] < 2
    # At 16 cached tokens reuse takes 53.16 ms, full prefill 48.23 ms.
    assert 16 < onnx["break_even"]["tokens"] < 1024
    assert onnx["uses_to_pay"]["16"] is None
    assert onnx["uses_to_pay"]["8000"] == 2
    assert summary["cached_ttft_ratio"]["ratios"]["4096"] == 0.5
    worse = [(point["cached_tokens"], point["new_tokens"]) for point in onnx["where_worse"]]
    assert (16, 32) in worse
    assert (0, 4096) not in worse


def test_the_summary_in_words(tmp_path: Path) -> None:
    text = "\n".join(findings(bench_tools.made_up_report(tmp_path / "r.json").sections["ttft"].summary))
    assert "reuse pays from about" in text
    assert "never at 16" in text
    assert "2 at 8000" in text
    assert "length^" in text


def test_cold_pages_that_stayed_in_memory_are_said(tmp_path: Path) -> None:
    section = bench_tools.made_up_report(tmp_path / "r.json").sections["ttft"]
    for row in section.rows:
        if row.get("pages") == "cold":
            row["resident_share"] = 0.9
    assert "90% of the pages stayed in memory" in "\n".join(findings(summarize(section.rows)))


def test_the_search_keeps_the_engines_own_unless_others_are_clearly_faster(tmp_path: Path) -> None:
    section = _section(tmp_path / "r.json")

    def search(name: str, times: dict[str, float]) -> dict[str, object]:
        candidates = {key: ({"name": key}, lambda ms=ms: {"forward": ms}) for key, ms in times.items()}  # type: ignore[misc]
        return best_of(section, name, candidates, 100, 2).settings  # type: ignore[arg-type]

    assert search("a", {"own": 100.0, "other": 99.0}) == {"name": "own"}
    assert search("b", {"own": 100.0, "other": 90.0}) == {"name": "other"}
    row = section.row("b/search/other")
    assert row is not None
    assert row["samples_ms"] == {"forward": [90.0, 90.0]}
    assert search("b", {"own": 1.0, "other": 90.0}) == {"name": "other"}, "rows that are there are not measured again"


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
        subject = EngineSubject(engine)
        prepared = subject.prepare(Texts(engine.tokenizer).case(shape))
    assert len(prepared.token_ids) == shape.tokens
    assert prepared.cached_tokens + prepared.computed_tokens == shape.tokens
    assert prepared.computed_tokens == max(2, shape.new)
    assert len(prepared.files) == (shape.modules if shape.cached else 0)


def test_the_ways_of_an_engine_compute_the_same_prompt(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        subject = EngineSubject(engine)
        case = Texts(engine.tokenizer).case(Shape(64, 8))
        subject.prepare(case)
        with subject.ways(case) as ways:
            samples = {name: way() for name, way in ways.items()}
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
        subject = EngineSubject(engine, full)
        texts = Texts(engine.tokenizer)
        case = texts.case(Shape(20, 4))
        subject.prepare(case)
        with subject.ways(case) as ways:
            ways["full"]()
        assert seen[0].tolist() == texts.token_ids(Shape(20, 4)).tolist()


@pytest.mark.skipif(not pagecache.can_drop(), reason="this system cannot drop pages")
def test_pages_of_states_are_really_dropped(tiny_model: Path, tmp_path: Path) -> None:
    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        subject = EngineSubject(engine)
        case = Texts(engine.tokenizer).case(Shape(512, 8))
        prepared = subject.prepare(case)
        assert pagecache.resident_share(prepared.files) == 1
        subject.release(case)
        pagecache.drop(prepared.files)
        if pagecache.resident_share(prepared.files) == 1:
            pytest.skip("this file system keeps all files in memory")
        sample = subject.cold(case, prepared.files)
    assert sample["resident"] < pagecache.COLD_SHARE, "a mapping kept pages in memory"


def test_states_that_vanish_are_not_measured_as_reuse(tiny_model: Path, tmp_path: Path) -> None:
    from edge_pc.errors import CacheMissError

    with Engine(tiny_model, cache_dir=tmp_path) as engine:
        subject = EngineSubject(engine)
        case = Texts(engine.tokenizer).case(Shape(64, 8))
        prepared = subject.prepare(case)
        with subject.ways(case) as ways:
            for file in prepared.files:
                os.unlink(file)
            with pytest.raises(CacheMissError, match="not found"):
                ways["cached"]()


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
    report = Report.create(
        tmp_path / "r.json", command=["edge-pc"], machine=bench_tools.MACHINE, settings=bench_tools.MODEL
    )
    told = []
    section = run_ttft(report, options, TINY, lambda done, total, text: told.append(text))
    ways = {row["way"] for row in section.rows}
    expected = {"search", "baseline", "encode", "cached", "again", "in_place", "full"}
    expected |= {"state_file", "load_state", "ram_cache"} if backend == "llamacpp" else set()
    assert ways == expected
    assert list(section.summary[backend]["speed_up"]) == ["16", "64"]
    assert told
    facts = section.settings["backends"][backend]
    # Both files hold the same model: 2 layers of 64 × 64 q and o, 32 × 64 k and v, and three of 96 × 64.
    assert facts["matmul_parameters"] == 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
    before = section.rows.copy()
    run_ttft(report, options, TINY)
    assert len(report.sections["ttft"].rows) == len(before)


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_pc.errors import MissingDependencyError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chosen_backends(BenchOptions()) == ["onnx"]
    with pytest.raises(MissingDependencyError, match="llama-cpp-python"):
        chosen_backends(BenchOptions(backends=("llamacpp",)))
