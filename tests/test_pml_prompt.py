"""Prompts: imports, arguments and free text, and the checking of a prompt against its schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_pc.errors import PMLError
from edge_pc.pml import Prompt, Schema, Selection, build_prompt, load_prompt, parse_prompt, parse_schema, select
from edge_pc.pml.model import NOWHERE, Import, Location, Role

SCHEMA = parse_schema("""
<schema name="trip">
  <system>Plan.</system>
  <user>
    <module name="plan">
      For <param name="days" length="4"/> in <param name="month" length="4">May</param>.
      <union>
        <module name="sea">Sea.</module>
        <module name="rail"><module name="night.train">Night.</module></module>
      </union>
    </module>
    <scaffold name="pair">
      <module name="one">1 <param name="x" length="2"/></module>
      <module name="two">2</module>
    </scaffold>
    <module name="unit.py">code <param name="a.b" length="2">z</param></module>
  </user>
</schema>
""")


def chosen(body: str) -> Selection:
    return select(parse_prompt(f'<prompt schema="trip">{body}</prompt>'), SCHEMA)


def free(body: str) -> list[tuple[str, Role | None]]:
    prompt = parse_prompt(f'<prompt schema="trip">{body}</prompt>')
    return [(text.text, text.role) for text in prompt.free_text]


class TestFreeText:
    def test_plain_text_and_turns_in_order(self) -> None:
        body = "\n Hello,\n <plan/> you.\n<user> Q? </user> And <assistant>A</assistant><user>R</user>"
        assert free(body) == [("Hello, you.", None), ("Q?", "user"), ("And", None), ("A", "assistant"), ("R", "user")]

    def test_an_import_does_not_split_a_turn(self) -> None:
        assert free("<user>a <one/>b<two/>\n c</user>") == [("a b c", "user")]

    def test_a_turn_splits_the_text_around_it(self) -> None:
        assert free("a<user/>b") == [("a", None), ("b", None)]

    def test_without_text_there_is_none(self) -> None:
        assert free("\n <plan/> <user> <one/> </user>\n") == []

    def test_two_turns_of_one_role_stay_two(self) -> None:
        assert free("<user>a</user><user>b</user>") == [("a", "user"), ("b", "user")]

    def test_text_is_dedented(self) -> None:
        assert free("<user>\n    def f():\n        pass\n</user>") == [("def f():\n    pass", "user")]

    def test_preserve(self) -> None:
        assert free('<user xml:space="preserve"> a\n  <one/> b </user>') == [(" a\n   b ", "user")]

    def test_control_tokens_are_text(self) -> None:
        assert free("<user>&lt;|im_end|><![CDATA[<|im_start|>]]></user>") == [("<|im_end|><|im_start|>", "user")]

    def test_its_place_is_that_of_its_first_piece(self) -> None:
        (text,) = parse_prompt('<prompt schema="s">\n  a <m/> b</prompt>').free_text
        assert text.at == Location(None, 2, 3)


class TestSelection:
    def test_modules_come_in_the_order_of_the_schema(self) -> None:
        selection = chosen('<unit.py/><one x="1"/><plan days="3"><rail><night.train/></rail></plan>')
        assert selection.modules == ("plan", "plan/rail", "plan/rail/night.train", "one", "unit.py")

    def test_arguments_and_defaults(self) -> None:
        selection = chosen('<plan days=" three\tdays "/><unit.py a.b=""/>')
        assert selection.arguments == {
            ("plan", "days"): "three days",
            ("plan", "month"): "May",
            ("unit.py", "a.b"): "",
        }

    def test_imports_in_a_chat_tag_are_read_as_if_it_were_not_there(self) -> None:
        assert chosen('<user><plan days="3"/>Q</user>').modules == ("plan",)

    def test_nothing_imported(self) -> None:
        assert chosen("Hi") == Selection((), {}, chosen("Hi").free_text, Location(None, 1, 1), {})

    def test_the_place_of_each_import_is_kept(self) -> None:
        selection = chosen('\n <plan days="3">\n<sea/></plan>')
        assert selection.locations == {"plan": Location(None, 2, 2), "plan/sea": Location(None, 3, 1)}

    def test_a_scaffold_imports_its_members(self) -> None:
        selection = chosen('<scaffold name="pair"><one x="1"/></scaffold>')
        assert selection.modules == ("one", "two")
        assert selection.arguments == {("one", "x"): "1"}


# The prompt's content, then column (in line 2), name and nearest name of the fault, and words of its message or hint.
FAULTS = [
    ("<plam/>", 1, "plam", "plan", "unknown module 'plam'"),
    ("<Plan/>", 1, "Plan", "plan", "unknown module 'Plan'"),
    ("<zzz/>", 1, "zzz", None, "there are: plan, one, two, unit.py"),
    ("<night.trains/>", 1, "night.trains", "night.train", "there are: plan"),
    ("<pair/>", 1, "pair", None, '<scaffold name="pair"/>'),
    ("<sea/>", 1, "sea", None, "module 'sea' is inside 'plan': import its parent first"),
    ("<night.train/>", 1, "night.train", None, "write <plan><rail><night.train/></rail></plan>"),
    ('<plan days="1"><one/></plan>', 16, "one", None, "at the schema's top level, not in module 'plan'"),
    ('<plan days="1"><seas/></plan>', 16, "seas", "sea", "module 'plan' has no module of that name"),
    ("<two><x/></two>", 6, "x", None, "there are none"),
    ("<two/><two/>", 7, "two", None, "imported twice, first in line 2"),
    ("<two/><user><two/></user>", 13, "two", None, "imported twice"),
    ('<two/><scaffold name="pair"><one x="1"/></scaffold>', 7, "two", None, "imported twice"),
    ('<plan days="1"><sea/><rail/></plan>', 22, "rail", None, "'sea' and 'rail' belong to one union"),
    ("<plan/>", 1, "days", None, "needs an argument 'days' (at most 4 tokens)"),
    ('<plan dayz="1"/>', 1, "dayz", "days", "it has: days, month"),
    ('<two a="1"/>', 1, "a", None, "it has no parameters"),
    ('<scaffold name="pain"/>', 1, "pain", "pair", "unknown scaffold"),
    ('<scaffold name="pair"/>', 1, "x", None, "needs an argument 'x'"),
    ('<scaffold name="pair"><unit.py/></scaffold>', 23, "unit.py", None, "not in scaffold 'pair'"),
    ("<scaffold/>", 1, "name", None, "needs the attribute 'name'"),
    ("<two>x</two>", 6, "two", None, "text cannot stand in the import"),
    ("<two><user>x</user></two>", 6, "user", None, "cannot stand directly in <two>"),
    ("<user><user>x</user></user>", 7, "user", None, "close one chat tag"),
    ('<module name="two"/>', 1, "module", None, "a tag of its name"),
    ('<user><param name="two"/></user>', 7, "param", None, "a tag of its name"),
    ("<union><two/></union>", 1, "union", None, "a tag of its name"),
    ('<prompt schema="trip"/>', 1, "prompt", None, "cannot stand"),
    ('<scaffold name="pair"><scaffold name="pair"/></scaffold>', 23, "scaffold", None, "cannot stand"),
    ("i < n", 4, None, None, "CDATA"),
    ("a && b", 4, None, None, "CDATA"),
]


@pytest.mark.parametrize(("body", "column", "name", "nearest", "words"), FAULTS)
def test_faults(body: str, column: int, name: str | None, nearest: str | None, words: str) -> None:
    with pytest.raises(PMLError) as caught:
        select(parse_prompt(f'<prompt schema="trip">\n{body}</prompt>', Path("p.xml")), SCHEMA)
    error = caught.value
    assert (error.line, error.column, error.name, error.nearest) == (2, column, name, nearest)
    assert words in str(error)
    assert f"p.xml:2:{column}: " in str(error)


def test_a_fault_can_be_read_however_much_is_wrong() -> None:
    modules = "".join(f'<module name="m{number}"/>' for number in range(5000))
    schema = parse_schema(f'<schema name="s">{modules}</schema>')
    with pytest.raises(PMLError) as caught:
        select(parse_prompt(f'<prompt schema="s"><{"x" * 1_000_000}/></prompt>'), schema)
    assert len(str(caught.value)) < 2500
    assert str(caught.value).startswith("<text>:1:20: unknown module 'xxx")
    assert str(caught.value).endswith(" m18, m19 and 4980 more")


def test_a_prompt_for_another_schema() -> None:
    with pytest.raises(PMLError, match="for schema 'tripp', not for 'trip'") as caught:
        select(parse_prompt('<prompt schema="tripp"/>'), SCHEMA)
    assert (caught.value.name, caught.value.nearest) == ("tripp", "trip")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<prompt/>", "needs the attribute 'schema'"),
        ('<prompt schema="s" model="m"/>', "unknown attribute 'model'"),
        ('<schema name="s"/>', "this is a schema"),
        ("<promt/>", "did you mean 'prompt'"),
        ("hello", "not well-formed"),
    ],
)
def test_what_is_no_prompt(text: str, words: str) -> None:
    with pytest.raises(PMLError, match=words):
        parse_prompt(text)


def test_load_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.xml").write_text('\n<prompt schema="trip"><two/>é</prompt>', encoding="utf-8")
    prompt = load_prompt(tmp_path / "p.xml")
    assert prompt.imports == (Import("two", {}, (), Location(tmp_path / "p.xml", 2, 23)),)
    with pytest.raises(PMLError, match="this is a folder, not a text file") as caught:
        load_prompt(tmp_path)
    assert caught.value.source == tmp_path


class TestNamesInTwoUnicodeForms:
    """`é` is one character (NFC) or two (NFD); editors and file systems write either."""

    NFC, NFD = "caf\u00e9", "cafe\u0301"

    def schema(self, name: str) -> Schema:
        return parse_schema(
            f'<schema name="{name}"><module name="{name}"><param name="{name}" length="2"/></module>'
            f'<scaffold name="{name}"><module name="x"/></scaffold></schema>'
        )

    @pytest.mark.parametrize(("read", "asked"), [(NFC, NFD), (NFD, NFC), (NFD, NFD)])
    def test_they_are_one_name(self, read: str, asked: str) -> None:
        body = f'<{asked} {asked}="1"/><scaffold name="{asked}"/>'
        written = parse_prompt(f'<prompt schema="{asked}">{body}</prompt>')
        built = build_prompt(self.schema(read), [asked, "x"], {f"{asked}.{asked}": "1"}, "")
        for prompt in (written, built):
            selection = select(prompt, self.schema(read))
            assert selection.modules == (self.NFC, "x")
            assert selection.arguments == {(self.NFC, self.NFC): "1"}

    def test_they_cannot_name_two_modules_or_two_arguments(self) -> None:
        with pytest.raises(PMLError, match="defined twice"):
            parse_schema(f'<schema name="s"><module name="{self.NFC}"/><module name="{self.NFD}"/></schema>')
        with pytest.raises(PMLError, match="twice, in two Unicode forms"):
            parse_prompt(f'<prompt schema="s"><m {self.NFC}="1" {self.NFD}="2"/></prompt>')

    def test_a_prompt_made_in_python_is_told_how_they_differ(self) -> None:
        prompt = Prompt(self.NFC, (Import(self.NFD, {}, (), NOWHERE),), (), NOWHERE)
        with pytest.raises(PMLError, match="differ in their Unicode form"):
            select(prompt, self.schema(self.NFC))


class TestBuildPrompt:
    def test_a_path_imports_its_parents(self) -> None:
        prompt = build_prompt(SCHEMA, ["plan/rail/night.train", "two"], {"plan.days": "3"}, "Q")
        selection = select(prompt, SCHEMA)
        assert selection.modules == ("plan", "plan/rail", "plan/rail/night.train", "two")
        assert selection.arguments["plan", "days"] == "3"
        assert [(text.text, text.role) for text in selection.free_text] == [("Q", "user")]

    def test_names_with_points(self) -> None:
        selection = select(build_prompt(SCHEMA, ["unit.py"], {"unit.py.a.b": "y"}, ""), SCHEMA)
        assert selection.arguments == {("unit.py", "a.b"): "y"}
        assert selection.free_text == ()

    def test_text_is_plain_where_the_schema_has_no_chat_tags(self) -> None:
        schema = parse_schema('<schema name="s"><module name="m">a</module></schema>')
        (text,) = build_prompt(schema, [], {}, " a\n b ").free_text
        assert (text.text, text.role) == (" a\n b ", None)

    @pytest.mark.parametrize(
        ("imports", "arguments", "name", "nearest", "words"),
        [
            (["plam"], {}, "plam", "plan", "unknown module"),
            (["night.train"], {}, "night.train", None, "import plan/rail/night.train"),
            (["plan/one"], {"plan.days": "1"}, "one", None, "import one"),
            (["pair"], {}, "pair", None, "import one, two"),
            (["plan/sea", "plan/rail"], {"plan.days": "1"}, "rail", None, "one union"),
            (["plan"], {}, "days", None, "give it as plan.days"),
            (["plan"], {"plan.days": "1", "plan:days": "2"}, "days", None, "given twice"),
            (["plan", "/".join("x" * 70)], {}, "/".join("x" * 70), None, "64 levels"),
            (["plan"], {"plan.dayz": "1"}, "dayz", "days", "no parameter 'dayz'"),
            (["two"], {"days": "1"}, "days", None, "which module"),
            (["two"], {"plan.days": "1"}, "plan", None, "'plan' is not imported"),
            (["plan"], {"plam.days": "1"}, "plam", "plan", "'plam' is not imported"),
            (["unit.py"], {"unit.py.c": "1"}, "c", None, "module 'unit.py' has no parameter 'c'"),
            (["unit.py"], {"unit.py:c": "1"}, "c", None, "module 'unit.py' has no parameter 'c'"),
            (["unit.py"], {"unit:py.a.b": "1"}, "unit", "unit.py", "'unit' is not imported"),
            ([""], {}, "", None, "unknown module ''"),
        ],
    )
    def test_faults(
        self, imports: list[str], arguments: dict[str, str], name: str, nearest: str | None, words: str
    ) -> None:
        with pytest.raises(PMLError) as caught:
            select(build_prompt(SCHEMA, imports, arguments, "Q"), SCHEMA)
        error = caught.value
        assert (error.name, error.nearest, error.line) == (name, nearest, None)
        assert words in str(error)
        # Whoever gave options or called a function has written no tags, and no text that could have a place.
        assert "<" not in str(error)

    def test_an_argument_that_may_be_for_two_modules(self) -> None:
        schema = parse_schema(
            '<schema name="s"><module name="a"><param name="b.c" length="4">x</param></module>'
            '<module name="a.b"><param name="c" length="4">y</param></module></schema>'
        )

        def arguments(imports: list[str], target: str) -> dict[tuple[str, str], str]:
            return select(build_prompt(schema, imports, {target: "z"}, ""), schema).arguments

        with pytest.raises(PMLError) as caught:
            arguments(["a", "a.b"], "a.b.c")
        assert str(caught.value) == (
            "argument 'a.b.c' may mean parameter 'b.c' of module 'a' or parameter 'c' of module 'a.b'\n"
            "  hint: write a:b.c or a.b:c"
        )
        assert arguments(["a", "a.b"], "a:b.c") == {("a", "b.c"): "z", ("a.b", "c"): "y"}
        assert arguments(["a", "a.b"], "a.b:c") == {("a", "b.c"): "x", ("a.b", "c"): "z"}
        # Only one of the two is there to take it.
        assert arguments(["a"], "a.b.c") == {("a", "b.c"): "z"}
        assert arguments(["a.b"], "a.b.c") == {("a.b", "c"): "z"}
