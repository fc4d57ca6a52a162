"""Reads a schema: PML text → `Schema`, every rule of a schema checked that needs no tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge_pc.pml.faults import fault, is_name
from edge_pc.pml.grammar import RESERVED, SCHEMA_ELEMENTS, canonical, check_place, read_attributes
from edge_pc.pml.model import (
    ROLES,
    Location,
    Module,
    Node,
    Parameter,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
)
from edge_pc.pml.text import Flow, content, join
from edge_pc.pml.xml import MAX_BYTES, SPACE, Chars, Element, read_document, read_pml
from edge_pc.system.text import TextFileError, read_text

_LENGTH = re.compile(r"0*[1-9][0-9]{0,8}")


def load_schema(path: Path) -> Schema:
    """Read a schema from a UTF-8 file.

    Raises:
        PMLError: the file cannot be read or is not a schema.
    """
    return parse_schema(read_pml(path), path)


def parse_schema(text: str, source: Path | None = None) -> Schema:
    """Read a schema.

    Args:
        text: PML.
        source: the file it comes from, for messages and for `src=`, which is refused without one.

    Raises:
        PMLError: the text is not a schema.
    """
    root = read_document(text, source, "schema")
    name = read_attributes(root, SCHEMA_ELEMENTS["schema"])["name"]
    if not is_name(name):
        raise fault(f"{name!r} cannot name a schema: expected an XML name", root.at, name=name)
    return Schema(name, _SchemaReader(source).children(root, _Scope()), root.at)


@dataclass(slots=True)
class _Scope:
    """The names of one scope, the schema's or a module's, with the places where they were given."""

    prefix: str = ""
    modules: dict[str, Location] = field(default_factory=dict)
    scaffolds: dict[str, Location] = field(default_factory=dict)
    parameters: dict[str, Location] = field(default_factory=dict)


class _SchemaReader:
    """Reads the elements of one schema in document order."""

    def __init__(self, source: Path | None) -> None:
        self._source = source
        self._room = MAX_BYTES  # for what `src=` names, all files together
        self._flow = Flow()

    def children(self, element: Element, scope: _Scope) -> tuple[Node, ...]:
        """What stands in `element`, its names added to `scope`."""
        nodes: list[Node] = []
        for child in content(element):
            if isinstance(child, Element):
                check_place(child, element, SCHEMA_ELEMENTS[canonical(element.tag)])
                nodes.append(self._node(child, scope))
            elif text := self._flow.text(child.text, preserve=element.preserve):
                nodes.append(Text(text, child.at))
        return tuple(nodes)

    def _node(self, element: Element, scope: _Scope) -> Node:
        tag = canonical(element.tag)
        if tag == "module":
            return self._module(element, scope)
        if tag == "union":
            return self._union(element, scope)
        if tag == "scaffold":
            return self._scaffold(element, scope)
        if tag == "param":
            return self._parameter(element, scope)
        return self._turn(element, scope)

    def _module(self, element: Element, scope: _Scope) -> Module:
        attributes = read_attributes(element, SCHEMA_ELEMENTS["module"])
        name = _new_name("module", attributes["name"], element, scope.modules)
        if name in RESERVED:
            hint = f"PML itself uses {', '.join(sorted(RESERVED))}"
            raise fault(f"a module cannot have the name of PML's tag {name!r}", element.at, name=name, hint=hint)
        cache = attributes.get("cache", "true")
        if cache not in ("true", "false"):
            raise fault(f'cache="{cache}": expected "true" or "false"', element.at, name=name)
        path = f"{scope.prefix}{name}"
        src = attributes.get("src")
        children = self.children(element, _Scope(f"{path}/")) if src is None else self._src(src, element, name)
        return Module(name, path, children, cache == "true", element.at)

    def _src(self, src: str, element: Element, name: str) -> tuple[Node, ...]:
        """The content of the file `src` as the module's only text, never read as PML."""
        if any(isinstance(child, Element) or child.text.strip(SPACE) for child in element.children):
            raise fault(
                f"module {name!r} has both src= and content",
                element.at,
                name=name,
                hint="remove one of them; text around a file belongs in a module around this one",
            )
        text = self._source_text(src, element.at, name)
        # A file starts on its own line: one space would shift its first line.
        shown = self._flow.verbatim(text, separator="\n")
        return (Text(shown, element.at),) if shown else ()

    def _source_text(self, src: str, at: Location, name: str) -> str:
        path = _source_path(src, self._source, at, name)
        try:
            text = read_text(path, self._room)
        except TextFileError as exc:
            hint = exc.hint or f"looked for {path}"
            raise fault(f"module {name!r}, src={src!r}: {exc.problem}", at, name=name, hint=hint) from exc
        self._room -= len(text.encode())
        return text.replace("\r\n", "\n")

    def _union(self, element: Element, scope: _Scope) -> Union:
        rule = SCHEMA_ELEMENTS["union"]
        attributes = read_attributes(element, rule)
        before = self._flow
        ends: list[Flow] = []
        members: list[Module] = []
        for child in element.children:
            if isinstance(child, Chars):
                _refuse_text(child, element)
                before.text(child.text)
                continue
            check_place(child, element, rule)
            self._flow = replace(before)  # each begins at the same place
            members.append(self._module(child, scope))
            ends.append(self._flow)
        if not members:
            raise fault("a union needs at least one module", element.at)
        self._flow = join(ends)
        if isinstance(element.children[-1], Chars):
            self._flow.text(element.children[-1].text)
        names = [member.name for member in members]
        named = attributes.get("scaffold")
        if named is not None and named not in names:
            raise fault(f'scaffold="{named}" names no member of the union', element.at, name=named, among=names)
        return Union(tuple(members), element.at)

    def _scaffold(self, element: Element, scope: _Scope) -> Scaffold:
        attributes = read_attributes(element, SCHEMA_ELEMENTS["scaffold"])
        name = _new_name("scaffold", attributes["name"], element, scope.scaffolds)
        scaffold = Scaffold(name, self.children(element, scope), element.at)
        if not scaffold.members:
            raise fault(f"scaffold {name!r} needs at least one module", element.at, name=name)
        for module in scaffold.members:
            if not module.cache:
                message = f'module {module.name!r} has cache="false", so scaffold {name!r} cannot hold it'
                hint = "a scaffold's modules are encoded together and kept: remove one of the two"
                raise fault(message, module.at, name=module.name, hint=hint)
        return scaffold

    def _turn(self, element: Element, scope: _Scope) -> Turn:
        read_attributes(element, SCHEMA_ELEMENTS[element.tag])
        (role,) = (role for role in ROLES if role == element.tag)
        self._flow.border()
        children = self.children(element, scope)
        self._flow.border()
        return Turn(role, children, element.at)

    def _parameter(self, element: Element, scope: _Scope) -> Parameter:
        attributes = read_attributes(element, SCHEMA_ELEMENTS["param"])
        name = _new_name("parameter", attributes["name"], element, scope.parameters)
        length = attributes["length"].strip(SPACE)
        if not _LENGTH.fullmatch(length):
            message = f"parameter {name!r} has length {length!r}: expected a whole number of tokens, at least 1"
            raise fault(message, element.at, name=name)
        inner = self._only_text(element)
        body = inner.strip(SPACE)
        default = attributes["default"].strip(SPACE) if "default" in attributes else None
        if body and default is not None:
            raise fault(f"parameter {name!r} has two default texts", element.at, name=name, hint="remove one of them")
        self._flow.text(inner[: len(inner) - len(inner.lstrip(SPACE))])
        spaced = self._flow.slot()
        self._flow.text(inner[len(inner.rstrip(SPACE)) :] if body else "")
        return Parameter(name, int(length), body or default, spaced, element.at)

    def _only_text(self, element: Element) -> str:
        texts = []
        for child in content(element):
            if isinstance(child, Element):
                check_place(child, element, SCHEMA_ELEMENTS[canonical(element.tag)])
            else:
                texts.append(child.text)
        return "".join(texts)


