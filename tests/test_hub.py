"""Models of the Hugging Face Hub by name, from a small server that speaks its API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub_server import Hub, serving

from edge_pc.models.hub import HubModel, hub_model
from edge_pc.models.registry import export_folder, name_of

REPO = "tiny-org/Tiny-1.5"
GGUF = "tiny-Q8_0.gguf"

Child = subprocess.CompletedProcess[str]
Run = Callable[..., Child]


@pytest.fixture
def hub(tiny_hf: Path, tiny_gguf: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in sorted(tiny_hf.iterdir())}
    files |= {GGUF: tiny_gguf.read_bytes(), "README.md": b"# Tiny", "pytorch_model.bin": b"x" * 30_000}
    with serving(Hub(REPO, files)) as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, home: Path, tmp_path: Path) -> Run:
    """The command in a process and a working directory of its own, pointed to the server."""
    (tmp_path / "notes.txt").write_text("The cat is in the house.", encoding="utf-8")

    def run(*arguments: str, **variables: str) -> Child:
        own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "EDGE_PC_HOME": str(home), **variables}
        command = [sys.executable, "-m", "edge_pc", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=own, timeout=300)

    return run


def fails(child: Child, code: int, message: str) -> None:
    assert (child.returncode, child.stdout) == (code, "")
    assert re.search(message, child.stderr, re.DOTALL), child.stderr
    assert "Traceback" not in child.stderr


def works(child: Child) -> Child:
    assert child.returncode == 0, child.stderr
    return child


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubModel("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/name:Q4_K_M", HubModel("org/name", None, "Q4_K_M")),
        ("org/name@v1:folder/a b.gguf", HubModel("org/name", "v1", "folder/a b.gguf")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("smollm2", None),
        ("a/b/c", None),
        ("../name", None),
        ("./name", None),
        ("/name", None),
        ("org/", None),
        ("https://huggingface.co/org/name", None),
    ],
)
def test_names(name: str, model: HubModel | None) -> None:
    assert hub_model(name) == model
    if model is not None:
        assert str(model) == name
        assert name_of(export_folder(name).parent) == name


def test_pull_and_export_a_folder_by_name(hub: Hub, run: Run) -> None:
    pulled = works(run("pull", REPO))
    assert re.search(rf"getting {REPO}: .* MiB|KiB", pulled.stderr)
    assert f"next: edge-pc export {REPO}" in pulled.stderr
    assert not hub.downloads("pytorch_model.bin")
    assert not hub.downloads(GGUF)
    before = len(hub.downloads("model.safetensors"))
    assert "SHA-256 checked" in works(run("pull", REPO)).stderr
    assert len(hub.downloads("model.safetensors")) == before == 1
    works(run("export", REPO))
    answer = json.loads(works(run("ask", "Why?", "notes.txt", "--model", REPO, "--max-tokens", "3", "--json")).stdout)
    assert len(answer["token_ids"]) == 3


def test_ask_gets_and_exports_on_first_use_after_saying_so(hub: Hub, run: Run) -> None:
    asked = ("ask", "Why?", "notes.txt", "--model", REPO, "--max-tokens", "3")
    first = works(run(*asked))
    said = ["is not on this machine yet", "getting", "SHA-256 checked", "ready to run, once", "is exported to"]
    places = [first.stderr.index(words) for words in said]
    assert places == sorted(places)
    requests = len(hub.requests)
    second = works(run(*asked))
    assert second.stdout == first.stdout
    assert second.stderr == ""
    assert len(hub.requests) == requests, "the network is not asked again"


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llamacpp is not installed")
@pytest.mark.parametrize("choice", ["Q8_0", "q8_0", GGUF])
def test_a_gguf_file_by_its_type_or_its_name(hub: Hub, run: Run, choice: str) -> None:
    asked = ("ask", "Why?", "notes.txt", "--max-tokens", "3", "--backend", "llamacpp")
    works(run(*asked, "--model", f"{REPO}:{choice}"))
    assert len(hub.downloads(GGUF)) == 1
    assert not hub.downloads("model.safetensors")


def test_models_lists_what_is_here_with_size_and_context(run: Run) -> None:
    nothing = run("models")
    assert "no model is on this machine yet" in nothing.stderr
    assert "smollm2 (93.8 MiB, Apache-2.0)" in nothing.stderr
    works(run("pull", f"{REPO}:Q8_0"))
    works(run("pull", REPO))
    works(run("export", REPO, "--bits", "4"))
    here = json.loads(works(run("models", "--json")).stdout)["here"]
    assert [(each["name"], each["form"]) for each in here] == [
        (REPO, "export, 4 bits"), (REPO, "safetensors"), (f"{REPO}:{GGUF}", "GGUF"),
    ]  # fmt: skip
    assert {each["context"] for each in here} == {1024}
    assert all(each["nbytes"] > 10_000 for each in here)
    lines = works(run("models")).stdout.splitlines()
    assert lines[0].split() == ["model", "form", "size", "context", "place"]
    assert len(lines) == 4


def test_a_connection_that_breaks_is_tried_again(hub: Hub, run: Run) -> None:
    hub.cut_after["model.safetensors"] = 30_000
    works(run("pull", REPO))
    assert len(hub.downloads("model.safetensors")) == 2


def test_files_that_came_whole_are_not_downloaded_again(hub: Hub, run: Run) -> None:
    weights = hub.files.pop("model.safetensors")
    hub.files["model.safetensors"] = b"x" * 40_000
    hub.sums["model.safetensors"] = "0" * 64
    fails(run("pull", REPO), 2, "is damaged")
    hub.files["model.safetensors"] = weights
    hub.sums.clear()
    works(run("pull", REPO))
    assert len(hub.downloads("tokenizer.json")) == 1


def test_a_damaged_file_is_removed(hub: Hub, run: Run, tmp_path: Path) -> None:
    hub.sums["model.safetensors"] = "f" * 64
    fails(run("pull", REPO), 2, r"model\.safetensors of tiny-org/Tiny-1\.5 is damaged, and was removed")
    assert not list(tmp_path.rglob("model.safetensors"))
    assert not list(tmp_path.rglob("f" * 64))
    hub.sums.clear()
    works(run("pull", REPO))


def test_offline_what_is_here_is_used_and_nothing_is_asked_for(hub: Hub, run: Run) -> None:
    fails(run("pull", REPO, HF_HUB_OFFLINE="1"), 3, "not on this machine, and HF_HUB_OFFLINE forbids to get it")
    works(run("pull", REPO))
    requests = len(hub.requests)
    works(run("pull", REPO, HF_HUB_OFFLINE="1"))
    works(run("ask", "Why?", "notes.txt", "--model", REPO, "--max-tokens", "3", HF_HUB_OFFLINE="1"))
    assert len(hub.requests) == requests


def test_a_token_opens_what_is_gated(hub: Hub, run: Run) -> None:
    hub.gated = True
    fails(run("pull", REPO), 2, r"open only to those who accepted its terms.*hint: .*HF_TOKEN")
    works(run("pull", REPO, HF_TOKEN="secret"))


def test_what_cannot_be_had(hub: Hub, run: Run) -> None:
    fails(run("pull", "no-org/none"), 2, r"no model 'no-org/none' at http.*or it is private")
    fails(run("pull", f"{REPO}@none"), 2, "has no revision 'none'")
    fails(run("pull", f"{REPO}:Q3_K"), 2, rf"no GGUF file 'Q3_K', but: {GGUF} \(")
    fails(run("export", REPO), 2, f"not on this machine yet\nhint: edge-pc pull {REPO}")
    fails(run("pull", REPO, HF_ENDPOINT="http://127.0.0.1:9"), 3, r"127\.0\.0\.1:9 cannot be reached")


def test_a_repository_of_gguf_files_lists_them(hub: Hub, run: Run) -> None:
    del hub.files["model.safetensors"]
    hub.files["tiny-Q4_K_M-00001-of-00002.gguf"] = hub.files["tiny-Q4_K_M-00002-of-00002.gguf"] = b"x" * 9
    fails(run("pull", REPO), 2, rf"one must be chosen: .*{GGUF} \(.*hint: edge-pc pull {REPO}:")
    fails(run("pull", f"{REPO}:Q4_K_M"), 2, "in 2 files, and only GGUF files in one piece can be read")
    del hub.files[GGUF]
    for name in [name for name in hub.files if name.endswith(".gguf")]:
        del hub.files[name]
    fails(run("pull", REPO), 2, "neither GGUF files nor a model in safetensors")
    fails(run("pull", f"{REPO}:Q8_0"), 2, "holds no GGUF file")


def test_an_architecture_that_cannot_be_exported_is_refused_before_its_weights_come(hub: Hub, run: Run) -> None:
    hub.files["config.json"] = json.dumps({**json.loads(hub.files["config.json"]), "model_type": "mamba"}).encode()
    fails(run("pull", REPO), 2, "architecture 'mamba' is not supported")
    assert not hub.downloads("model.safetensors")
