"""The report: saved row by row, resumed, whole at any moment, and as docs/bench.md describes it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import bench_tools
import numpy as np
import pytest

from benchmarks.benches import EXPERIMENTS
from benchmarks.rows import AccuracyRow, Agreement, Compared, Parting, ScoredAnswer
from edge_pc.backends import entry
from edge_pc.bench import facts
from edge_pc.bench.benches import BENCHES
from edge_pc.bench.plain import from_plain, to_plain
from edge_pc.bench.report import Report, Section, command_text
from edge_pc.bench.rows import BaselineRow, Row
from edge_pc.bench.tables import Table
from edge_pc.errors import OptionError

DOC = Path(__file__).resolve().parent.parent / "docs" / "bench.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Row):
    ms: float = 0.0
    lengths: tuple[int, ...] = ()


def _new(path: Path) -> Report:
    return bench_tools.new_report(path)


def _section(report: Report, **settings: Any) -> Section[Measured]:
    return bench_tools.new_section(report, Measured, **settings)


def test_a_row_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    section = _section(_new(tmp_path / "r.json"), repeats=3)
    section.add(Measured(key="a", ms=np.float32(1.5), lengths=tuple(np.arange(2))))
    found = Report.load(tmp_path / "r.json")
    assert found.rows("ttft", Measured) == [Measured(key="a", ms=1.5, lengths=(0, 1))]
    assert found.sections["ttft"]["rows"] == [{"key": "a", "ms": 1.5, "lengths": [0, 1]}]
    assert section.row("a") is not None
    assert section.row("b") is None


def test_a_row_of_the_same_key_is_replaced(tmp_path: Path) -> None:
    section = _section(_new(tmp_path / "r.json"))
    section.add(Measured(key="a", ms=1))
    section.add(Measured(key="a", ms=2))
    assert Report.load(tmp_path / "r.json").rows("ttft", Measured) == section.rows == [Measured(key="a", ms=2)]


def test_a_section_goes_on_with_its_rows(tmp_path: Path) -> None:
    _section(_new(tmp_path / "r.json"), lengths=(1, 2)).add(Measured(key="a"))
    resumed = Report.load(tmp_path / "r.json")
    resumed.check_same(machine=bench_tools.MACHINE, settings=bench_tools.MODEL)
    assert _section(resumed, lengths=(1, 2)).row("a")
    assert not resumed.section("ttft", Measured, "", {"lengths": (1, 2)}, restart=True).rows


def test_a_report_holds_sections_of_benches_that_nobody_here_knows(tmp_path: Path) -> None:
    """What a page needs of them are their tables."""
    table = Table("Weather", ("place", "> degrees"), (("Oslo", "3"),), "Cold.", worse=True)
    section = _new(tmp_path / "r.json").section("weather", Measured, "Weather", {}, about="What it was like.")
    section.show([table])
    found = Report.load(tmp_path / "r.json")
    assert found.tables("weather") == [table]
    assert (found.sections["weather"]["title"], found.sections["weather"]["about"]) == ("Weather", "What it was like.")


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    report = _new(tmp_path / "r.json")
    _section(report).add(Measured(key="a", ms=1))
    with pytest.raises(OptionError, match="rows of section ttft cannot be read"):
        report.rows("ttft", AccuracyRow)


def test_dataclasses_within_dataclasses_come_back(tmp_path: Path) -> None:
    parting = Parting(1, "a", "b", (0.5, 0.25), (0.25, 0.5))
    answer = ScoredAnswer("x", {"f1": 0.5})
    agreement = Agreement(0.1, True, 3, 4, 0.5, gold_full=-1.0)
    compared = Compared("f1", 2, 10, 5, 0, answer, answer, agreement, parting)
    row = AccuracyRow(key="d/1", dataset="d", question="?", right=("r", "s"), compared=compared)
    plain = to_plain(row)
    assert json.loads(json.dumps(plain)) == plain
    assert "skipped" not in plain, "defaults are left out"
    assert from_plain(AccuracyRow, plain) == row


def test_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    report = _new(tmp_path / "r.json")
    _section(report, repeats=3).add(Measured(key="a"))
    with pytest.raises(OptionError, match=r"repeats was 3, now 5"):
        _section(report, repeats=5)
    assert report.section("ttft", Measured, "", {"repeats": 5}, restart=True).rows == []


@pytest.mark.parametrize("field", ["cpu", "allowed_cores", "system", "versions"])
def test_rows_of_another_machine_are_not_mixed(tmp_path: Path, field: str) -> None:
    report = _new(tmp_path / "r.json")
    with pytest.raises(OptionError, match=f"another {field}"):
        report.check_same(machine={**bench_tools.MACHINE, field: "x"}, settings=bench_tools.MODEL)


@pytest.mark.parametrize("changes", [{"governor": "performance"}, {"system": "Linux 7"}])
def test_the_governor_and_the_release_of_the_system_may_differ(tmp_path: Path, changes: dict[str, Any]) -> None:
    _new(tmp_path / "r.json").check_same(machine=bench_tools.MACHINE | changes, settings=bench_tools.MODEL)


def test_rows_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="another model"):
        _new(tmp_path / "r.json").check_same(machine=bench_tools.MACHINE, settings={"model": {"name": "other"}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a report"),
        ('{"format": 1}', "not a report"),
        ('{"format": 99, "machine": {}, "settings": {}, "sections": {}}', "format 99"),
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
    section = _section(_new(tmp_path / "r.json"))
    section.add(Measured(key="a"))
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            section.add(Measured(key="b"))
    assert [row.key for row in Report.load(tmp_path / "r.json").rows("ttft", Measured)] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "no partial file is left"


def test_numbers_that_json_lacks_are_faults(tmp_path: Path) -> None:
    section = _section(_new(tmp_path / "r.json"))
    with pytest.raises(ValueError, match="JSON"):
        section.add(Measured(key="a", ms=float("nan")))
    assert Report.load(tmp_path / "r.json").rows("ttft", Measured) == []
    section.add(Measured(key="a", ms=1.0))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        _new(tmp_path / "file" / "r.json")


def test_commands_are_kept_without_folders() -> None:
    home = str(Path("/home") / "somebody")
    assert command_text(["edge-pc", "bench", "-o", f"{home}/r.json"]) == "edge-pc bench -o r.json"
    assert command_text([f"--report={home}/r.json"]) == "--report=r.json"


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="file names are Unicode there")
def test_a_report_whose_name_is_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/y\xff.json"))
    Report.create(path, command=["edge-pc", "bench", "ttft", "-o", str(path)], machine={}, settings={})
    assert Report.load(path).data["command"] == "edge-pc bench ttft -o y\\udcff.json"


def _documented(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of docs/bench.md."""
    text = DOC.read_text(encoding="utf-8").split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    return set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE))))


