"""Checks a prompt against its schema: which modules are imported, and with which arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_pc.errors import PMLError
from edge_pc.pml.faults import fault, nearest
from edge_pc.pml.model import (
    FreeText,
    Import,
    Location,
    Module,
    Node,
    Parameter,
    Prompt,
    Role,
    Scaffold,
    Schema,
    Selection,
    Turn,
    Union,
)
from edge_pc.pml.xml import SPACE

# Where a prompt that was built, not read, has its parts.
_NOWHERE = Location(None, 0, 0)


def select(prompt: Prompt, schema: Schema) -> Selection:
    """Look up everything that `prompt` imports.

    Arguments lose white space at their ends: the schema says whether a space opens them.

    Raises:
        PMLError: the prompt is for another schema; a module or a parameter is unknown, given twice or without what it
            needs; two members of one union are imported.
    """
    if prompt.schema != schema.name:
        message = f"the prompt is for schema {prompt.schema!r}, not for {schema.name!r}"
        raise fault(message, prompt.at, name=prompt.schema, among=(schema.name,))
    found = _Selector(schema)
    found.select(prompt.imports, schema.children, None)
    modules = tuple(path for path in found.paths if path in found.locations)
    return Selection(modules, found.arguments, prompt.free_text, prompt.at, found.locations)


def build_prompt(schema: Schema, imports: Sequence[str], arguments: Mapping[str, str], text: str) -> Prompt:
    """Make a prompt from parts.

    Args:
        schema: what the prompt is for.
        imports: module paths (`travel-plan/domestic`); a path imports its parents too.
        arguments: `path.parameter` → text.
        text: free text, kept as it is; the user's turn where the schema uses chat tags, else plain.

    Raises:
        PMLError: an argument's module is not imported. All else is checked by `select`.
    """
    tree: dict[str, Import] = {}
    for path in imports:
        names = path.split("/")
        for depth in range(1, len(names) + 1):
            prefix = "/".join(names[:depth])
            tree.setdefault(prefix, Import(names[depth - 1], {}, (), _NOWHERE))
    for target, value in arguments.items():
        path, parameter = _split_target(target, schema)
        if path not in tree:
            message = f"argument {target!r}: module {path!r} is not imported"
            raise fault(message, _NOWHERE, name=path, among=tree, hint="name it among the imports")
        tree[path].arguments[parameter] = value
    role: Role | None = "user" if any(isinstance(node, Turn) for node in schema.children) else None
    free_text = (FreeText(text, role, _NOWHERE),) if text else ()
    return Prompt(schema.name, _nested(tree, ""), free_text, _NOWHERE)


def _nested(tree: Mapping[str, Import], parent: str) -> tuple[Import, ...]:
    return tuple(
        Import(item.name, item.arguments, _nested(tree, f"{path}/"), item.at)
        for path, item in tree.items()
        if path == f"{parent}{item.name}"
    )


def _split_target(target: str, schema: Schema) -> tuple[str, str]:
    """Split `path.parameter`; names hold points too (`unit.py`), so the schema decides where."""
    modules = schema.modules()
    points = [index for index, character in enumerate(target) if character == "."]
    if not points:
        hint = "write module.parameter, or outer/inner.parameter for a module inside another"
        raise fault(f"argument {target!r} does not say which module it is for", _NOWHERE, name=target, hint=hint)
    splits = [(target[:point], target[point + 1 :]) for point in points]
    for path, parameter in splits:
        if path in modules and any(slot.name == parameter for slot in _parameters(modules[path])):
            return path, parameter
    # Nothing fits: name the module that exists, so that `select` can say what is wrong with the parameter.
    return next((split for split in reversed(splits) if split[0] in modules), splits[-1])


@dataclass(slots=True)
class _Scope:
    """What can be imported at one place: modules (with the union they belong to) and scaffolds by name."""

    modules: dict[str, tuple[Module, Union | None]] = field(default_factory=dict)
    scaffolds: dict[str, Scaffold] = field(default_factory=dict)

    def add(self, nodes: Sequence[Node]) -> _Scope:
        for node in nodes:
            if isinstance(node, Module):
                self.modules[node.name] = (node, None)
            elif isinstance(node, Union):
                self.modules.update((member.name, (member, node)) for member in node.members)
            elif isinstance(node, Scaffold):
                self.scaffolds[node.name] = node
                self.add(node.children)
            elif isinstance(node, Turn):
                self.add(node.children)
        return self


class _Selector:
    """Walks the imports of one prompt through the scopes of its schema."""

    def __init__(self, schema: Schema) -> None:
        self.paths = schema.modules()
        self.locations: dict[str, Location] = {}
        self.arguments: dict[tuple[str, str], str] = {}

    def select(self, imports: Sequence[Import], nodes: Sequence[Node], parent: Module | None) -> None:
        """Look up `imports` among `nodes`, which stand in `parent` or, for None, in the schema itself."""
        scope = _Scope().add(nodes)
        taken: dict[int, str] = {}  # the union's identity → its member
        for item in _without_scaffolds(imports, scope):
            if item.name not in scope.modules:
                raise self._unknown(item, scope, parent)
            module, union = scope.modules[item.name]
            if module.path in self.locations:
                first = self.locations[module.path].line
                where = f", first in line {first}" if first else ""
                raise fault(f"module {module.path!r} is imported twice{where}", item.at, name=item.name)
            if union is not None and taken.setdefault(id(union), item.name) != item.name:
                message = f"modules {taken[id(union)]!r} and {item.name!r} belong to one union: import one of them"
                raise fault(message, item.at, name=item.name)
            self.locations[module.path] = item.at
            self._bind(item, module)
            self.select(item.children, module.children, module)

    def _bind(self, item: Import, module: Module) -> None:
        slots = {slot.name: slot for slot in _parameters(module)}
        for name in item.arguments:
            if name not in slots:
                hint = f"it has: {', '.join(slots)}" if slots else "it has no parameters"
                message = f"module {module.path!r} has no parameter {name!r}"
                raise fault(message, item.at, name=name, among=slots, hint=hint)
        for name, slot in slots.items():
            value = item.arguments.get(name, slot.default)
            if value is None:
                message = f"module {module.path!r} needs an argument {name!r} (at most {slot.length} tokens)"
                raise fault(message, item.at, name=name, hint=f'write <{module.name} {name}="…"/>')
            self.arguments[module.path, name] = value.strip(SPACE)

    def _unknown(self, item: Import, scope: _Scope, parent: Module | None) -> PMLError:
        where = f"module {parent.path!r}" if parent else "the schema's top level"
        elsewhere = [path for path in self.paths if path.rpartition("/")[2] == item.name]
        if not elsewhere:
            message = f"unknown module {item.name!r}: {where} has none of that name"
            near = nearest(item.name, scope.modules) is not None
            among = scope.modules if near else [path.rpartition("/")[2] for path in self.paths]
            return fault(message, item.at, name=item.name, among=among, hint=_listing(item.name, scope))
        outer = elsewhere[0].rpartition("/")[0]
        if not outer:
            message = f"module {item.name!r} is at the schema's top level, not in {where}"
            return fault(message, item.at, name=item.name, hint=f"write <{item.name}/> outside of every other import")
        message = f"module {item.name!r} is inside {outer!r}: import its parent first"
        return fault(message, item.at, name=item.name, hint=f"write {_as_tags(elsewhere[0])}")


def _parameters(module: Module) -> Iterator[Parameter]:
    return (node for node in module.children if isinstance(node, Parameter))


def _without_scaffolds(imports: Sequence[Import], scope: _Scope) -> Iterator[Import]:
    """`imports` with every scaffold replaced by its members."""
    for item in imports:
        if not item.scaffold:
            yield item
            continue
        scaffold = scope.scaffolds.get(item.name)
        if scaffold is None:
            names = scope.scaffolds
            hint = f"there are: {', '.join(names)}" if names else "there is none here"
            raise fault(f"unknown scaffold {item.name!r}", item.at, name=item.name, among=names, hint=hint)
        members = {member.name: member for member in scaffold.members}
        for child in item.children:
            if child.name not in members:
                message = f"module {child.name!r} is not in scaffold {item.name!r}"
                raise fault(message, child.at, name=child.name, among=members)
            yield child
        said = {child.name for child in item.children}
        yield from (Import(name, {}, (), item.at) for name in members if name not in said)


def _listing(name: str, scope: _Scope) -> str:
    if name in scope.scaffolds:
        return f'a scaffold is imported by <scaffold name="{name}"/>'
    return f"there are: {', '.join(scope.modules)}" if scope.modules else "there is none"


def _as_tags(path: str) -> str:
    names = path.split("/")
    opened = "".join(f"<{name}>" for name in names[:-1])
    closed = "".join(f"</{name}>" for name in reversed(names[:-1]))
    return f"{opened}<{names[-1]}/>{closed}"
