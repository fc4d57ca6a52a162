"""The command line without a model: help, options and variables, exit codes, streams."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import click
import pytest

import edge_pc
from edge_pc.backends import BACKENDS
from edge_pc.cli import cli, main
from edge_pc.cli.ages import format_age, parse_age
from edge_pc.errors import OptionError
from edge_pc.runtime.sampling import RANGES, Sampling

HEAVY = {
    "numpy", "onnx", "onnxruntime", "gguf", "tokenizers", "jinja2", "rich", "torch", "transformers", "llama_cpp",
    "sqlite3", "xxhash", "filelock", "platformdirs", "defusedxml", "asyncio", "importlib.metadata", "statistics",
}  # fmt: skip

# All that `edge-pc --help` needs of this package: no command, no option, no backend.
FIRST = {
    "edge_pc", "edge_pc._version", "edge_pc.errors", "edge_pc.cli", "edge_pc.cli.clock", "edge_pc.cli.streams",
    "edge_pc.system", "edge_pc.system.sizes", "edge_pc.system.text",
}  # fmt: skip


def edge_pc_command(arguments: Sequence[str], **settings: object) -> subprocess.CompletedProcess[bytes]:
    """Run `edge-pc` in its own process."""
    return subprocess.run([sys.executable, "-m", "edge_pc", *arguments], capture_output=True, timeout=120, **settings)


def every_command() -> list[click.Command]:
    found, waiting = [], [cli]
    while waiting:
        command = waiting.pop()
        found.append(command)
        if isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [
                child for name in command.list_commands(context) if (child := command.get_command(context, name))
            ]
    return found


EVERY_HELP = """
import click
from edge_pc.cli import cli, main
for name in cli.list_commands(click.Context(cli)):
    main([name, '--help'])
