"""The report: saved row by row, resumed, whole at any moment, and as docs/bench.md describes it."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_tools
import numpy as np
import pytest

from edge_pc.bench import machine
from edge_pc.bench.rates import measure_rates
from edge_pc.bench.report import Report, command_text
from edge_pc.errors import OptionError

DOC = Path(__file__).resolve().parent.parent / "docs" / "bench.md"


def _new(path: Path) -> Report:
    return Report.create(path, command=["edge-pc"], machine=bench_tools.MACHINE, settings=bench_tools.MODEL)


def test_a_row_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    section = _new(tmp_path / "r.json").section("ttft", {"repeats": 3})
    section.add("a", {"ms": np.float32(1.5), "list": np.arange(2)})
    found = Report.load(tmp_path / "r.json").sections["ttft"]
    assert found.rows == [{"key": "a", "ms": 1.5, "list": [0, 1]}]
    assert found.row_done("a")
    assert not found.row_done("b")
    assert found.row("b") is None


def test_a_row_of_the_same_key_is_replaced(tmp_path: Path) -> None:
    section = _new(tmp_path / "r.json").section("ttft", {})
    section.add("a", {"ms": 1})
    section.add("a", {"ms": 2})
    assert Report.load(tmp_path / "r.json").sections["ttft"].rows == [{"key": "a", "ms": 2}]


def test_a_section_goes_on_with_its_rows(tmp_path: Path) -> None:
    _new(tmp_path / "r.json").section("ttft", {"lengths": (1, 2)}).add("a", {})
    resumed = Report.resume(tmp_path / "r.json", machine=bench_tools.MACHINE, settings=bench_tools.MODEL)
    assert resumed.section("ttft", {"lengths": (1, 2)}).row_done("a")
    assert not resumed.section("ttft", {"lengths": (1, 2)}, restart=True).row_done("a")


def test_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    report = _new(tmp_path / "r.json")
    report.section("ttft", {"repeats": 3}).add("a", {})
    with pytest.raises(OptionError, match=r"repeats was 3, now 5"):
        report.section("ttft", {"repeats": 5})
    assert report.section("ttft", {"repeats": 5}, restart=True).rows == []


@pytest.mark.parametrize("field", ["cpu", "allowed_cores", "system", "versions"])
def test_rows_of_another_machine_are_not_mixed(tmp_path: Path, field: str) -> None:
    _new(tmp_path / "r.json")
    with pytest.raises(OptionError, match=f"another {field}"):
        Report.resume(tmp_path / "r.json", machine={**bench_tools.MACHINE, field: "x"}, settings=bench_tools.MODEL)


@pytest.mark.parametrize("changes", [{"rates": {}}, {"system": "Linux 7"}])
def test_measured_rates_and_the_release_of_the_system_may_differ(tmp_path: Path, changes: dict[str, Any]) -> None:
    _new(tmp_path / "r.json")
    Report.resume(tmp_path / "r.json", machine=bench_tools.MACHINE | changes, settings=bench_tools.MODEL)


def test_rows_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    _new(tmp_path / "r.json")
    with pytest.raises(OptionError, match="another model"):
        Report.resume(tmp_path / "r.json", machine=bench_tools.MACHINE, settings={"model": {"name": "other"}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a report"),
        ('{"format": 1}', "not a report"),
        ('{"format": 99, "machine": {}, "sections": {}}', "format 99"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "r.json").write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        Report.load(tmp_path / "r.json")


def test_a_missing_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        Report.load(tmp_path / "none.json")


def test_an_interruption_while_saving_leaves_the_report_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = _new(tmp_path / "r.json").section("ttft", {})
    section.add("a", {})
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            section.add("b", {})
    assert [row["key"] for row in Report.load(tmp_path / "r.json").sections["ttft"].rows] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "no partial file is left"


def test_numbers_that_json_lacks_are_faults(tmp_path: Path) -> None:
    section = _new(tmp_path / "r.json").section("ttft", {})
    with pytest.raises(ValueError, match="JSON"):
        section.add("a", {"ms": float("nan")})
    assert Report.load(tmp_path / "r.json").sections["ttft"].rows == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        _new(tmp_path / "file" / "r.json")


def test_commands_are_kept_without_folders() -> None:
    home = str(Path("/home") / "somebody")
    assert command_text(["edge-pc", "bench", "-o", f"{home}/r.json"]) == "edge-pc bench -o r.json"
    assert command_text([f"--report={home}/r.json"]) == "--report=r.json"


def _documented(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of docs/bench.md."""
    text = DOC.read_text(encoding="utf-8").split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))


def _all(rows: list[dict[str, Any]]) -> set[str]:
    return {name for row in rows for name in row}


def test_the_documented_fields_are_those_that_are_written(tmp_path: Path) -> None:
    data = json.loads(bench_tools.made_up_report(tmp_path / "r.json").path.read_text(encoding="utf-8"))
    assert set(data) == _documented("The report")
    section = data["sections"]["ttft"]
    assert set(section) == _documented("A section")
    written = _all([row for row in section["rows"] if row["way"] != "baseline"])
    extra = {"flash"}  # only of llama.cpp's own ways, which the made-up machine has not
    assert _documented("Rows of `ttft`") == written | extra | {"own"}


def test_the_machines_fields_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    few = measure_rates(memory_bytes=64 << 20)
    assert min(asdict(few).values()) > 0
    monkeypatch.setattr(machine, "measure_rates", lambda memory_bytes: few)
    facts = machine.machine_facts()
    assert set(facts) == _documented("The machine") == set(bench_tools.MACHINE)
    assert set(facts["rates"]) == set(bench_tools.MACHINE["rates"])
    assert platform.node() not in json.dumps(facts) or len(platform.node()) < 4


@pytest.mark.parametrize(
    ("sets", "kernel"),
    [
        (["AVX2", "FMA", "AVX512F", "AVX512BW", "AVX512-VNNI"], "AVX512-VNNI"),
        (["AVX2", "FMA", "AVX-VNNI"], "AVX2-VNNI"),
        (["AVX2", "FMA"], "8-bit blocks: AVX2;"),
        (["NEON", "DOTPROD"], "NEON DOTPROD"),
        ([], "no vector kernel known"),
    ],
)
def test_kernels_of_onnx_runtime_follow_from_the_flags(sets: list[str], kernel: str) -> None:
    assert kernel in machine.onnx_kernels(sets)