def _fields(kind: Any) -> set[str]:
    """The fields of a row, and of the dataclasses within it."""
    names = set()
    for field in fields(kind):
        names.add(field.name)
        inner = [hint for hint in (get_type_hints(kind)[field.name],) for hint in (hint, *get_args(hint))]
        names |= {name for hint in inner if is_dataclass(hint) for name in _fields(hint)}
    return names


def test_the_documented_fields_of_a_report_are_those_that_are_written(tmp_path: Path) -> None:
    data = json.loads(bench_tools.made_up_report(tmp_path / "r.json").path.read_text(encoding="utf-8"))
    assert set(data) == _documented("The report")
    assert set(data["sections"]["ttft"]) == _documented("A section")


@pytest.mark.parametrize("name", [*BENCHES, "baseline", *EXPERIMENTS])
def test_the_fields_of_rows_are_documented(name: str) -> None:
    kind = BaselineRow if name == "baseline" else {**BENCHES, **EXPERIMENTS}[name].load().row
    assert _documented(f"Rows of `{name}`") == _fields(kind)


def test_the_machines_fields_are_documented() -> None:
    found = facts.machine_facts()
    assert set(found) == _documented("The machine") == set(bench_tools.MACHINE)
    assert platform.node() not in json.dumps(found) or len(platform.node()) < 4


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
    assert kernel in entry("onnx").load_baseline().kernels(sets)
