"""Documents in a schema: how they are cut, and what is said when they are too long."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_pc.compose.composer import Composer
from edge_pc.compose.documents import (
    MAX_PARTS,
    PART_CHARACTERS,
    cut_at_paragraphs,
    documents_schema,
    nested,
    question,
)
from edge_pc.compose.laid_out import check_length
from edge_pc.documents import Document
from edge_pc.errors import ContextLengthError
from edge_pc.models.description import describe
from edge_pc.pml.model import NOWHERE, Schema


@pytest.fixture(scope="module")
def composer(tiny_model: Path) -> Composer:
    return Composer(describe(tiny_model))


def documents_of(texts: dict[str, str]) -> list[Document]:
    return [Document(name, name, text) for name, text in texts.items()]


def text_of(characters: int) -> str:
    return ("word " * 19 + "word\n\n") * (characters // 101 + 1)


class TestCutting:
    @given(st.text(st.sampled_from("ab \n"), max_size=4000), st.integers(4, 60))
    def test_the_parts_are_the_text_and_not_too_many(self, text: str, size: int) -> None:
        parts = cut_at_paragraphs(text, size)
        assert "".join(parts) == text
        assert len(parts) <= MAX_PARTS
        assert all(parts)

    def test_a_long_file_is_nested_no_deeper_than_a_schema_may_be(self) -> None:
        schema, modules = documents_schema(documents_of({"big.txt": text_of(2_000_000)}), chat=True)
        assert 1 < len(modules) <= MAX_PARTS
        assert max(len(path) for path in modules) < 300
        assert hash(schema) == hash(schema)

    def test_many_parts_have_their_keys_at_once(self, composer: Composer) -> None:
        # Each part's key holds those of all parts around it: made again every time, 31 of them would take 2**31 steps.
        names = [f"part{number}" for number in range(MAX_PARTS)]
        schema = Schema("s", (nested(["x "] * MAX_PARTS, names),), NOWHERE)
        encodings = composer.schema(schema).encodings.of_schema()
        assert len({encoding.key for encoding in encodings}) == MAX_PARTS

    def test_an_edit_of_a_long_file_keeps_the_parts_before_it(self) -> None:
        text = text_of(900_000)
        before, after = cut_at_paragraphs(text), cut_at_paragraphs(text[:-200] + "An edit.\n\n" + text[-200:])
        assert len(before) > 10
        assert before[:-1] == after[: len(before) - 1]

    def test_short_parts_end_where_paragraphs_do(self) -> None:
        parts = cut_at_paragraphs(text_of(20_000))
        assert all(len(part) <= PART_CHARACTERS and part.endswith("\n\n") for part in parts)


class TestTooLong:
    """A person who asks about files knows files, tokens and room; not schemas, modules or parts."""

    def refused(
        self, composer: Composer, documents: dict[str, str], text: str = "Why?", max_tokens: int = 32
    ) -> ContextLengthError:
        schema, modules = documents_schema(documents_of(documents), chat=True)
        with pytest.raises(ContextLengthError) as caught:
            check_length(composer.compose(schema, question(text, modules, chat=True)), max_tokens, 1024)
        message = str(caught.value)
        assert len(message.splitlines()) <= 12
        assert not [word for word in ("schema", "union", "module", "part2", "anonymous", "prompt") if word in message]
        return caught.value

    def test_one_file(self, composer: Composer) -> None:
        error = self.refused(composer, {"big.txt": text_of(2_000_000)})
        first, *parts = error.message.splitlines()
        assert first.startswith("the files take ")
        assert first.endswith(" tokens, and the model has room for 1024:")
        tokens = {name: int(count) for count, name in (line.split() for line in parts)}
        assert list(tokens) == ["big.txt", "(instruction)"]
        assert sum(tokens.values()) == int(first.split()[3])
        assert len(str(error)) < 300
        assert error.hint == "ask about a part of big.txt"

    def test_the_file_to_leave_out(self, composer: Composer) -> None:
        sizes = {"small.txt": 100, "large.txt": 5000, "middle.txt": 600}
        error = self.refused(composer, {name: "x" * size for name, size in sizes.items()})
        names = [line.split()[1] for line in error.message.splitlines()[1:]]
        assert names == ["large.txt", "middle.txt", "small.txt", "(instruction)"]
        assert error.hint == "leave out large.txt"

    def test_the_smallest_file_that_is_enough(self, composer: Composer) -> None:
        error = self.refused(composer, {"a.txt": "x" * 300, "b.txt": "x" * 200, "c.txt": "x" * 550})
        assert error.hint == "leave out b.txt"

    def test_many_files(self, composer: Composer) -> None:
        error = self.refused(composer, {f"{number}.txt": "x" * (300 + number) for number in range(40)})
        lines = error.message.splitlines()
        assert len(lines) == 10
        assert lines[1].split()[1] == "39.txt"
        assert lines[-1].endswith(" in 33 more")
        assert error.hint is not None
        assert error.hint.startswith("leave out 39.txt, 38.txt, 37.txt and ")

    def test_room_for_the_files_but_not_for_the_answer(self, composer: Composer) -> None:
        documents = {"a.txt": "x" * 400, "b.txt": "x" * 300}
        error = self.refused(composer, documents, max_tokens=500)
        first, *parts = error.message.splitlines()
        assert first.startswith("the files, the question and the answer take ")
        tokens = {name: int(count) for count, name in (line.split() for line in parts)}
        assert tokens["(answer)"] == 500
        assert sum(tokens.values()) == int(first.split()[8])
        assert error.hint == "leave out b.txt, or ask for fewer tokens"

    def test_a_question_that_is_too_long(self, composer: Composer) -> None:
        error = self.refused(composer, {"a.txt": "x" * 100}, text="y" * 3000)
        assert error.hint == "shorten the question"

    def test_exactly_what_fits(self, composer: Composer) -> None:
        schema, modules = documents_schema(documents_of({"a.txt": "x" * 500}), chat=True)
        laid_out = composer.compose(schema, question("Why?", modules, chat=True))
        check_length(laid_out, 1024 - laid_out.end, 1024)
        with pytest.raises(ContextLengthError, match="take 1025 tokens, and the model has room for 1024"):
            check_length(laid_out, 1025 - laid_out.end, 1024)

    def test_a_schema_names_its_largest_modules(self, composer: Composer) -> None:
        from edge_pc.pml import parse_schema

        modules = "".join(f'<module name="{"m" * 80}{number}">{"x" * (100 + number)}</module>' for number in range(30))
        with pytest.raises(ContextLengthError) as caught:
            composer.schema(parse_schema(f'<schema name="s">{modules}</schema>'))
        lines = str(caught.value).splitlines()
        assert len(lines) == 11
        assert lines[0].startswith("schema 's' takes ")
        assert lines[1].split() == ["129", f"…{'m' * 57}29"]
        assert "union" in lines[-1]
