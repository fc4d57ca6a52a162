"""Properties of the parser: a written tree reads back as itself, and nothing raises anything but `PMLError`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from xml.sax.saxutils import escape, quoteattr

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edge_pc.errors import PMLError
from edge_pc.pml import Schema, Selection, parse_prompt, parse_schema, select
from edge_pc.pml.model import Location, Module, Node, Parameter, Scaffold, Text, Turn, Union
from edge_pc.pml.text import dedent

# Nothing here depends on how fast the machine is.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOWHERE = Location(None, 1, 1)
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs"], exclude_characters="\ufffe\uffff"), min_size=1)
NAMES = st.integers(0, 999).map("m{}".format)


# --- trees whose texts all follow a space, so that the written form is the only one ---------------------------------


def text_nodes() -> st.SearchStrategy[Node]:
    lines = st.lists(WORDS, min_size=1, max_size=3).map("\n".join)
    return lines.map(lambda text: Text(f" {text}", NOWHERE))


def parameters() -> st.SearchStrategy[Node]:
    return st.builds(Parameter, NAMES, st.integers(1, 999), st.none() | WORDS, st.just(True), st.just(NOWHERE))


def modules(depth: int, cache: st.SearchStrategy[bool] | None = None) -> st.SearchStrategy[Module]:
    inner = text_nodes() | parameters()
    if depth:
        inner |= modules(depth - 1) | unions(depth - 1) | scaffolds(depth - 1)
    children = st.lists(inner, max_size=4).map(tuple)
    return st.builds(Module, NAMES, st.just(""), children, st.booleans() if cache is None else cache, st.just(NOWHERE))


def unions(depth: int) -> st.SearchStrategy[Node]:
    members = st.lists(modules(depth), min_size=1, max_size=3).map(tuple)
    return st.builds(Union, members, st.just(NOWHERE))


def scaffolds(depth: int) -> st.SearchStrategy[Node]:
    cached = st.just(True)
    children = st.tuples(modules(depth, cached), text_nodes(), modules(depth, cached))
    return st.builds(Scaffold, NAMES, children, st.just(NOWHERE))


def turns() -> st.SearchStrategy[Node]:
    children = st.lists(modules(1) | unions(1) | scaffolds(1), max_size=3).map(tuple)
    return st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), children, st.just(NOWHERE))


SCHEMAS = st.builds(
    Schema,
    st.just("s"),
    st.lists(modules(2) | unions(1) | scaffolds(1) | turns() | text_nodes(), max_size=5).map(tuple),
    st.just(NOWHERE),
)


def tidy(schema: Schema) -> Schema:
    """`schema` as the parser gives it: unique names, paths, one text where two would touch, no space at borders."""
    tidier = _Tidier()
    return replace(schema, children=tidier.nodes(schema.children, ""))


class _Tidier:
    def __init__(self) -> None:
        self.count = 0
        self.started = False

    def name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def nodes(self, nodes: tuple[Node, ...], prefix: str) -> tuple[Node, ...]:
        result: list[Node] = []
        for node in nodes:
            if isinstance(node, Text):
                if result and isinstance(result[-1], Text):
                    continue
                node = replace(node, text=node.text if self.started else node.text[1:])
                self.started = True
            elif isinstance(node, Parameter):
                node = replace(node, name=self.name(), space_before=self.started)
                self.started = True
            elif isinstance(node, Module):
                node = self.module(node, prefix)
            elif isinstance(node, Union):
                node = self.union(node, prefix)
            elif isinstance(node, Scaffold):
                node = replace(node, name=self.name(), children=self.nodes(node.children, prefix))
            else:
                self.started = False
                node = replace(node, children=self.nodes(node.children, prefix))
                self.started = False
            result.append(node)
        return tuple(result)

    def module(self, node: Module, prefix: str) -> Module:
        name = self.name()
        path = f"{prefix}{name}"
        return replace(node, name=name, path=path, children=self.nodes(node.children, f"{path}/"))

    def union(self, node: Union, prefix: str) -> Union:
        before, after, members = self.started, False, []
        for member in node.members:
            self.started = before
            members.append(self.module(member, prefix))
            after = after or self.started
        self.started = after
        return replace(node, members=tuple(members))


def write(node: Node, draw: st.DataObject) -> str:
    """PML for `node`, in one of its spellings, with white space around every text and tag."""
    if isinstance(node, Text):
        return draw.draw(spellings(node.text.strip(" ")))
    if isinstance(node, Parameter):
        tag, length = draw.draw(st.sampled_from([("param", "len"), ("parameter", "length")]))
        opened = f'{tag} name="{node.name}" {length}="{node.length}"'
        if node.default is None:
            return f"<{opened}/>"
        inner = f"<{opened}>{escape(node.default)}</{tag}>"
        attributes = [f"<{opened} {name}={quoteattr(node.default)}/>" for name in ("default", "scaffold")]
        return draw.draw(st.sampled_from([inner, *attributes]))
    if isinstance(node, Union):
        return f"<union>{write_all(node.members, draw)}</union>"
    inside = write_all(node.children, draw)
    if isinstance(node, Turn):
        return f"<{node.role}>{inside}</{node.role}>"
    if isinstance(node, Scaffold):
        return f'<scaffold name="{node.name}">{inside}</scaffold>'
    cache = "" if node.cache else ' cache="false"'
    return f'<module name="{node.name}"{cache}>{inside}</module>'


def spellings(text: str) -> st.SearchStrategy[str]:
    cdata = "<![CDATA[" + text.replace("]]>", "]]]]><![CDATA[>") + "]]>"
    return st.sampled_from([escape(text), cdata, f"<!-- x -->{escape(text)}<?y z?>"])


def write_all(nodes: tuple[Node, ...], draw: st.DataObject) -> str:
    spaces = st.sampled_from(["\n", "\n  ", " \n\n", "\r\n\t"])
    return draw.draw(spaces) + "".join(write(node, draw) + draw.draw(spaces) for node in nodes)


def without_places(node: Node) -> Node:
    node = replace(node, at=NOWHERE)
    if isinstance(node, Union):
        return replace(node, members=tuple(without_places(member) for member in node.members))
    if isinstance(node, Text | Parameter):
        return node
    return replace(node, children=tuple(without_places(child) for child in node.children))


@patient
@given(SCHEMAS.map(tidy), st.data())
def test_a_written_schema_reads_back_as_itself(schema: Schema, data: st.DataObject) -> None:
    text = f'<schema name="s">{write_all(schema.children, data)}</schema>'
    read = parse_schema(text)
    assert tuple(without_places(child) for child in read.children) == schema.children
    assert list(read.modules()) == list(schema.modules())


# --- whatever is given --------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from([
    *("<", ">", "&", '"', "'", "/", "=", "\0", "\ufeff", "\ud800", "]]>", "<![CDATA[", "<!--", "-->", "<?x?>", "&lt;"),
    *('<schema name="s">', "</schema>", '<prompt schema="s">', "</prompt>", '<module name="m">', "</module>", "<m>"),
    *("<union>", "</union>", '<param name="p" len="1"/>', "<user>", "</user>", "<m/>", '<m p="1"/>', "</m>", "\n "),
    *('<scaffold name="c">', "</scaffold>", '<scaffold name="c"/>', "<!DOCTYPE a>", "&#0;", "&a;", ' xml:space="x"'),
])  # fmt: skip
NOISE = st.lists(FRAGMENTS | st.text(st.characters()), max_size=20).map("".join)
BASE = parse_schema('<schema name="s"><module name="m">a <param name="p" len="1">b</param></module></schema>')


@patient
@given(NOISE | NOISE.map('<schema name="s">{}</schema>'.format) | st.binary().map(lambda data: data.decode("latin-1")))
@example("<a" * 1000)
@example('<?xml version="1.0" encoding="utf-16"?><schema name="s"/>')
def test_no_text_raises_anything_but_a_pml_error_as_a_schema(text: str) -> None:
    with suppress(PMLError):
        assert isinstance(parse_schema(text), Schema)


@patient
@given(NOISE | NOISE.map('<prompt schema="s">{}</prompt>'.format))
def test_no_text_raises_anything_but_a_pml_error_as_a_prompt(text: str) -> None:
    with suppress(PMLError):
        assert isinstance(select(parse_prompt(text), BASE), Selection)


# --- texts --------------------------------------------------------------------------------------------------------

LINES = st.text(st.sampled_from(" \t\nab<&"), max_size=40)


@patient
@given(LINES)
def test_only_white_space_is_ever_lost(text: str) -> None:
    schema = parse_schema(f'<schema name="s">x {escape(text)}</schema>')
    (node,) = schema.children
    assert isinstance(node, Text)
    assert "".join(node.text.split()) == "x" + "".join(text.split())


@patient
@given(LINES)
def test_preserved_text_is_kept_whole(text: str) -> None:
    schema = parse_schema(f'<schema name="s" xml:space="preserve">x{escape(text)}</schema>')
    assert [node.text for node in schema.children if isinstance(node, Text)] == [f"x{text}"]


@patient
@given(LINES)
def test_dedenting_twice_changes_nothing_more(text: str) -> None:
    assert dedent(dedent(text)) == dedent(text)


@patient
@given(LINES)
def test_dedenting_keeps_lines_and_their_relative_indentation(text: str) -> None:
    before, after = text.split("\n"), dedent(text).split("\n")
    assert [line.strip() for line in before] == [line.strip() for line in after]
    removed = {len(b) - len(a) for b, a in zip(before[1:], after[1:], strict=True) if b.strip()}
    assert len(removed) <= 1