"""


@pytest.mark.parametrize("code", ["import edge_pc", "from edge_pc.cli import main; main(['--help'])", EVERY_HELP])
def test_import_and_help_load_nothing_heavy(code: str) -> None:
    check = f"import sys\n{code}\nprint(*sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    child = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert child.stderr.split() == []


def test_the_first_help_imports_no_command() -> None:
    check = "import sys; from edge_pc.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    child = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    imported = {name for name in child.stderr.split() if name.partition(".")[0] == "edge_pc"}
    assert imported - FIRST == set()
    assert "Answer a question about documents." in child.stdout


def test_the_first_help_says_of_a_command_what_the_command_says() -> None:
    listed = " ".join(cli.get_help(click.Context(cli)).split())
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert f"{name} {command.get_short_help_str(200)}" in listed


def test_version_is_stated_once() -> None:
    child = edge_pc_command(["--version"])
    assert child.stdout.decode() == f"edge-pc {edge_pc.__version__}\n"
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in pyproject
    assert 'version = { attr = "edge_pc._version.__version__" }' in pyproject


def test_public_names_exist() -> None:
    for name in edge_pc.__all__:
        assert getattr(edge_pc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        edge_pc.Motor  # noqa: B018


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.list_commands(click.Context(cli)):
        assert main([name, "--help"]) == 0
    assert "Usage: edge-pc ask" in capsys.readouterr().out
    for command in every_command():
        assert command.help, command.name
        assert all(not isinstance(p, click.Option) or p.help for p in command.params), command.name


def test_every_option_has_the_variable_of_its_name() -> None:
    for command in every_command():
        for param in command.params:
            if isinstance(param, click.Option) and "--version" not in param.opts:
                long_name = next(name for name in param.opts if name.startswith("--"))
                assert param.envvar == "EDGE_PC_" + long_name[2:].upper().replace("-", "_"), command.name


def test_an_option_is_the_same_in_every_command_that_has_it() -> None:
    """A variable sets it for all of them, so it must not be a number here and a word there."""
    kinds: dict[str, set[str]] = {}
    for command in every_command():
        for param in command.params:
            if isinstance(param, click.Option) and param.envvar:
                kinds.setdefault(str(param.envvar), set()).add(f"{param.type!r} {param.is_flag}")
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["aks"], "No such command 'aks'"),
        (["ask"], "Missing argument 'QUESTION|-'"),
        (["ask", "Why?"], "Missing argument 'FILE|FOLDER|-...'"),
        (["ask", "Why?", "a", "--threads", "0"], "--threads"),
        (["ask", "Why?", "a", "--temperature", "warm"], "'warm' is not a valid float"),
        (["ask", "Why?", "a", "--backend", "tpu"], "'onnx', 'llamacpp'"),
        (["ask", "Why?", "a", "--max-cache-size", "2 apples"], "'2 apples' is not a size"),
        (["cache", "rm"], "name what to remove, or give --all"),
        (["cache", "rm", "--all", "abcdef"], "name what to remove, or give --all"),
        (["run", "p.xml", "--text", "x"], "not both"),
        (["run", "--text", "x"], "one --schema"),
        (["run", "p.xml"], "p.xml: the file cannot be read: No such file"),
    ],
)
def test_wrong_usage_is_2_and_one_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_ages() -> None:
    assert [parse_age(text) for text in ("90s", "15m", "1.5h", "30d", " 2 W ")] == [90, 900, 5400, 2592000, 1209600]
    for text in ("", "5", "d", "5 years", "-1d", "1e3s"):
        with pytest.raises(OptionError, match="is not an age"):
            parse_age(text)
    assert [format_age(s) for s in (0, 59, 60, 3599, 3600, 172799, 172800)] == [
        "just now", "just now", "1 min ago", "59 min ago", "1 h ago", "47 h ago", "2 days ago",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_EDGE_PC_COMPLETE" in capsys.readouterr().out


def test_completion_completes() -> None:
    words = {"COMP_WORDS": "edge-pc cache l", "COMP_CWORD": "2", "_EDGE_PC_COMPLETE": "bash_complete"}
    child = edge_pc_command([], env={**os.environ, **words})
    assert child.stdout.decode().split() == ["plain,ls"]


def options_of_ask() -> dict[str, click.Parameter]:
    ask = cli.get_command(click.Context(cli), "ask")
    assert ask is not None
    return {str(param.name): param for param in ask.params}


def test_sampling_options_are_those_of_the_api() -> None:
    options = options_of_ask()
    for field in fields(Sampling):
        option, allowed = options[field.name], RANGES.get(field.name)
        assert isinstance(option, click.Option)
        assert option.envvar == f"EDGE_PC_{'JSON_SCHEMA' if field.name == 'grammar' else field.name.upper()}"
        if allowed is not None:
            assert isinstance(option.type, (click.IntRange, click.FloatRange))
            assert (option.type.min, option.type.max, option.type.min_open) == (
                allowed.lowest, allowed.highest, allowed.open,
            )  # fmt: skip
    ask = cli.get_command(click.Context(cli), "ask")
    assert ask is not None
    given = ask.make_context("ask", ["Why?", "file"]).params
    assert Sampling(**{field.name: given[field.name] for field in fields(Sampling)}) == Sampling()


def test_options_of_backends_are_those_of_their_entries() -> None:
    options = options_of_ask()
    own = {field.name for entry in BACKENDS.values() for field in fields(entry.options)} - {"verbose"}
    assert own >= {"threads", "provider", "assembly", "kv_storage"}
    for name in own:
        assert options[name].default is None or not isinstance(options[name].default, (str, int)), (
            "the backend's affair"
        )
    assert isinstance(options["assembly"].type, click.Choice)
    for choice in options["assembly"].type.choices:
        BACKENDS["onnx"].make_options({"assembly": choice})


def test_an_option_that_the_backend_has_not_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("Ten.", encoding="utf-8")
    words = ["ask", "Why?", str(tmp_path / "notes.txt"), "--backend", "llamacpp", "--model", str(tiny_gguf)]
    assert main([*words, "--assembly", "map"]) == 2
    assert "the backend llamacpp has no option assembly; it has: threads" in capsys.readouterr().err


def test_a_variable_that_sets_nothing_is_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_PC_MAX_TOKEN", "1")
    monkeypatch.setenv("EDGE_PC_STATS", "1")  # of another command
    monkeypatch.setenv("EDGE_PC_CACHE_DIR", "/nowhere")
    assert main(["cache", "path"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "/nowhere\n"
    assert captured.err == "warning: the variable EDGE_PC_MAX_TOKEN sets nothing (did you mean EDGE_PC_MAX_TOKENS?)\n"
    monkeypatch.setenv("EDGE_PC_Q", "1")
    assert main(["cache", "path"]) == 0
    assert "the variable EDGE_PC_Q sets nothing\n" in capsys.readouterr().err
    monkeypatch.delenv("EDGE_PC_CACHE_DIR")
    assert main(["cache", "info", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_a_home_in_a_path_is_the_persons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["cache", "path", "--cache-dir=~/states"]) == 0
    monkeypatch.setenv("EDGE_PC_CACHE_DIR", "~/others")
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/states\n{tmp_path}/others\n"
    assert main(["schema", "check", str(tmp_path / "a.xml"), "--model=~/model"]) == 2
    assert main(["run", "--schema=~/trip.xml", "--text", "Why?"]) == 2
    assert f"{tmp_path}/trip.xml: the file cannot be read" in capsys.readouterr().err


def test_an_unexpected_fault_is_1_and_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("edge_pc.cli.examine.examine", broken)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(r"error: unexpected ZeroDivisionError: division by zero\nhint: .*-vv.*\n", captured.err)
    assert main(["doctor", "-vv"]) == 1
    assert "Traceback" in capsys.readouterr().err
