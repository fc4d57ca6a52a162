"""The examples of the server in README and docs/server.md run, on the tiny model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_tools import MODEL, Served, serve

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/server.md")


def blocks(document: str, language: str, about: str) -> list[str]:
    """The code blocks of a document that have to do with something."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for written, block in found if written == language and about in block]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model, tmp_path_factory.mktemp("states")) as served:
        yield served


def here(code: str, served: Served) -> str:
    return code.replace("http://127.0.0.1:8000", served.url).replace("smollm2", MODEL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_python_examples_work(document: str, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    codes = blocks(document, "python", "openai")
    assert codes
    for code in codes:
        exec(compile(here(code, served), document, "exec"), {})
        assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_curl_examples_work(document: str, served: Served) -> None:
    commands = [
        command
        for block in blocks(document, "", "curl ")
        for command in block.replace("\\\n", " ").splitlines()
        if command.startswith("curl ")
    ]
    assert commands
    for command in commands:
        words = shlex.split(here(command, served))
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["choices"], done.stdout


def test_the_options_that_are_named_exist() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for option in set(re.findall(r"`(--[a-z-]+)", text)):
        assert f"`{option}`" in reference, option
