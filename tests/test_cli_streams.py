"""The command line with a stream that is closed or full, a name that is not UTF-8, memory that is refused: no bugs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edge_pc.cli import main

CLOSED = "error: stdout cannot be written: it is closed\n"
FULL = "error: stdout cannot be written: No space left on device\n"
NOT_UTF8 = os.fsdecode(b"\xff")

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a shell and /dev/full")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trip.xml").write_text('<schema name="trip"><module name="m">Hello.</module></schema>', "utf-8")
    (tmp_path / "notes.txt").write_text("The museum opens at ten.", "utf-8")
    for name, value in {"MODEL": str(tiny_model), "MAX_TOKENS": "2", "THREADS": "1"}.items():
        monkeypatch.setenv(f"EDGE_PC_{name}", value)
    return tmp_path


def shell(folder: Path, arguments: str, redirections: str, *, unbuffered: bool = False) -> tuple[int, str]:
    """(exit code, what came on stderr) of `edge-pc` under a shell that redirects its streams."""
    command = f"{shlex.quote(sys.executable)} -m edge_pc {arguments} {redirections}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    child = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120
    )
    return child.returncode, child.stderr.decode()


WRITING = [
    "--help", "ask --help", "ask Why? notes.txt --json --stats", "run --schema trip.xml --import m --text Why?",
    "schema show trip.xml", "cache info", "completion bash",
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [*((arguments, False) for arguments in WRITING), ("cache info", True)]
)
def test_an_answer_that_cannot_be_written_is_an_error_of_the_environment(
    folder: Path, arguments: str, unbuffered: bool
) -> None:
    code, said = shell(folder, arguments, ">&-", unbuffered=unbuffered)
    assert (code, said.endswith(CLOSED), "fault" in said) == (3, True, False), said
    code, said = shell(folder, arguments, ">/dev/full", unbuffered=unbuffered)
    assert (code, said.endswith(FULL), "fault" in said) == (3, True, False), said


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("ask Why? notes.txt -v --stats --compare", 0),
        ("encode trip.xml", 0),
        ("nonsense", 2),
        ("ask Why? missing.txt", 2),
    ],
)
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_notes_that_cannot_be_written_change_nothing(folder: Path, arguments: str, code: int, redirection: str) -> None:
    assert shell(folder, arguments, f">/dev/null {redirection}") == (code, "")


@pytest.mark.parametrize(
    "arguments",
    ["ask - notes.txt", "run -", "run --schema trip.xml --text -", "encode -", "schema check -", "schema show -"],
)
def test_stdin_that_is_closed_or_never_ends_is_wrong_input(folder: Path, arguments: str) -> None:
    assert shell(folder, arguments, "<&-") == (2, "error: stdin cannot be read: it is closed\n")
    code, said = shell(folder, arguments, "</dev/zero")
    assert (code, said) == (2, "error: stdin has more than 16.0 MiB\nhint: give it only part of the text\n")


def test_a_question_that_nobody_can_answer_removes_nothing(folder: Path) -> None:
    shell(folder, "encode trip.xml", "")
    code, said = shell(folder, "cache rm --all", "<&-")
    assert code == 3
    assert "fault" not in said
    assert shell(folder, "cache rm --all --yes", "")[1].startswith("removed 1 stored encoding, ")


def test_all_streams_closed(folder: Path) -> None:
    assert shell(folder, "ask Why? notes.txt", "<&- >&- 2>&-") == (3, "")
    assert shell(folder, "encode trip.xml", "<&- >&- 2>&-") == (0, "")


def test_a_file_never_takes_the_place_of_a_closed_stderr(folder: Path) -> None:
    """A descriptor that is free goes to the next file opened: what is said would end up in the store's index."""
    assert shell(folder, "encode trip.xml -v", "<&- 2>&-")[0] == 0
    assert shell(folder, "cache verify -q", "") == (0, "")


