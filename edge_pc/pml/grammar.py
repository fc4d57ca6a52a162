"""The elements of PML as tables: what the parser checks against, and what `schemas/README.md` is checked against."""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.pml.faults import fault, normal
from edge_pc.pml.model import ROLES
from edge_pc.pml.xml import MARKUP_HINT, Element


@dataclass(frozen=True, slots=True)
class ElementRule:
    """What an element may hold.

    Attributes:
        required, optional: attribute names.
        children: tags of the elements that may stand directly in it.
        imports: whether elements named after modules may, as in a prompt.
        text: whether text may.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    imports: bool = False
    text: bool = True

    @property
    def attributes(self) -> tuple[str, ...]:
        return self.required + self.optional


_TURN = ElementRule(children=("module", "union", "scaffold"))

SCHEMA_ELEMENTS: dict[str, ElementRule] = {
    "schema": ElementRule(required=("name",), children=("module", "union", "scaffold", *ROLES)),
    "module": ElementRule(
        required=("name",), optional=("src", "cache"), children=("module", "union", "scaffold", "param")
    ),
    "union": ElementRule(optional=("scaffold",), children=("module",), text=False),
    "scaffold": ElementRule(required=("name",), children=("module",)),
    "param": ElementRule(required=("name", "length"), optional=("default",)),
    **dict.fromkeys(ROLES, _TURN),
}

PROMPT_ELEMENTS: dict[str, ElementRule] = {
    "prompt": ElementRule(required=("schema",), children=("scaffold", *ROLES), imports=True),
    "scaffold": ElementRule(required=("name",), imports=True, text=False),
    **dict.fromkeys(ROLES, ElementRule(children=("scaffold",), imports=True)),
}
# An element of a prompt that is named after a module; its attributes are arguments.
IMPORT = ElementRule(children=("scaffold",), imports=True, text=False)

# The other dialect: spelling → the name used here.
TAG_ALIASES = {"parameter": "param"}
ATTRIBUTE_ALIASES = {"param": {"len": "length", "scaffold": "default"}}

# Attributes whose value is a name.
_NAMING = frozenset({"name", "schema", "scaffold"})

RESERVED = frozenset({*SCHEMA_ELEMENTS, *PROMPT_ELEMENTS, *TAG_ALIASES})

# Why an element cannot stand where someone may well put it: (parent, child) → what to do instead.
_ADVICE: dict[tuple[str, str], str] = {
    ("schema", "param"): "put the parameter into a module: only a module's text can hold arguments",
    ("union", "union"): "put the inner union into a module of the outer one",
    ("union", "scaffold"): "members of a union are never present together, so they cannot be encoded together",
    ("scaffold", "union"): "a union is never imported whole, a scaffold is: put the union into one of its modules",
    ("scaffold", "param"): "put the parameter into a module of the scaffold",
    **{("module", role): "put the module inside the chat tag" for role in ROLES},
    **{("scaffold", role): "put the scaffold inside the chat tag" for role in ROLES},
    **{(outer, inner): "close one chat tag before the next one opens" for outer in ROLES for inner in ROLES},
}


def canonical(tag: str) -> str:
    """The name used here for a tag of either dialect."""
    return TAG_ALIASES.get(tag, tag)


def check_place(element: Element, parent: Element, rule: ElementRule) -> None:
    """Check that `element` is known and may stand in `parent`, of which `rule` speaks.

    Raises:
        PMLError: it may not.
    """
    tag = canonical(element.tag)
    if tag in rule.children or (rule.imports and tag not in RESERVED):
        return
    allowed = ", ".join(f"<{child}>" for child in rule.children)
    hint = f"allowed here: {allowed}" if allowed else "no element is allowed here"
    if tag not in RESERVED:
        message, hint = f"unknown element <{element.tag}> in <{parent.tag}>", f"{hint}; {MARKUP_HINT}"
        raise fault(message, element.at, name=element.tag, among=rule.children, hint=hint)
    if rule.imports and tag not in ROLES:
        hint = "a prompt imports a module by a tag of its name, with arguments as attributes"
    hint = _ADVICE.get((canonical(parent.tag), tag), hint)
    raise fault(f"<{element.tag}> cannot stand directly in <{parent.tag}>", element.at, name=element.tag, hint=hint)


def read_attributes(element: Element, rule: ElementRule) -> dict[str, str]:
    """The attributes of `element` by the names used here.

    Raises:
        PMLError: one is unknown, given twice in two spellings, or missing.
    """
    aliases = ATTRIBUTE_ALIASES.get(canonical(element.tag), {})
    known: dict[str, str] = {}
    for spelling, value in element.attributes.items():
        name = aliases.get(spelling, spelling)
        if name not in rule.attributes:
            raise fault(
                f"unknown attribute {spelling!r} of <{element.tag}>",
                element.at,
                name=spelling,
                among=(*rule.attributes, *aliases),
                hint=f"it may have: {', '.join(rule.attributes)}" if rule.attributes else "it has no attributes",
            )
        if name in known:
            raise fault(f"<{element.tag}> has {name!r} twice, in two spellings", element.at, name=spelling)
        known[name] = normal(value) if name in _NAMING else value
    for name in rule.required:
        if name not in known:
            raise fault(f"<{element.tag}> needs the attribute {name!r}", element.at, name=name)
    return known
