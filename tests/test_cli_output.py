"""What commands show: tables on any width, progress with and without a terminal, colours, JSON."""

from __future__ import annotations

import json
import re
import sys

import pytest

from edge_pc.cli import main
from edge_pc.cli.options import OutputOptions
from edge_pc.cli.output import Output
from edge_pc.progress import Progress

ROWS = [("c2e28db8b763", "trip", "plan/oslo", 1569, "36.6 KiB"), ("[red]", "trip", None, 7, "1 B")]
COLUMNS = ["key", "schema", "module", ">tokens", ">size"]


def make_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """From here on stdout is a terminal that knows colours."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm-256color", "LINES": "40", "COLUMNS": columns}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def output(*, quiet: bool = False, verbose: int = 0, clock: list[float] | None = None) -> Output:
    options = OutputOptions(quiet=quiet, verbose=verbose)
    return Output(options) if clock is None else Output(options, lambda: clock[0])


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_table_is_one_line_a_row_where_it_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_terminal(monkeypatch, "60")
    output().table(COLUMNS, ROWS)
    assert plain(capsys.readouterr().out).splitlines() == [
        "key           schema  module     tokens      size",
        "c2e28db8b763  trip    plan/oslo    1569  36.6 KiB",
        "[red]         trip                    7       1 B",
    ]


@pytest.mark.parametrize("width", ["40", "30"])
def test_a_terminal_too_narrow_for_the_words_gets_a_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    make_terminal(monkeypatch, width)
    output().table(COLUMNS, ROWS)
    assert [line.rstrip() for line in plain(capsys.readouterr().out).splitlines()] == [
        "key     c2e28db8b763", "schema  trip", "module  plan/oslo", "tokens  1569", "size    36.6 KiB",
        "",
        "key     [red]", "schema  trip", "module", "tokens  7", "size    1 B",
    ]  # fmt: skip


def test_a_table_in_a_pipe_is_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/".join(["long"] * 100)
    output().table(["file", "problem"], [(path, "truncated")])
    assert capsys.readouterr().out.splitlines()[1] == f"{path}  truncated"


@pytest.mark.parametrize("no_color", [False, True])
def test_doctor_has_colours_unless_they_are_not_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    make_terminal(monkeypatch, "100")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert ("\x1b[32mok" in shown) is not no_color
    assert "backend onnx" in shown


def test_without_a_terminal_long_work_says_how_far_it_is_every_few_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = [100.0]
    with output(clock=clock).progress("encoding") as update:
        for second in range(13):
            clock[0] = 100 + second
            update(Progress(second * 100, 1200, "plan/oslo"))
    assert capsys.readouterr().err == "encoding: plan/oslo, 41 %\nencoding: plan/oslo, 83 %\n"


def test_short_work_says_nothing_and_quiet_work_never(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    with output(clock=clock).progress("encoding") as update:
        clock[0] = 4.9
        update(Progress(1, 2, "plan"))
    with output(clock=clock, quiet=True).progress("encoding") as update:
        clock[0] = 1000
        update(Progress(1, 2, "plan"))
    assert capsys.readouterr().err == ""


def test_verbose_work_names_each_thing(capsys: pytest.CaptureFixture[str]) -> None:
    with output(verbose=1, clock=[0.0]).progress("encoding") as update:
        for done, text in enumerate(["plan", "plan", "plan/oslo"]):
            update(Progress(done, 0, text))
    assert capsys.readouterr().err == "encoding: plan\nencoding: plan/oslo\n"


def test_json_never_holds_what_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    output().json({"a": float("inf"), "b": [1.5, (float("nan"),)], "c": {"d": float("-inf")}, "e": "Straße"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": None, "b": [1.5, [None]], "c": {"d": None}, "e": "Straße",
    }  # fmt: skip
