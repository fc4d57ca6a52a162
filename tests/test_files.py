"""Files and folders that take their place whole, or not at all."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from store_tools import start_python

from edge_pc.system.files import abandoned, make_private_folder, replacing_file, replacing_folder
from edge_pc.system.sizes import exact_size, parse_size

Kind = Callable[[Path], AbstractContextManager[Any]]

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs file locks and signals")


def write(new: Any, text: str) -> None:
    """Write `text` into a new file, or into a file in a folder of a new folder."""
    if isinstance(new, Path):
        (new / "deep").mkdir()
        (new / "deep" / "text").write_text(text)
    else:
        new.write(text.encode())


def replace(replacing: Kind, path: Path, text: str, error: BaseException | None = None) -> None:
    """Put `text` in place of what is at `path`; with an error, fail when it is half written."""
    with replacing(path) as new:
        write(new, text)
        if error is not None:
            raise error


def read(path: Path) -> str | None:
    found = path / "deep" / "text" if path.is_dir() else path
    return found.read_text() if found.exists() else None


@pytest.fixture(params=[replacing_file, replacing_folder], ids=["file", "folder"])
def replacing(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.mark.parametrize("before", [None, "old"])
def test_new_content_takes_the_place(tmp_path: Path, replacing: Kind, before: str | None) -> None:
    path = tmp_path / "it"
    for text in filter(None, (before, "new")):
        with replacing(path) as new:
            write(new, text)
            assert read(path) == (None if text == (before or "new") else before)
    assert read(path) == "new"
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_nothing_behind(
    tmp_path: Path, replacing: Kind, before: str | None, error: type[BaseException]
) -> None:
    path = tmp_path / "it"
    if before:
        replace(replacing, path, before)
    with pytest.raises(error):
        replace(replacing, path, "half", error())
    assert read(path) == before
    assert os.listdir(tmp_path) == ([path.name] if before else [])


@pytest.mark.parametrize(
    ("replacing", "step"),
    [
        (replacing_file, "os.fsync"),
        (replacing_file, "os.replace"),
        (replacing_folder, "os.fsync"),
        (replacing_folder, "pathlib.Path.rename"),
    ],
)
def test_a_step_that_fails_leaves_what_was_there(
    tmp_path: Path, replacing: Kind, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    replace(replacing, path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="Input/output"):
            replace(replacing, path, "new")
    assert read(path) == "old"
    assert os.listdir(tmp_path) == ["it"]


def test_a_folder_returns_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    replace(replacing_folder, path, "old")
    rename, failures = Path.rename, [OSError(errno.EIO, "Input/output error")]

    def failing(self: Path, target: Path) -> Path:
        if target == path and failures:
            raise failures.pop()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        replace(replacing_folder, path, "new")
    assert read(path) == "old"
    assert os.listdir(tmp_path) == ["it"]


def test_another_writer_may_be_faster(tmp_path: Path, replacing: Kind) -> None:
    path = tmp_path / "it"
    with replacing(path) as slow:
        write(slow, "slow")
        with replacing(path) as fast:
            write(fast, "fast")
        assert read(path) == "fast"
    assert read(path) == "slow"
    assert os.listdir(tmp_path) == ["it"]


def test_a_folder_is_put_there_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename, others = tmp_path / "it", Path.rename, ["another", "one more"]

    def racing(self: Path, target: Path) -> Path:
        if target == path and others:
            (path / "deep").mkdir(parents=True)
            (path / "deep" / "text").write_text(others.pop())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", racing)
    replace(replacing_folder, path, "ours")
    assert read(path) == "ours"
    assert os.listdir(tmp_path) == ["it"]


def test_a_file_in_place_of_a_folder_stays(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text("mine")
    with pytest.raises(NotADirectoryError):
        replace(replacing_folder, path, "new")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["it"]


@posix
def test_what_a_killed_writer_left_is_gone_after_the_next(tmp_path: Path, replacing: Kind) -> None:
    path, other = tmp_path / "it", tmp_path / "other"
    code = (
        "import sys, time; from pathlib import Path; import test_files as t; from edge_pc.system import files\n"
        f"with files.{replacing.__name__}(Path(sys.argv[1])) as new:\n"
        "    t.write(new, 'half'); print('writing', flush=True); time.sleep(600)\n"
    )
    processes = [start_python(code, each) for each in (path, other)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
    replace(replacing, path, "whole")
    assert len(os.listdir(tmp_path)) == 3, "what is being written is left alone"
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    replace(replacing, path, "again")
    assert read(path) == "again"
    left = [name for name in os.listdir(tmp_path) if name != "it"]
    assert [name.startswith(".other.") for name in left] == [True], "that of another path is not ours to delete"
    assert [each.name for each in abandoned(tmp_path)] == left


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_modes(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with replacing_file(tmp_path / "private", 0o400) as file:
            file.write(b"x")
        with replacing_file(tmp_path / "usual") as file:
            file.write(b"x")
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o400
    assert (tmp_path / "usual").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 5 * 2**20, 5 * 2**20 + 1, 3 * 2**30, 2**40, 2**61])
def test_an_exact_size_is_read_as_it_was(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes
