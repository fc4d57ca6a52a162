"""Gives every token of a schema its position (paper, section 3.3).

Document order; a module starts where what precedes it ends; the members of a union share a start and the union takes
the longest; a parameter takes as many positions as its length says. Gaps arise where a prompt leaves a module out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_pc.backends.base import IntArray
from edge_pc.compose.conversation import Conversation, check_turns
from edge_pc.compose.length import length_error
from edge_pc.compose.turns import template_ids
from edge_pc.errors import OptionError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.faults import fault
from edge_pc.pml.model import Module, Parameter, Role, Scaffold, Schema, Text, Turn, Union, Walk

# Anonymous text after the last module (as a chat template's closing marks) is computed with the free text when it is
# at most this long: a few more rows of one run cost less than a span, and the text sees all that was imported.
CLOSING_TOKENS = 8

ROOT = ""  # the path of the schema itself: the owner of anonymous text


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's positions `[start, start + length)`; `default_ids` are its default text's tokens, or None."""

    name: str
    start: int
    length: int
    space_before: bool
    default_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class ModuleLayout:
    """Where a module's own text lies; nested modules have separate layouts.

    Attributes:
        path: names joined by `/`; `ROOT` for the schema's anonymous text.
        parent: the enclosing module's path; None for the root.
        start, length: positions that the module takes, nested modules and parameters included.
        token_ids, position_ids: int32 `[n]`, of its own text, positions ascending.
        slots: its parameters.
        cache: whether its states are stored.
    """

    path: str
    parent: str | None
    start: int
    length: int
    token_ids: IntArray
    position_ids: IntArray
    slots: tuple[Slot, ...]
    cache: bool


@dataclass(frozen=True, slots=True)
class ScaffoldLayout:
    """A scaffold: the enclosing module's path and its members' paths."""

    name: str
    scope: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SchemaLayout:
    """A schema with its tokens and positions.

    Attributes:
        schema: the document.
        modules: path → layout, the root first, in document order.
        scaffolds: in document order.
        closing_ids: short anonymous text after the last module; computed with each prompt, so in no module's cells.
        length: positions that the schema takes, closing text included.
        bos_id: the token at position 0 that the model wants, or None.
        roles: of its chat tags, in order.
    """

    schema: Schema
    modules: dict[str, ModuleLayout]
    scaffolds: tuple[ScaffoldLayout, ...]
    closing_ids: tuple[int, ...]
    length: int
    bos_id: int | None
    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        return self.schema.name

    def ancestors(self, path: str) -> list[str]:
        """Paths of the enclosing modules, the root first; `path` itself is not among them."""
        above: list[str] = []
        parent = self.modules[path].parent
        while parent is not None:
            above.append(parent)
            parent = self.modules[parent].parent
        return above[::-1]


def lay_out(
    schema: Schema, tokenizer: Tokenizer, template: ChatTemplate, *, bos_id: int | None, max_positions: int
) -> SchemaLayout:
    """Tokenize a schema and give every token its position.

    Args:
        bos_id: put at position 0, unless None.
        max_positions: of the model.

    Raises:
        ContextLengthError: the schema is longer; the message lists its largest parts.
        PMLError: a parameter's default text is longer than the parameter; the chat template refuses the turns.
        ModelError: chat tags, and the model has no chat template, or one whose turns cannot be written one by one.
    """
    _check_turns(schema, template)
    walk = _Layout(tokenizer, template, bos_id)
    length = walk.nodes(schema.children, ROOT, walk.append(ROOT, [] if bos_id is None else [bos_id], 0))
    if length > max_positions:
        raise length_error(schema, walk.parts(), length, max_positions)
    closing = walk.take_closing()
    walk.owners[ROOT].length = length
    modules = {path: owner.layout(path) for path, owner in walk.owners.items()}
    return SchemaLayout(schema, modules, tuple(walk.scaffolds), closing, length, bos_id, tuple(walk.roles))


def _check_turns(schema: Schema, template: ChatTemplate) -> None:
    """Check that a user's turn, as prompts add it, may follow the schema's turns."""
    roles = [node.role for node in schema.children if isinstance(node, Turn)]
    if roles:
        try:
            check_turns(template, [*roles, "user"])
        except OptionError as exc:
            raise fault(exc.message, schema.at, name=schema.name) from exc


