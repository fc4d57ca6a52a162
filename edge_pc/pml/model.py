"""The document model of PML: what a schema and a prompt say, before any token is counted.

All nodes are frozen. Text is already normalised by the parser (see `text.py`), and a node's `at` is where it stands
in its file. Module paths are names joined by `/` from the schema down (`travel/overseas/tokyo`); chat tags, unions and
scaffolds have no part in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file: 1-based line and column; `source` is None for text given directly.

    Line 0 stands for no place at all, in what was not read from a text.
    """

    source: Path | None
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text. It never becomes a control token, whatever it spells."""

    text: str
    at: Location


@dataclass(frozen=True, slots=True)
class Parameter:
    """A slot of `length` positions in a module.

    Attributes:
        default: the text used when a prompt gives no argument; None: an argument is required.
        space_before: an argument is preceded by one space, because white space stands before the slot.
    """

    name: str
    length: int
    default: str | None
    space_before: bool
    at: Location


@dataclass(frozen=True, slots=True)
class Module:
    """Named reusable text. `cache` is False where its text is to be computed for each prompt."""

    name: str
    path: str
    children: tuple[Node, ...]
    cache: bool
    at: Location


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt takes at most one; they share a start."""

    members: tuple[Module, ...]
    at: Location


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A set of modules that are encoded jointly, for prompts that import all of them.

    `children` holds the member modules and the text between them; the text belongs to the enclosing scope.
    """

    name: str
    children: tuple[Node, ...]
    at: Location

    @property
    def members(self) -> tuple[Module, ...]:
        return tuple(child for child in self.children if isinstance(child, Module))


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat tag. It has no scope of its own: modules in it belong to the enclosing scope."""

    role: Role
    children: tuple[Node, ...]
    at: Location


Node: TypeAlias = "Text | Parameter | Module | Union | Scaffold | Turn"


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema: its modules and its anonymous text, in document order."""

    name: str
    children: tuple[Node, ...]
    at: Location

    def modules(self) -> dict[str, Module]:
        """Every module by its path, in document order."""
        return {module.path: module for module in walk_modules(self.children)}


@dataclass(frozen=True, slots=True)
class Import:
    """A module named in a prompt, with its arguments (parameter name → text) and the imports inside it.

    With `scaffold` set, `name` is a scaffold's: all its members are imported, those in `children` with what they say.
    """

    name: str
    arguments: dict[str, str]
    children: tuple[Import, ...]
    at: Location
    scaffold: bool = False


@dataclass(frozen=True, slots=True)
class FreeText:
    """Text of a prompt that no module covers; `role` is None for text outside chat tags."""

    text: str
    role: Role | None
    at: Location


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt against the schema named `schema`: imports, and free text in document order."""

    schema: str
    imports: tuple[Import, ...]
    free_text: tuple[FreeText, ...]
    at: Location


@dataclass(frozen=True, slots=True)
class Selection:
    """A prompt that was checked against its schema.

    Attributes:
        modules: paths of the imported modules, in the schema's order.
        arguments: (module path, parameter name) → text; defaults filled in.
        free_text: as in the prompt.
        at: where the prompt stands, for later errors.
        locations: module path → where the prompt imports it, for later errors.
    """

    modules: tuple[str, ...]
    arguments: dict[tuple[str, str], str] = field(default_factory=dict)
    free_text: tuple[FreeText, ...] = ()
    at: Location = Location(None, 1, 1)
    locations: dict[str, Location] = field(default_factory=dict)


def walk_modules(nodes: tuple[Node, ...]) -> Iterator[Module]:
    """Every module below `nodes`, in document order, parents first."""
    for node in nodes:
        if isinstance(node, Module):
            yield node
            yield from walk_modules(node.children)
        elif isinstance(node, Union):
            yield from walk_modules(node.members)
        elif isinstance(node, Scaffold | Turn):
            yield from walk_modules(node.children)