@pytest.mark.parametrize("arguments", ["--help", "ask --help", "--version", "cache path", "schema show trip.xml"])
def test_a_reader_that_goes_away_at_once_is_no_error(folder: Path, arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "edge_pc", *arguments.split()]
    child = subprocess.run(command, cwd=folder, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (child.returncode, child.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["ask", f"Wh{NOT_UTF8}?", "notes.txt"], "QUESTION"),
        (["ask", "Why?", "notes.txt", "--stop", NOT_UTF8], "--stop"),
        (["run", "--schema", "trip.xml", "--import", f"m{NOT_UTF8}", "--text", "Why?"], "--import"),
        (["run", "--schema", "trip.xml", "--arg", f"m.x={NOT_UTF8}", "--text", "Why?"], "--arg"),
        (["run", "--schema", "trip.xml", "--text", f"Why{NOT_UTF8}?"], "--text"),
        ([NOT_UTF8], "No such command"),
        (["ask", f"--{NOT_UTF8}"], "No such option"),
        (["ask", "Why?", "notes.txt", "--temperature", NOT_UTF8], "--temperature"),
        (["ask", "Why?", f"{NOT_UTF8}.txt"], "cannot be read"),
        (["ask", "Why?", "notes.txt", "--model", f"./{NOT_UTF8}"], "no model"),
        (["encode", f"{NOT_UTF8}.xml"], "cannot be read"),
        (["cache", "rm", f"{NOT_UTF8}abcdef", "--yes"], "no stored states match"),
        (["pull", NOT_UTF8], "no model"),
        (["completion", NOT_UTF8], "is not one of"),
    ],
)
def test_words_that_are_not_utf8_are_wrong_input(
    folder: Path,
    arguments: list[str],
    names: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert names in said
    assert "fault" not in said


def test_a_question_that_is_not_utf8_in_a_process_of_its_own(folder: Path) -> None:
    code, said = shell(folder, "ask \"Wh$(printf '\\377')?\" notes.txt", "")
    assert code == 2
    assert "'QUESTION|-': character 3 is not UTF-8" in said


def test_files_whose_names_are_not_utf8_can_be_used(folder: Path) -> None:
    (folder / "notes.txt").rename(folder / f"notes{NOT_UTF8}.txt")
    (folder / "trip.xml").rename(folder / f"trip{NOT_UTF8}.xml")
    name = "$(printf '\\377')"
    assert shell(folder, f'ask Why? "notes{name}.txt" --stats', "")[0] == 0
    code, said = shell(folder, f'ask Why? "notes{name}.txt" --stats', "")
    assert code == 0
    assert re.search(r"^notes.+\.txt +\d+ +hit$", said, re.MULTILINE)
    assert shell(folder, f'schema check "trip{name}.xml"', "")[0] == 0
    assert shell(folder, f'encode "trip{name}.xml" --cache-dir "states{name}"', "")[0] == 0


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (MemoryError(), "there is not enough memory"),
        (OSError(12, "Cannot allocate memory"), "there is not enough memory"),
        (RuntimeError("can't start new thread"), "there is not enough memory"),
        (RuntimeError("Exception during initialization: std::bad_alloc"), "there is not enough memory"),
        (ImportError("tokenizers.abi3.so: failed to map segment from shared object"), "there is not enough memory"),
        (ImportError("libfoo.so: cannot open shared object file"), "a library cannot be loaded: libfoo.so"),
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), "the library jinja2 is not installed"),
        (PermissionError(13, "Permission denied", "/secret"), "/secret: Permission denied"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_what_the_environment_refuses_is_3(
    refusal: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise refusal

    monkeypatch.setattr("edge_pc.cli.examine.examine", refused)
    assert main(["doctor"]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert "fault" not in said


def test_a_text_that_does_not_fit_into_memory(folder: Path) -> None:
    limited = (
        "import resource, sys; from edge_pc.cli import main; import edge_pc.cli.ask\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))\n"
        "sys.exit(main(['ask', '-', 'notes.txt']))"
    )
    with Path("/dev/zero").open("rb") as endless:
        command = [sys.executable, "-c", limited]
        child = subprocess.run(command, cwd=folder, stdin=endless, capture_output=True, timeout=120)
    assert (child.returncode, child.stdout) == (3, b"")
    assert child.stderr.startswith(b"error: there is not enough memory\nhint: ")