@dataclass(slots=True)
class _Owner:
    """A module while its text is being laid out."""

    parent: str | None
    start: int
    cache: bool
    length: int = 0
    token_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    def layout(self, path: str) -> ModuleLayout:
        return ModuleLayout(
            path, self.parent, self.start, self.length,
            np.array(self.token_ids, dtype=np.int32), np.array(self.position_ids, dtype=np.int32),
            tuple(self.slots), self.cache,
        )  # fmt: skip


class _Layout(Walk[int]):
    """Carries the next free position through a schema."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, bos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._conversation = Conversation(template)
        self._bos_id = bos_id
        self.owners: dict[str, _Owner] = {ROOT: _Owner(None, 0, cache=True)}
        self.scaffolds: list[ScaffoldLayout] = []
        self.roles: list[Role] = []
        self._last_module_end = 0
        self._boundary = True  # nothing, or a control token, stands before

    def append(self, path: str, token_ids: Sequence[int], start: int) -> int:
        """Add tokens to a module's own text."""
        owner = self.owners[path]
        owner.token_ids += token_ids
        owner.position_ids += range(start, start + len(token_ids))
        if token_ids:
            self._boundary = self._tokenizer.is_control(token_ids[-1])
        return start + len(token_ids)

    def text(self, node: Text, path: str, place: int) -> int:
        return self.append(path, self._tokenizer.encode(node.text, boundary=self._boundary), place)

    def parameter(self, node: Parameter, path: str, place: int) -> int:
        self.owners[path].slots.append(self._slot(node, place))
        self._boundary = False
        return place + node.length

    def module(self, node: Module, path: str, place: int) -> int:
        owner = self.owners[node.path] = _Owner(path, place, node.cache)
        end = super().module(node, path, place)
        owner.length = end - place
        self._last_module_end = max(self._last_module_end, end)
        return end

    def union(self, node: Union, path: str, place: int) -> int:
        return max(self.branches(node, path, place))

    def scaffold(self, node: Scaffold, path: str, place: int) -> int:
        self.scaffolds.append(ScaffoldLayout(node.name, path, tuple(member.path for member in node.members)))
        return super().scaffold(node, path, place)

    def turn(self, node: Turn, path: str, place: int) -> int:
        bos_id = None if self.roles else self._bos_id
        self.roles.append(node.role)
        marks = template_ids(self._tokenizer, self._conversation.open(node.role), bos_id, boundary=self._boundary)
        end = super().turn(node, path, self.append(path, marks, place))
        # Where the next turn may go on in this one, its end is written by that turn or by the prompt.
        return self.append(path, self._tokenizer.encode_template(self._conversation.close()), end)

    def _slot(self, parameter: Parameter, start: int) -> Slot:
        default = None
        if parameter.default is not None:
            text = " " + parameter.default if parameter.space_before else parameter.default
            default = tuple(self._tokenizer.encode(text))
            if len(default) > parameter.length:
                raise fault(
                    f"the default text of parameter {parameter.name!r} has {len(default)} tokens, "
                    f"its length is {parameter.length}",
                    parameter.at,
                    name=parameter.name,
                    hint=f"set the length to at least {len(default)}, or shorten the text",
                )
        return Slot(parameter.name, start, parameter.length, parameter.space_before, default)

    def take_closing(self) -> tuple[int, ...]:
        """Cut short anonymous text after the last module off the root's cells."""
        root = self.owners[ROOT]
        count = sum(position >= self._last_module_end for position in root.position_ids)
        if not self._last_module_end or not 0 < count <= CLOSING_TOKENS:
            return ()
        closing = tuple(root.token_ids[-count:])
        del root.token_ids[-count:], root.position_ids[-count:]
        return closing

    def parts(self) -> dict[str, int]:
        """Path → positions that a module's own text and its parameters take."""
        return {
            path: len(owner.token_ids) + sum(slot.length for slot in owner.slots) for path, owner in self.owners.items()
        }
