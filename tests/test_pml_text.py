"""White space: what of it reaches the model, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_pc.pml import parse_schema
from edge_pc.pml.model import Module, Node, Parameter, Scaffold, Text, Turn, Union
from edge_pc.pml.text import dedent


def spelled(nodes: tuple[Node, ...]) -> list[str]:
    """Every text in document order; a parameter as {name} with the space that opens its argument."""
    texts: list[str] = []
    for node in nodes:
        if isinstance(node, Text):
            texts.append(node.text)
        elif isinstance(node, Parameter):
            texts.append(f"{' ' if node.space_before else ''}{{{node.name}}}")
        elif isinstance(node, Union):
            texts += spelled(node.members)
        elif isinstance(node, Module | Scaffold | Turn):
            texts += spelled(node.children)
    return texts


def texts(body: str, attributes: str = "") -> list[str]:
    return spelled(parse_schema(f'<schema name="s"{attributes}>{body}</schema>').children)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n    a\n    b\n", "\na\nb\n"),
        ("\n    a\n      b\n    c", "\na\n  b\nc"),
        ("\n    a\n\n  \n    b\n", "\na\n\n\nb\n"),
        ("\n\ta\n\t\tb", "\na\n\tb"),
        ("\n\ta\n    b", "\n\ta\n    b"),
        ("\n  a  \n  b", "\na  \nb"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("  def f():\n    return 1", "  def f():\n    return 1"),
        ("a", "a"),
        ("", ""),
        (" \n ", " \n"),
    ],
)
def test_dedent(text: str, expected: str) -> None:
    assert dedent(text) == expected


def test_the_space_between_two_texts_opens_the_second() -> None:
    assert texts('A\n  <module name="m">\n B \n</module>  C') == ["A", " B", " C"]


def test_without_white_space_texts_touch() -> None:
    assert texts('A<module name="m">B</module>C') == ["A", "B", "C"]


@pytest.mark.parametrize("body", ['A<module name="m"> B</module>', 'A <module name="m">B</module>'])
def test_tags_are_looked_through(body: str) -> None:
    assert texts(body) == ["A", " B"]


def test_a_schema_begins_without_space() -> None:
    assert texts('\n  <module name="m">\n  A</module>') == ["A"]


def test_a_chat_tag_begins_without_space_and_what_follows_it_too() -> None:
    assert texts("A <user> B </user> C <assistant>\n D\n</assistant>") == ["A", "B", "C", "D"]


def test_space_before_a_parameter_opens_its_argument() -> None:
    body = '<module name="m">from <param name="a" length="1"/> to<param name="b" length="1"/>, and'
    assert texts(body + "</module>") == ["from", " {a}", " to", "{b}", ", and"]


def test_space_inside_a_parameter_counts_as_space_around_it() -> None:
    assert texts('<module name="m">a<param name="p" length="2"> x y </param>b</module>') == ["a", " {p}", " b"]


def test_the_default_text_has_no_outer_space() -> None:
    (module,) = parse_schema(
        '<schema name="s"><module name="m"><param name="p" length="2"> x  y </param></module></schema>'
    ).children
    assert isinstance(module, Module)
    (slot,) = module.children
    assert isinstance(slot, Parameter)
    assert slot.default == "x  y"


def test_each_member_of_a_union_follows_what_stands_before_the_union() -> None:
    body = '<union><module name="a">1</module><module name="b">2</module></union>'
    assert texts(f"x {body}y") == ["x", " 1", " 2", "y"]
    assert texts(f"x{body} y") == ["x", "1", "2", " y"]


def test_what_follows_a_union_is_apart_when_any_member_ends_in_space() -> None:
    assert texts('x<union><module name="a">1 </module><module name="b">2</module></union>y') == ["x", "1", "2", " y"]


def test_a_line_that_begins_with_a_parameter_counts_as_a_line_of_text() -> None:
    body = '<module name="m">\n      a\n    <param name="p" length="1"/> b\n        c\n</module>'
    assert texts(body) == ["a", " {p}", " b\n    c"]


def test_indentation_is_common_to_all_texts_of_an_element() -> None:
    body = '<module name="m">\n  class A:\n    x = <param name="p" length="1"/>\n    y = 2\n</module>'
    assert texts(body) == ["class A:\n  x =", " {p}", " y = 2"]


def test_a_line_that_begins_with_a_module_does_not_count() -> None:
    assert texts('\n    a\n    b\n<module name="m">c</module>\n    d\n      e') == ["a\nb", " c", " d\n  e"]


def test_preserve_keeps_all_and_is_inherited() -> None:
    body = '<module name="m" xml:space="preserve">\n  a\n <module name="n"> b </module> </module>'
    assert texts(f"x{body}") == ["x", "\n  a\n ", " b ", " "]


def test_default_ends_preserve() -> None:
    body = ' a <module name="m" xml:space="default">  b  </module>'
    assert texts(body, ' xml:space="preserve"') == [" a ", " b"]


def test_space_before_a_preserved_text_is_not_lost() -> None:
    assert texts('a <module name="m" xml:space="preserve">b</module>') == ["a", " b"]
    assert texts('a <module name="m" xml:space="preserve">\nb</module>') == ["a", "\nb"]


def test_comments_cdata_and_instructions_do_not_split_a_text() -> None:
    assert texts("a <!-- no -->b<?no no?><![CDATA[ c<d]]> &amp; e") == ["a b c<d & e"]


def test_cdata_is_text_under_the_same_rules() -> None:
    cdata = texts('<module name="m">\n<![CDATA[\n    if a < b:\n        c\n]]></module>')
    escaped = texts('<module name="m">\n\n    if a &lt; b:\n        c\n</module>')
    assert cdata == escaped == ["if a < b:\n    c"]


def test_other_spaces_are_text() -> None:
    assert texts("\u00a0a\u3000") == ["\u00a0a\u3000"]


def test_line_ends_are_line_feeds() -> None:
    assert texts("\r\n  a\r\n  b\r\n") == ["a\nb"]


def test_a_file_is_kept_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_bytes(b"\xef\xbb\xbf  a < b && c\r\n\r\n    d\n\n")
    schema = parse_schema('<schema name="s"><module name="m" src="f.py"/> end</schema>', tmp_path / "s.xml")
    assert spelled(schema.children) == ["  a < b && c\n\n    d\n\n", " end"]


def test_a_file_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import os\n")
    for body, expected in [("x <module", "\nimport os\n"), ("x<module", "import os\n"), ("<module", "import os\n")]:
        schema = parse_schema(f'<schema name="s">{body} name="m" src="f.py"/></schema>', tmp_path / "s.xml")
        assert spelled(schema.children)[-1] == expected
