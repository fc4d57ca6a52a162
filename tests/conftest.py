"""Fixtures that every test file may use. No test touches the person's own cache home."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache home of the test's own."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("EDGE_PC_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama model as a GGUF file."""
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder."""
    return tiny.write_hf(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model exported with 32-bit weights."""
    from edge_pc.export import export

    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_PC_HOME", str(folder))
        return export(tiny_gguf, folder / "tiny", bits=32)
