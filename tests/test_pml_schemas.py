"""The ready schemas, the grammar and the language's description, and the paper authors' schemas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lxml import etree

from edge_pc import schemas
from edge_pc.errors import OptionError, PMLError
from edge_pc.pml import load_prompt, load_schema, parse_prompt, parse_schema, select
from edge_pc.pml.grammar import ATTRIBUTE_ALIASES, PROMPT_ELEMENTS, RESERVED, SCHEMA_ELEMENTS, TAG_ALIASES, ElementRule
from edge_pc.pml.model import Module, Node, Parameter, Scaffold, Text, Turn, Union

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT.parent / "shared" / "data" / "pml_reference"
README = (ROOT / "schemas" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def grammar() -> etree.RelaxNG:
    return etree.RelaxNG(etree.parse(str(schemas.GRAMMAR)))


def every(nodes: tuple[Node, ...]) -> list[Node]:
    found: list[Node] = []
    for node in nodes:
        inner = node.members if isinstance(node, Union) else getattr(node, "children", ())
        found += [node, *every(inner)]
    return found


def text_of(nodes: tuple[Node, ...]) -> str:
    return "".join(node.text for node in every(nodes) if isinstance(node, Text))


class TestReadySchemas:
    @pytest.mark.parametrize("name", schemas.names())
    def test_its_prompt_fits_it(self, name: str, grammar: etree.RelaxNG) -> None:
        schema = load_schema(schemas.path(name))
        selection = select(load_prompt(schemas.prompt_path(name)), schema)
        assert schema.name == name
        assert selection.modules
        assert [text.role for text in selection.free_text] == ["user"]
        grammar.assertValid(etree.parse(str(schemas.path(name))))
        grammar.assertValid(etree.parse(str(schemas.prompt_path(name))))

    def test_together_they_show_every_element(self) -> None:
        shown: set[type] = set()
        spelled = ""
        for name in schemas.names():
            shown |= {type(node) for node in every(load_schema(schemas.path(name)).children)}
            spelled += schemas.path(name).read_text(encoding="utf-8")
        assert shown == {Text, Parameter, Module, Union, Scaffold, Turn}
        for word in ("<parameter ", "<param ", "src=", 'cache="false"', "xml:space", "<![CDATA["):
            assert word in spelled

    def test_the_files_of_the_program_are_its_modules(self) -> None:
        modules = load_schema(schemas.path("code")).modules()
        for file in (schemas.FOLDER / "code").glob("*.py"):
            assert text_of(modules[file.name].children) == "\n" + file.read_text(encoding="utf-8")

    def test_each_is_listed(self) -> None:
        assert len(schemas.names()) >= 5
        for name in schemas.names():
            assert f"[{name}.xml]({name}.xml)" in README
            assert f"[{name}.prompt.xml]({name}.prompt.xml)" in README

    def test_an_unknown_name(self) -> None:
        with pytest.raises(OptionError, match="travel"):
            schemas.path("travle")
        with pytest.raises(OptionError):
            schemas.path("travel.prompt")


class TestGrammar:
    """Where grammar and parser can both tell, they agree."""

    @pytest.mark.parametrize(
        "text",
        [
            '<schema name="s"><system/><union><module name="m" cache="true"/></union></schema>',
            '<schema name="s"><module name="m"><parameter name="p" length="2" scaffold="x"/></module></schema>',
            '<schema name="s"><scaffold name="c">a<module name="m" xml:space="preserve"/></scaffold></schema>',
            '<prompt schema="s">a<m p="1"><n/></m><scaffold name="c"><m/></scaffold><user>b<m/></user></prompt>',
        ],
    )
    def test_accepted(self, text: str, grammar: etree.RelaxNG) -> None:
        grammar.assertValid(etree.fromstring(text))
        (parse_schema if text.startswith("<schema") else parse_prompt)(text)

    @pytest.mark.parametrize(
        "text",
        [
            "<schema/>",
            '<schema name="s"><param name="p" len="1"/></schema>',
            '<schema name="s"><union>x<module name="m"/></union></schema>',
            '<schema name="s"><union/></schema>',
            '<schema name="s"><scaffold name="c"/></schema>',
            '<schema name="s"><user><user/></user></schema>',
            '<schema name="s"><module name="m"><user/></module></schema>',
            '<schema name="s"><module name="user"/></schema>',
            '<schema name="s"><module name="m" cache="no"/></schema>',
            '<schema name="s"><module name="m" src="a">x</module></schema>',
            '<schema name="s"><module name="m"><param name="p" len="0"/></module></schema>',
            '<schema name="s"><module name="m"><param name="p" len="1" length="1"/></module></schema>',
            '<schema name="s"><module name="m"><param name="p" len="1" default="a">b</param></module></schema>',
            '<schema name="s" xml:space="keep"/>',
            "<prompt/>",
            '<prompt schema="s"><m>x</m></prompt>',
            '<prompt schema="s"><module name="m"/></prompt>',
            '<prompt schema="s"><user><user/></user></prompt>',
        ],
    )
    def test_refused(self, text: str, grammar: etree.RelaxNG) -> None:
        assert not grammar.validate(etree.fromstring(text))
        with pytest.raises(PMLError):
            (parse_schema if text.startswith("<schema") else parse_prompt)(text)


class TestDescription:
    """`schemas/README.md` says what the parser's tables say."""

    @pytest.mark.parametrize(
        ("heading", "rules"), [("## Schema", SCHEMA_ELEMENTS), ("## Prompt", PROMPT_ELEMENTS)], ids=["schema", "prompt"]
    )
    def test_elements(self, heading: str, rules: dict[str, ElementRule]) -> None:
        section = README.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
        rows = {}
        for tag, attributes, children in re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*) \|$", section, re.MULTILINE):
            rows[tag] = (attributes, children)
        assert set(rows) == set(rules)
        for tag, rule in rules.items():
            attributes = [f"`{name}`" for name in rule.required] + [f"`{name}`?" for name in rule.optional]
            held = ["text"] * rule.text + ["imports"] * rule.imports + [f"`{child}`" for child in rule.children]
            assert rows[tag] == (", ".join(attributes), ", ".join(held)), tag

    def test_dialects(self) -> None:
        section = README.split("### Two dialects", 1)[1].split("\n### ", 1)[0]
        for alias, tag in TAG_ALIASES.items():
            assert re.search(rf"`<{tag} …>` \| `<{alias} …>`", section)
        for aliases in ATTRIBUTE_ALIASES.values():
            for alias, name in aliases.items():
                assert re.search(rf'`{name}="[^|]*\| `{alias}="', section)

    def test_reserved_names(self) -> None:
        listed = README.split("PML's own tags:", 1)[1].split(". Modules", 1)[0]
        assert set(re.findall(r"`(\w+)`", listed)) == RESERVED

    def test_the_example_of_an_error(self) -> None:
        example = README.split("```\ntrip.xml:7:9", 1)[1].split("```", 1)[0].strip(": \n")
        prompt = parse_prompt('<prompt schema="travel"><trip dayz="two"/></prompt>')
        with pytest.raises(PMLError) as caught:
            select(prompt, load_schema(schemas.path("travel")))
        assert str(caught.value).endswith(example)

    def test_the_example_of_a_prompt(self) -> None:
        prompt = parse_prompt(README.split("```xml\n", 1)[1].split("```", 1)[0])
        assert select(prompt, load_schema(schemas.path("travel"))).modules[-1] == "trip/city/lisbon"


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the paper authors' schemas are not here")
class TestReferenceSchemas:
    """The paper authors' schemas, unchanged."""

    @pytest.mark.parametrize(
        ("file", "modules"),
        [("code_generation_bookstore.xml", 5), ("parameterized_prompts.xml", 11), ("persona_generation.xml", 35)],
    )
    def test_all_their_text_is_read(self, file: str, modules: int, grammar: etree.RelaxNG) -> None:
        tree = etree.parse(str(REFERENCE / file))
        grammar.assertValid(tree)
        schema = load_schema(REFERENCE / file)
        assert len(schema.modules()) == modules
        written = "".join(tree.getroot().itertext())
        assert "".join(text_of(schema.children).split()) == "".join(written.split())

    def test_a_prompt_with_nested_imports_and_arguments(self) -> None:
        schema = load_schema(REFERENCE / "parameterized_prompts.xml")
        imports = '<travel-plan duration="a week"><overseas><tokyo/></overseas></travel-plan>'
        prompt = parse_prompt(f'<prompt schema="travel">{imports}</prompt>')
        assert select(prompt, schema).modules == ("travel-plan", "travel-plan/overseas", "travel-plan/overseas/tokyo")

    def test_code_keeps_its_lines(self) -> None:
        schema = load_schema(REFERENCE / "code_generation_bookstore.xml")
        text = text_of(schema.modules()["user.py"].children)
        assert text.startswith(" class User:\n    def __init__(self, username, password):\n        self.username")
