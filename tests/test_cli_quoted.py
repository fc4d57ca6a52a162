"""Every command that a message, a hint or a document quotes can be typed as it stands there."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edge_pc.cli import cli
from edge_pc.cli.variables import variables

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for folder in ("edge_pc", "backends", "export") for path in sorted((ROOT / folder).rglob("*.py"))]
# docs/cli.md and the table of commands in README.md are made from the commands themselves.
DOCUMENTS = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")] if path.name != "cli.md"]
DOCUMENTS = [path for path in DOCUMENTS if not path.relative_to(ROOT).parts[0].startswith((".", "build"))]

# Stands for what an f-string fills in.
FILLED_IN = "VALUE"


def texts(source: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a docstring) of every string literal in Python source."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [str(v.value) if isinstance(v, ast.Constant) else FILLED_IN for v in node.values]
            yield "".join(pieces), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value, id(node) in docstrings


def quoted(text: str) -> Iterator[str]:
    """What follows each `edge-pc ` up to the end of the line, of the code span or of the clause."""
    for match in re.finditer(r"(?<![\w/-])edge-pc +(?=[a-z-])([^\n`]*)", text):
        for part in re.split(r" && (?:edge-pc )?", match[1]):
            yield re.split(r"[;)]|\s#\s|\s[>|]", part)[0]


def words_of(text: str) -> list[str]:
    """The words of a command; prose after it may hold a lone quotation mark. A comma ends it."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    ends = [number for number, word in enumerate(words) if word.endswith((",", ":", "."))]
    ends = [number for number in ends if not words[number].endswith("...")]
    return [*words[: ends[0]], words[ends[0]].rstrip(",:.")] if ends else words


def problem(text: str, *, names: bool) -> str | None:
    """Why the command at the beginning of `text` cannot be typed; None if it can, or if there is none.

    Args:
        names: a command's name alone is all right: it is spoken of, not shown.
    """
    words, command = words_of(text), cli
    ctx = click.Context(cli, info_name="edge-pc")
    path = []
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return None  # a group is spoken of, or has its own option
        found = command.get_command(ctx, words[0])
        if found is None:
            near = difflib.get_close_matches(words[0], command.list_commands(ctx), n=1, cutoff=0.75)
            return f"no command {words[0]!r}" if near or path else None
        path.append(words.pop(0))
        command = found
    if names and not words:
        return None
    context = click.Context(command, info_name=" ".join(path), parent=ctx)
    # Prose may follow; an option never belongs to it.
    options = [number for number, word in enumerate(words, 1) if word.startswith("-")]
    found = [mistake(command, context, words[:end]) for end in range(len(words), max(options, default=0) - 1, -1)]
    return None if None in found else found[0]


def mistake(command: click.Command, ctx: click.Context, words: list[str]) -> str | None:
    """What click would refuse of these words, values aside that are only named (`--max-size SIZE`)."""
    try:
        values, rest, _ = command.make_parser(ctx).parse_args(list(words))
    except click.UsageError as exc:
        return exc.format_message()
    if rest:
        return f"{rest} is too much"
    for param in command.params:
        value = values.get(str(param.name))
        given = isinstance(value, (str, list, tuple)) and bool(value)
        if isinstance(param, click.Argument) and param.required and not given:
            return f"{param.make_metavar(ctx)} is missing"
        if isinstance(param.type, click.Choice) and isinstance(value, str) and not value.isupper():
            try:
                param.type.convert(value, param, ctx)
            except click.BadParameter as exc:
                return exc.message
    return None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_quote_commands_that_exist(source: Path) -> None:
    for text, is_docstring in texts(source.read_text(encoding="utf-8")):
        for command in quoted(text):
            assert problem(command, names=is_docstring) is None, f"edge-pc {command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_quote_commands_that_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    text = re.sub(r"<!-- commands: .*?<!-- end of commands -->", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for shown, names in ((blocks, False), (spans, True)):
        for command in (command for piece in shown for command in quoted(piece)):
            assert problem(command, names=names) is None, f"edge-pc {command}"


def test_the_makefile_calls_commands_that_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(EDGE_PC)", "edge-pc")
    calls = [line for line in text.splitlines() if line.startswith("\t") and "edge-pc " in line and "@echo" not in line]
    assert len(calls) > 4
    for command in (command for call in calls for command in quoted(re.sub(r"\$\((\w+)\)", r"\1", call))):
        assert problem(command, names=False) is None, f"edge-pc {command}"


def test_variables_that_are_named_exist() -> None:
    known = {"EDGE_PC_HOME", *variables(cli)}
    for path in [*SOURCES, *DOCUMENTS, ROOT / "docs" / "cli.md"]:
        named = set(re.findall(r"\bEDGE_PC_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("cache gc --max-bytes SIZE removes stored states", "No such option"),
        ("ecnode trip.xml", "no command 'ecnode'"),
        ("cache lst", "no command 'lst'"),
        ("encode", "SCHEMA"),
        ("export smollm2 --quant q9", "q9"),
        ("cache gc --max-size", "requires an argument"),
        ("cache gc --max-size SIZE removes stored states", None),
        ("export VALUE -o DIR, then use DIR", None),
        ("ask 'How many?' notes.txt --stats", None),
        ("was tested with this", None),
    ],
)
def test_a_command_that_cannot_be_typed_is_found(text: str, wrong: str | None) -> None:
    found = problem(text, names=False)
    assert found is None if wrong is None else found is not None and wrong in found
