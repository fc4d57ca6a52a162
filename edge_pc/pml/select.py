"""Checks a prompt against its schema: which modules are imported, and with which arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from edge_pc.errors import PMLError
from edge_pc.pml.faults import MAX_DEPTH, fault, listed, nearest, normal, too_deep
from edge_pc.pml.model import (
    NOWHERE,
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
    Walk,
)
from edge_pc.pml.xml import SPACE


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
        arguments: `path.parameter` → text. Names may hold points too: `path:parameter` can only be read in one way.
        text: free text, kept as it is; the user's turn where the schema uses chat tags, else plain.

    Raises:
        PMLError: an argument may be for two modules, is given twice, or is for a module that is not imported. All else
            is checked by `select`.
    """
    tree: dict[str, Import] = {}
    for path in map(normal, imports):
        names = path.split("/")
        if len(names) > MAX_DEPTH:
            raise too_deep(f"the module '{names[0]}/…/{names[-1]}'", NOWHERE, name=path)
        for depth in range(1, len(names) + 1):
            tree.setdefault("/".join(names[:depth]), Import(names[depth - 1], {}, (), NOWHERE))
    for target, value in arguments.items():
        path, parameter = _split_target(normal(target), schema, tree)
        if path not in tree:
            message = f"argument {target!r}: module {path!r} is not imported"
            raise fault(message, NOWHERE, name=path, among=tree, hint="import it too")
        if parameter in tree[path].arguments:
            raise fault(f"argument {parameter!r} of module {path!r} is given twice", NOWHERE, name=parameter)
        tree[path].arguments[parameter] = value
    role: Role | None = "user" if any(isinstance(node, Turn) for node in schema.children) else None
    free_text = (FreeText(text, role, NOWHERE),) if text else ()
    return Prompt(schema.name, _nested(tree, ""), free_text, NOWHERE)


def _nested(tree: Mapping[str, Import], parent: str) -> tuple[Import, ...]:
    return tuple(
        Import(item.name, item.arguments, _nested(tree, f"{path}/"), item.at)
        for path, item in tree.items()
        if path == f"{parent}{item.name}"
    )


def _split_target(target: str, schema: Schema, imported: Collection[str]) -> tuple[str, str]:
    """Split `path:parameter`, or `path.parameter`: names hold points too (`unit.py`), so the schema decides where."""
    if ":" in target:
        path, _, parameter = target.partition(":")
        return path, parameter
    splits = [(target[:index], target[index + 1 :]) for index, character in enumerate(target) if character == "."]
    if not splits:
        hint = "write module.parameter, or outer/inner.parameter for a module inside another"
        raise fault(f"argument {target!r} does not say which module it is for", NOWHERE, name=target, hint=hint)
    modules = schema.modules()
    known = [split for split in splits if split[0] in modules]
    fitting = [split for split in known if split[1] in _parameters(modules[split[0]])]
    wanted = [split for split in fitting if split[0] in imported]
    if len(wanted) > 1:
        readings = " or ".join(f"parameter {parameter!r} of module {path!r}" for path, parameter in wanted)
        hint = f"write {' or '.join(':'.join(split) for split in wanted)}"
        raise fault(f"argument {target!r} may mean {readings}", NOWHERE, name=target, hint=hint)
    # Where nothing fits, the longest name of a module lets `select` say what is wrong with the parameter.
    return next(iter([*wanted, *fitting, *known[::-1], splits[-1]]))


