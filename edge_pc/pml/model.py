"""The document model of PML: what a schema and a prompt say, before any token is counted.

All nodes are frozen. Text is already normalised by the parser (see `text.py`), and a node's `at` is where it stands
in its file. Module paths are names joined by `/` from the schema down (`travel/overseas/tokyo`); chat tags, unions and
scaffolds have no part in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from edge_pc.pml.faults import MAX_DEPTH, too_deep

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file: 1-based line and column; `source` is None for text given directly.

    Line 0 stands for no place at all, in what was not read from a text.
    """

    source: Path | None
    line: int
    column: int


# Where a prompt or a schema that was made, not read, has its parts.
NOWHERE = Location(None, 0, 0)


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
    """A chat tag. It has no scope: modules in it belong to the enclosing scope."""

    role: Role
    children: tuple[Node, ...]
    at: Location


Node: TypeAlias = "Text | Parameter | Module | Union | Scaffold | Turn"


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema: its modules and its anonymous text, in document order.

    Attributes:
        made_of_files: its modules are a person's files, so that errors have to speak of files.

    Raises:
        PMLError: nodes are nested more than `MAX_DEPTH` levels deep.
    """

    name: str
    children: tuple[Node, ...]
    at: Location
    made_of_files: bool = False

    def __post_init__(self) -> None:
        # Level by level: whatever goes through a schema later may then do so by recursion.
        level: Sequence[Node] = self.children
        for _ in range(MAX_DEPTH):
            level = [inner for node in level for inner in _inside(node)]
        if level:
            raise too_deep(f"a {type(level[0]).__name__.lower()}", level[0].at)

    def modules(self) -> dict[str, Module]:
        """Every module by its path, in document order."""
        found = _Modules()
        found.nodes(self.children, "", None)
        return found.by_path


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


def _inside(node: Node) -> Sequence[Node]:
    if isinstance(node, Text | Parameter):
        return ()
    return node.members if isinstance(node, Union) else node.children


class Walk(Generic[Place]):
    """A walk through the nodes of a schema in document order, which carries a place along from each to the next.

    A subclass says what a node does to the place: `text`, `parameter`, `module`, … get the node, the path of the module
    around it (empty outside of modules) and the place where it begins, and return the place where it ends. What a
    subclass leaves out keeps the place, and goes through the nodes inside.
    """

    def nodes(self, nodes: Sequence[Node], path: str, place: Place) -> Place:
        """Go through `nodes`, which stand in the module `path`."""
        for node in nodes:
            place = self._node(node, path, place)
        return place

    def _node(self, node: Node, path: str, place: Place) -> Place:
        if isinstance(node, Text):
            return self.text(node, path, place)
        if isinstance(node, Parameter):
            return self.parameter(node, path, place)
        if isinstance(node, Module):
            return self.module(node, path, place)
        if isinstance(node, Union):
            return self.union(node, path, place)
        if isinstance(node, Scaffold):
            return self.scaffold(node, path, place)
        return self.turn(node, path, place)

    def text(self, node: Text, path: str, place: Place) -> Place:
        return place

    def parameter(self, node: Parameter, path: str, place: Place) -> Place:
        return place

    def module(self, node: Module, path: str, place: Place) -> Place:
        return self.nodes(node.children, node.path, place)

    def union(self, node: Union, path: str, place: Place) -> Place:
        self.branches(node, path, place)
        return place

    def scaffold(self, node: Scaffold, path: str, place: Place) -> Place:
        return self.nodes(node.children, path, place)

    def turn(self, node: Turn, path: str, place: Place) -> Place:
        return self.nodes(node.children, path, place)

    def branches(self, node: Union, path: str, place: Place) -> list[Place]:
        """The place where each member ends, when all of them begin at `place`."""
        return [self.module(member, path, place) for member in node.members]


class _Modules(Walk[None]):
    """Every module by its path, in document order."""

    def __init__(self) -> None:
        self.by_path: dict[str, Module] = {}

    def module(self, node: Module, path: str, place: None) -> None:
        self.by_path[node.path] = node
        super().module(node, path, place)
