"""The house as CONTRIBUTING.md describes it: which room imports which, how files are called, how long they are."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAPPED = ("backends", "export", "schemas")  # imported as edge_pc.backends, …

# From the ground up: a room imports those before it.
ROOMS = (
    "errors", "_version", "progress", "checks", "system", "documents", "schemas", "pml", "models", "export", "backends",
    "compose", "store", "runtime", "engine", "", "server", "bench", "cli", "__main__", "benchmarks",
)  # fmt: skip

# Rooms of the path that know of backends only what all of them share.
ONLY_BASE = ("compose", "store", "runtime")

# A file of the same name is, in each room, that room's side of the same thing.
SHARED_NAMES = {
    "__init__.py", "__main__.py",
    "entry.py", "backend.py", "baseline.py",  # of each backend; the search for the best settings of all
    "rows.py", "benches.py",  # of the built-in benches and of the experiments
    "answer.py", "encode.py", "schema.py", "prompt.py",  # a thing, and the command or the cells that serve it
    "faults.py", "files.py", "text.py", "weights.py",
}  # fmt: skip

MOST_LINES = 400


def sources() -> Iterator[Path]:
    for top in ("edge_pc", "backends", "export", "benchmarks"):
        yield from (ROOT / top).rglob("*.py")
    yield from (ROOT / "schemas").glob("*.py")  # below it is text for prompts


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts).removesuffix(".__init__")
    return f"edge_pc.{name}" if parts[0] in MAPPED else name


def imported(path: Path, known: Collection[str]) -> set[str]:
    """The modules of this project that a file imports, wherever in it and for whatever."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found.intersection(known)


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if first == "benchmarks" else rest.partition(".")[0]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module → modules that it imports."""
    known = {module_of(path) for path in sources()}
    return {module_of(path): imported(path, known) for path in sources()}


def test_a_room_imports_only_those_before_it(imports: dict[str, set[str]]) -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in others
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    # The types that all share are what backends are made of; the rooms above use nothing else of them.
    wrong += [
        f"{module} imports {other}"
        for module, others in imports.items()
        if room_of(module) in ONLY_BASE
        for other in others
        if room_of(other) == "backends" and other != "edge_pc.backends.base"
    ]
    assert wrong == []


def test_backends_do_not_know_each_other(imports: dict[str, set[str]]) -> None:
    for mine, other in (("onnx", "llamacpp"), ("llamacpp", "onnx")):
        for module, others in imports.items():
            if module.startswith(f"edge_pc.backends.{mine}"):
                assert not [name for name in others if name.startswith(f"edge_pc.backends.{other}")], module


def test_one_name_is_one_thing() -> None:
    places = defaultdict(list)
    for path in sources():
        places[path.name].append(str(path.relative_to(ROOT)))
    assert {name for name, paths in places.items() if len(paths) > 1} == SHARED_NAMES


def test_files_can_be_read_in_one_sitting() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