class _Scope(Walk["Union | None"]):
    """What can be imported at one place: modules (with the union they belong to) and scaffolds by name."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.modules: dict[str, tuple[Module, Union | None]] = {}
        self.scaffolds: dict[str, Scaffold] = {}
        self.nodes(nodes, "", None)

    def module(self, node: Module, path: str, place: Union | None) -> Union | None:
        self.modules[node.name] = (node, place)
        return place

    def union(self, node: Union, path: str, place: Union | None) -> Union | None:
        self.branches(node, path, node)
        return place

    def scaffold(self, node: Scaffold, path: str, place: Union | None) -> Union | None:
        self.scaffolds[node.name] = node
        return super().scaffold(node, path, place)


class _Selector:
    """Walks the imports of one prompt through the scopes of its schema."""

    def __init__(self, schema: Schema) -> None:
        self.paths = schema.modules()
        self.locations: dict[str, Location] = {}
        self.arguments: dict[tuple[str, str], str] = {}

    def select(self, imports: Sequence[Import], nodes: Sequence[Node], parent: Module | None) -> None:
        """Look up `imports` among `nodes`, which stand in `parent` or, for None, in the schema itself."""
        scope = _Scope(nodes)
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
        slots = _parameters(module)
        for name in item.arguments:
            if name not in slots:
                hint = f"it has: {listed(slots)}" if slots else "it has no parameters"
                message = f"module {module.path!r} has no parameter {name!r}"
                raise fault(message, item.at, name=name, among=slots, hint=hint)
        for name, slot in slots.items():
            value = item.arguments.get(name, slot.default)
            if value is None:
                message = f"module {module.path!r} needs an argument {name!r} (at most {slot.length} tokens)"
                point = ":" if "." in module.path + name else "."
                hint = _either(item, f'write <{module.name} {name}="…"/>', f"give it as {module.path}{point}{name}")
                raise fault(message, item.at, name=name, hint=hint)
            self.arguments[module.path, name] = value.strip(SPACE)

    def _unknown(self, item: Import, scope: _Scope, parent: Module | None) -> PMLError:
        where = f"module {parent.path!r}" if parent else "the schema's top level"
        elsewhere = [path for path in self.paths if path.rpartition("/")[2] == item.name]
        if not elsewhere:
            message = f"unknown module {item.name!r}: {where} has no module of that name"
            near = nearest(item.name, scope.modules) is not None
            among = scope.modules if near else [path.rpartition("/")[2] for path in self.paths]
            return fault(message, item.at, name=item.name, among=among, hint=_listing(item, scope))
        path = elsewhere[0]
        outer = path.rpartition("/")[0]
        if outer:
            message = f"module {item.name!r} is inside {outer!r}: import its parent first"
            hint = _either(item, f"write {_as_tags(path)}", f"import {path}")
        else:
            message = f"module {item.name!r} is at the schema's top level, not in {where}"
            hint = _either(item, f"write <{item.name}/> outside all other imports", f"import {path}")
        return fault(message, item.at, name=item.name, hint=hint)


def _parameters(module: Module) -> dict[str, Parameter]:
    return {node.name: node for node in module.children if isinstance(node, Parameter)}


def _either(item: Import, written: str, built: str) -> str:
    """What to do: `written` in a prompt that was read, `built` in one that was made from parts."""
    return built if item.at == NOWHERE else written


def _without_scaffolds(imports: Sequence[Import], scope: _Scope) -> Iterator[Import]:
    """`imports` with every scaffold replaced by its members."""
    for item in imports:
        if not item.scaffold:
            yield item
            continue
        scaffold = scope.scaffolds.get(item.name)
        if scaffold is None:
            names = scope.scaffolds
            hint = f"there are: {listed(names)}" if names else "there are none here"
            raise fault(f"unknown scaffold {item.name!r}", item.at, name=item.name, among=names, hint=hint)
        members = {member.name: member for member in scaffold.members}
        for child in item.children:
            if child.name not in members:
                message = f"module {child.name!r} is not in scaffold {item.name!r}"
                raise fault(message, child.at, name=child.name, among=members)
            yield child
        said = {child.name for child in item.children}
        yield from (Import(name, {}, (), item.at) for name in members if name not in said)


def _listing(item: Import, scope: _Scope) -> str:
    if item.name in scope.scaffolds:
        members = ", ".join(member.path for member in scope.scaffolds[item.name].members)
        return _either(item, f'a scaffold is imported by <scaffold name="{item.name}"/>', f"import {members}")
    return f"there are: {listed(scope.modules)}" if scope.modules else "there are none"


def _as_tags(path: str) -> str:
    names = path.split("/")
    opened = "".join(f"<{name}>" for name in names[:-1])
    closed = "".join(f"</{name}>" for name in reversed(names[:-1]))
    return f"{opened}<{names[-1]}/>{closed}"
