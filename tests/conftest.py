"""Fixtures that every test file may use. No test touches the person's own cache home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny

# The person's own home: only the real model is taken from it, because it is pulled and exported once.
_OWN_HOME = os.environ.get("EDGE_PC_HOME")


@contextmanager
def _home(path: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if path is None:
            patch.delenv("EDGE_PC_HOME", raising=False)
        else:
            patch.setenv("EDGE_PC_HOME", path)
        yield


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
    with _home(str(folder)):
        return export(tiny_gguf, folder / "tiny", bits=32)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2 as it is pulled; skips where it is neither there nor can be downloaded."""
    from edge_pc.errors import MissingDependencyError
    from edge_pc.models.pull import pull

    with _home(_OWN_HOME):
        try:
            return pull("smollm2")
        except MissingDependencyError as exc:
            pytest.skip(f"SmolLM2 is not here: {exc.message}")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """The real SmolLM2, exported with 8-bit weights into the cache home."""
    from edge_pc.errors import ModelError
    from edge_pc.export import export
    from edge_pc.models import registry
    from edge_pc.models.spec import read_spec

    with _home(_OWN_HOME):
        folder = registry.export_folder("smollm2")
        try:
            _, changed = read_spec(folder)
        except ModelError:  # none yet, or one of another version
            changed = ["all"]
        return export(smollm2_gguf, folder) if changed else folder