def _new_name(kind: str, name: str, element: Element, taken: dict[str, Location]) -> str:
    """`name`, checked and added to those `taken`."""
    if not is_name(name):
        hint = "a letter or _, then letters, digits, _ . and -"
        raise fault(f"{name!r} cannot name a {kind}: expected an XML name", element.at, name=name, hint=hint)
    if name in taken:
        message = f"{kind} {name!r} is defined twice in this scope, first in line {taken[name].line}"
        hint = "names in unions, scaffolds and chat tags belong to the scope around them: rename one of the two"
        raise fault(message, element.at, name=name, hint=hint)
    taken[name] = element.at
    return name


def _refuse_text(child: Chars, element: Element) -> None:
    if child.text.strip(SPACE):
        raise fault(f"text cannot stand directly in <{element.tag}>", child.at, hint="put it into a module")


def _source_path(src: str, source: Path | None, at: Location, name: str) -> Path:
    """The file `src`, which must lie below the folder of the schema file `source`."""
    what = f"module {name!r}, src={src!r}"
    if source is None:
        raise fault(f"{what}: this schema was not read from a file", at, name=name, hint="load the schema from a file")
    try:
        schema_file = source.resolve()
        path = (schema_file.parent / src).resolve()
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop of symbolic links, before Python 3.13
        raise fault(f"{what}: the file cannot be read: {exc}", at, name=name) from exc
    if not path.is_relative_to(schema_file.parent):
        hint = "only files below the schema's folder can be named"
        raise fault(f"{what}: the file lies outside the schema's folder", at, name=name, hint=hint)
    if path == schema_file:
        raise fault(f"{what}: this is the schema itself", at, name=name, hint="name a file with the module's text")
    return path
