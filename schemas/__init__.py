"""Ready schemas, a prompt for each, and the grammar of PML for editors.

    from edge_pc.schemas import path
    engine.load_schema(path("travel"))

`README.md` in this folder lists them and describes the language.
"""

from __future__ import annotations

from pathlib import Path

from edge_pc.errors import OptionError

FOLDER = Path(__file__).parent
GRAMMAR = FOLDER / "pml.rng"


def names() -> list[str]:
    """The names of the schemas, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.xml") if not file.stem.endswith(".prompt"))


def path(name: str) -> Path:
    """The file of the schema `name`.

    Raises:
        OptionError: there is no schema of that name.
    """
    return _file(name, ".xml")


def prompt_path(name: str) -> Path:
    """The file of the prompt that shows how the schema `name` is used.

    Raises:
        OptionError: there is no schema of that name.
    """
    return _file(name, ".prompt.xml")


def _file(name: str, ending: str) -> Path:
    if name not in names():
        raise OptionError(f"there is no ready schema {name!r}", hint=f"there are: {', '.join(names())}")
    return FOLDER / f"{name}{ending}"
