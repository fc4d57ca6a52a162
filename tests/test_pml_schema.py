"""Schemas: every element in both dialects, and every fault with its place and the nearest valid name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_pc.errors import PMLError
from edge_pc.pml import Prompt, Schema, load_schema, parse_schema, select
from edge_pc.pml.model import NOWHERE, Location, Module, Node, Parameter, Scaffold, Text, Turn, Union


def module(body: str) -> str:
    return f'<schema name="s"><module name="m">{body}</module></schema>'


def test_the_tree_of_a_schema() -> None:
    schema = parse_schema(
        '<schema name="trip">A<user><module name="plan">B<union><module name="sea">C</module></union></module>'
        '<scaffold name="pair"><module name="x">D</module>E<module name="y" cache="true">F</module></scaffold></user>'
        '<module name="unit.py" cache="false">G</module></schema>'
    )
    assert schema.name == "trip"
    anonymous, turn, last = schema.children
    assert isinstance(anonymous, Text)
    assert isinstance(turn, Turn)
    assert turn.role == "user"
    plan, pair = turn.children
    assert isinstance(plan, Module)
    assert isinstance(plan.children[1], Union)
    assert isinstance(pair, Scaffold)
    assert [member.name for member in pair.members] == ["x", "y"]
    assert isinstance(last, Module)
    assert not last.cache
    assert list(schema.modules()) == ["plan", "plan/sea", "x", "y", "unit.py"]


def test_places_are_those_of_the_text() -> None:
    schema = parse_schema(
        '<schema name="s">\n\n  ünd\n  <module name="m">\n    <!-- --> b</module></schema>', Path("a")
    )
    text, node = schema.children
    assert isinstance(node, Module)
    assert schema.at == Location(Path("a"), 1, 1)
    assert text.at == Location(Path("a"), 3, 3)
    assert node.at == Location(Path("a"), 4, 3)
    assert node.children[0].at == Location(Path("a"), 5, 14)


@pytest.mark.parametrize(
    ("spelling", "default"),
    [
        ('<param name="p" length="5"/>', None),
        ('<param name="p" len="5"></param>', None),
        ('<parameter name="p" length="05"/>', None),
        ('<parameter name="p" len=" 5 "> </parameter>', None),
        ('<param name="p" len="5">three days</param>', "three days"),
        ('<param name="p" len="5" default=" three days "/>', "three days"),
        ('<parameter name="p" length="5" scaffold="three days"/>', "three days"),
        ('<param name="p" len="5" default=""/>', ""),
    ],
)
def test_both_dialects_of_parameters(spelling: str, default: str | None) -> None:
    (node,) = parse_schema(module(spelling)).children
    assert isinstance(node, Module)
    (slot,) = node.children
    assert isinstance(slot, Parameter)
    assert (slot.name, slot.length, slot.default) == ("p", 5, default)


def test_the_favourite_of_a_union_is_accepted() -> None:
    parse_schema('<schema name="s"><union scaffold="b"><module name="a"/><module name="b"/></union></schema>')


def test_modules_in_different_scopes_may_share_a_name() -> None:
    inner = '<module name="x"/>'
    schema = parse_schema(
        f'<schema name="s"><module name="a">{inner}</module><module name="x">{inner}</module></schema>'
    )
    assert list(schema.modules()) == ["a", "a/x", "x", "x/x"]


@pytest.mark.parametrize("name", ["unit.py", "_x", "a-b.c", "été", "模块", "Modules"])
def test_names(name: str) -> None:
    assert name in parse_schema(f'<schema name="s"><module name="{name}"/></schema>').modules()


# The schema, then line, column, name and nearest name of the fault, and words that the message or hint must hold.
FAULTS = [
    # Not XML
    ("", 1, 1, None, None, "no element"),
    ('<schema name="s">\n if i < n:\n</schema>', 2, 8, None, None, "CDATA"),
    ('<schema name="s">\n a && b</schema>', 2, 5, None, None, "src="),
    ('<schema name="s">\n for i<n and', 2, 7, None, None, "CDATA"),
    ('<schema name="s">\n <user></schema>', 2, 10, None, None, "<user>, opened in line 2, is not closed"),
    ('<schema name="s">\n <user>', 2, 8, None, None, "ends before <user>"),
    ('<schema name="s">&nbsp;</schema>', 1, 18, None, None, "entity"),
    ('<schema name="s">\n \ud800</schema>', 2, 2, None, None, "U+D800"),
    ('<schema name="s"></schema> x', 1, 28, None, None, "document element"),
    ('<schema name="s"><x:a/></schema>', 1, 18, None, None, "unbound prefix"),
    # Elements and attributes
    ("<scheme/>", 1, 1, "scheme", "schema", "expected <schema>"),
    ('<prompt schema="s"/>', 1, 1, "prompt", None, "this is a prompt"),
    ("<schema/>", 1, 1, "name", None, "needs the attribute 'name'"),
    ('<schema name="a b"/>', 1, 1, "a b", None, "XML name"),
    ('<schema name="s"><modul name="m"/></schema>', 1, 18, "modul", "module", "unknown element <modul>"),
    ('<schema name="s">\n<user><n/></user></schema>', 2, 7, "n", None, "CDATA"),
    ('<schema name="s"><module nam="m"/></schema>', 1, 18, "nam", "name", "unknown attribute"),
    ('<schema name="s"><user name="m"/></schema>', 1, 18, "name", None, "no attributes"),
    ('<schema name="s"><module/></schema>', 1, 18, "name", None, "needs the attribute"),
    ('<schema name="s"><module name="m" xml:space="keep"/></schema>', 1, 18, "xml:space", None, "preserve"),
    # Places
    ('<schema name="s"><param name="p" len="1"/></schema>', 1, 18, "param", None, "into a module"),
    ('<schema name="s"><user><parameter name="p" len="1"/></user></schema>', 1, 24, "parameter", None, "<module>"),
    (module("<user/>"), 1, 35, "user", None, "put the module inside the chat tag"),
    ('<schema name="s"><user><user/></user></schema>', 1, 24, "user", None, "close one chat tag"),
    ('<schema name="s"><schema name="t"/></schema>', 1, 18, "schema", None, "cannot stand"),
    ('<schema name="s"><union>x<module name="m"/></union></schema>', 1, 25, None, None, "into a module"),
    ('<schema name="s"><union/></schema>', 1, 18, None, None, "at least one module"),
    ('<schema name="s"><union><union/></union></schema>', 1, 25, "union", None, "into a module"),
    ('<schema name="s"><union><user/></union></schema>', 1, 25, "user", None, "<module>"),
    (module('<param name="p" len="1"><module name="n"/></param>'), 1, 59, "module", None, "no element"),
    ('<schema name="s"><scaffold name="c"><union/></scaffold></schema>', 1, 37, "union", None, "one of its modules"),
    ('<schema name="s"><scaffold name="c">x</scaffold></schema>', 1, 18, "c", None, "at least one module"),
    (
        '<schema name="s"><scaffold name="c"><module name="m" cache="false"/></scaffold></schema>',
        *(1, 37, "m", None, 'cache="false"'),
    ),
    # Names
    ('<schema name="s"><module name="2"/></schema>', 1, 18, "2", None, "XML name"),
    ('<schema name="s"><module name="a:b"/></schema>', 1, 18, "a:b", None, "XML name"),
    ('<schema name="s"><module name=""/></schema>', 1, 18, "", None, "XML name"),
    ('<schema name="s"><module name="user"/></schema>', 1, 18, "user", None, "PML's tag"),
    (
        '<schema name="s"><module name="m"/>\n<module name="m"/></schema>',
        2,
        1,
        "m",
        None,
        "twice in this scope, first in line 1",
    ),
    ('<schema name="s"><module name="m"/><union>\n<module name="m"/></union></schema>', 2, 1, "m", None, "twice"),
    ('<schema name="s"><module name="m"/><user>\n<module name="m"/></user></schema>', 2, 1, "m", None, "twice"),
    (
        '<schema name="s"><module name="m"/><scaffold name="c">\n<module name="m"/></scaffold></schema>',
        *(2, 1, "m", None, "twice"),
    ),
    (
        '<schema name="s"><scaffold name="c"><module name="a"/></scaffold>\n<scaffold name="c"/></schema>',
        *(2, 1, "c", None, "scaffold 'c' is defined twice"),
    ),
    (
        module('<param name="p" len="1"/>\n<param name="p" len="1"/>'),
        *(2, 1, "p", None, "parameter 'p' is defined twice"),
    ),
    (
        '<schema name="s"><union scaffold="beech"><module name="beach"/></union></schema>',
        *(1, 18, "beech", "beach", "names no member"),
    ),
    # Values
    (module('<param name="p" length="0"/>'), 1, 35, "p", None, "at least 1"),
    (module('<param name="p" length="-1"/>'), 1, 35, "p", None, "whole number"),
    (module('<param name="p" length="two"/>'), 1, 35, "p", None, "whole number"),
    (module(f'<param name="p" length="{"9" * 5000}"/>'), 1, 35, "p", None, "whole number"),
    (module('<param name="p"/>'), 1, 35, "length", None, "needs the attribute"),
    (module('<param name="p" len="1" length="1"/>'), 1, 35, "length", None, "twice"),
    (module('<param name="p" len="1" default="a">b</param>'), 1, 35, "p", None, "two default texts"),
    (module('<param name="p" len="1" default="a" scaffold="b"/>'), 1, 35, "scaffold", None, "twice"),
    ('<schema name="s"><module name="m" cache="no"/></schema>', 1, 18, "m", None, '"true" or "false"'),
    ('<schema name="s"><module name="m" src="f.txt"/></schema>', 1, 18, "m", None, "not read from a file"),
    ("<a>" * 200, 1, 193, "a", None, "64 levels"),
]


@pytest.mark.parametrize(("text", "line", "column", "name", "nearest", "words"), FAULTS)
def test_faults(text: str, line: int, column: int, name: str | None, nearest: str | None, words: str) -> None:
    with pytest.raises(PMLError) as caught:
        parse_schema(text)
    error = caught.value
    assert (error.line, error.column, error.name, error.nearest) == (line, column, name, nearest)
    assert words in str(error)
    assert f"<text>:{line}:{column}: " in str(error)
    assert nearest is None or f"did you mean {nearest!r}?" in str(error)


@pytest.mark.parametrize(
    "doctype",
    [
        "<!DOCTYPE schema>",
        '<!DOCTYPE schema [<!ENTITY a "boo"><!ENTITY b "&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>',
        '<!DOCTYPE schema [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE schema SYSTEM "http://example.invalid/pml.dtd">',
        '<!DOCTYPE schema [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]>',
    ],
)
def test_dtds_and_with_them_entities_are_refused(doctype: str) -> None:
    with pytest.raises(PMLError, match="DOCTYPE") as caught:
        parse_schema(f'\n{doctype}<schema name="s">&a;&c;</schema>')
    assert caught.value.line == 2


def test_a_schema_made_in_python_is_not_nested_deeper_than_one_that_is_read() -> None:
    def nested(depth: int) -> Schema:
        nodes: tuple[Node, ...] = ()
        for level in range(depth, 0, -1):
            path = "/".join("m" * level)
            nodes = (Module("m", path, nodes, True, NOWHERE),)
        return Schema("s", nodes, NOWHERE)

    deepest = nested(64)
    assert len(deepest.modules()) == 64
    assert select(Prompt("s", (), (), NOWHERE), deepest).modules == ()
    assert hash(deepest) == hash(nested(64))
    for depth in (65, 5000):
        with pytest.raises(PMLError, match="a module is nested more than 64 levels deep"):
            nested(depth)


def test_reading_pml_needs_nothing_slow() -> None:
    code = "import sys, edge_pc.pml; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "edge_pc.pml" in loaded
    assert not {"urllib.request", "numpy", "onnxruntime", "tokenizers"} & set(loaded)


class TestFiles:
    """`load_schema` and `src=`."""

    def load(self, folder: Path, src: str, content: str = "") -> Schema:
        file = folder / "s.xml"
        file.write_text(
            f'<schema name="s">\n<module name="m" src="{src}">{content}</module></schema>', encoding="utf-8"
        )
        return load_schema(file)

    def refused(self, folder: Path, src: str, words: str, content: str = "") -> None:
        with pytest.raises(PMLError, match=words) as caught:
            self.load(folder, src, content)
        error = caught.value
        assert (error.source, error.line, error.column, error.name) == (folder / "s.xml", 2, 1, "m")

    def test_a_file_below_the_schema(self, tmp_path: Path) -> None:
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "a" / "b" / "ü.txt").write_text('<module name="x"/> é &amp;', encoding="utf-8")
        (node,) = self.load(tmp_path, "a/b/ü.txt", " \n ").children
        assert isinstance(node, Module)
        assert [child.text for child in node.children if isinstance(child, Text)] == ['<module name="x"/> é &amp;']

    def test_an_empty_file_gives_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        (node,) = self.load(tmp_path, "f").children
        assert isinstance(node, Module)
        assert node.children == ()

    def test_what_is_not_a_file_below_the_schema(self, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        (folder / "sub").mkdir(parents=True)
        (tmp_path / "out.txt").write_text("secret")
        self.refused(folder, "../out.txt", "outside the schema's folder")
        self.refused(folder, "sub/../../out.txt", "outside the schema's folder")
        self.refused(folder, str(tmp_path / "out.txt"), "outside the schema's folder")
        self.refused(folder, "gone.txt", f"No such file or directory\n  hint: looked for {folder / 'gone.txt'}")
        self.refused(folder, "sub", "this is a folder")
        self.refused(folder, "", "this is a folder")
        self.refused(folder, "s.xml", "the schema itself")
        self.refused(folder, "x" * 5000, "cannot be read|no such file")

    def test_symbolic_links_are_followed_first(self, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (tmp_path / "out.txt").write_text("secret")
        (folder / "real.txt").write_text("text")
        (folder / "out").symlink_to(tmp_path / "out.txt")
        (folder / "ok").symlink_to("real.txt")
        (folder / "loop").symlink_to("loop")
        (folder / "self").symlink_to("s.xml")
        self.refused(folder, "out", "outside the schema's folder")
        self.refused(folder, "self", "the schema itself")
        self.refused(folder, "loop", "cannot be read|no such file")
        (node,) = self.load(folder, "ok").children
        assert isinstance(node, Module)
        assert len(node.children) == 1

    def test_a_file_and_content(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("x")
        self.refused(tmp_path, "f", "both src= and content", "text")
        self.refused(tmp_path, "f", "both src= and content", '<module name="n"/>')

    def test_a_file_that_is_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"ab\xff")
        self.refused(tmp_path, "f", "byte 2 is 0xff")

    def test_what_is_no_plain_file_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")  # reading it would wait for a writer
        self.refused(tmp_path, "fifo", "this is a FIFO, not a text file")
        with pytest.raises(PMLError, match="this is a FIFO, not a text file"):
            load_schema(tmp_path / "fifo")
        with pytest.raises(PMLError, match="this is a device, not a text file"):
            load_schema(Path("/dev/zero"))
        with pytest.raises(PMLError, match="cannot be the name of a file"):
            load_schema(Path("a\0b"))

    def test_files_with_more_text_than_any_model_takes(self, tmp_path: Path) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(3 * 2**30)
        self.refused(tmp_path, "sparse", r"the file has 3\.0 GiB, and there is room for 16\.0 MiB")
        with pytest.raises(PMLError, match=r"has 3\.0 GiB"):
            load_schema(tmp_path / "sparse")
        # Each fits, but not all of them.
        (tmp_path / "ten.txt").write_bytes(b"x" * (10 * 2**20))
        (tmp_path / "s.xml").write_text(
            '<schema name="s"><module name="a" src="ten.txt"/>\n<module name="m" src="ten.txt"/></schema>'
        )
        with pytest.raises(PMLError, match=r"the file has 10\.0 MiB, and there is room for 6\.0 MiB") as caught:
            load_schema(tmp_path / "s.xml")
        assert (caught.value.line, caught.value.name) == (2, "m")

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes("ab".encode("utf-16-le"))
        self.refused(tmp_path, "f", r"the file is not text: character 2 is NUL \(U\+0000\)")

    def test_a_schema_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(PMLError, match="cannot be read: No such file") as caught:
            load_schema(tmp_path / "gone.xml")
        assert caught.value.source == tmp_path / "gone.xml"
        (tmp_path / "latin.xml").write_bytes('<schema name="s">é</schema>'.encode("latin-1"))
        with pytest.raises(PMLError, match="not UTF-8"):
            load_schema(tmp_path / "latin.xml")

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "s.xml").write_bytes(b'\xef\xbb\xbf<?xml version="1.0"?><schema name="s">a</schema>')
        assert load_schema(tmp_path / "s.xml").name == "s"
        assert parse_schema('\ufeff<schema name="s"/>').name == "s"
