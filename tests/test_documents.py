"""Files as a person's documents: which are read, how they are cut, and what is said when they are too long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_pc.compose.composer import Composer
from edge_pc.compose.documents import (
    MAX_PARTS,
    PART_CHARACTERS,
    Document,
    DocumentReader,
    cut_at_paragraphs,
    documents_schema,
    nested,
    question,
    read_documents,
)
from edge_pc.compose.laid_out import check_length
from edge_pc.errors import ContextLengthError, OptionError
from edge_pc.models.description import describe
from edge_pc.pml.model import NOWHERE, Schema

MIB = 2**20


@pytest.fixture(scope="module")
def composer(tiny_model: Path) -> Composer:
    return Composer(describe(tiny_model))


def documents_of(texts: dict[str, str]) -> list[Document]:
    return [Document(name, name, text) for name, text in texts.items()]


def text_of(characters: int) -> str:
    return ("word " * 19 + "word\n\n") * (characters // 101 + 1)


class TestReading:
    def test_names_are_unique_titles_and_texts_whole(self, tmp_path: Path) -> None:
        for folder in ("a", "b", "c"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "n.txt").write_text(f"\ufeff text {folder}\n", encoding="utf-8")
        files = [tmp_path / folder / "n.txt" for folder in ("a", "b", "c")]
        read = read_documents(files, MIB)
        assert [(d.name, d.text) for d in read] == [
            ("n.txt", " text a\n"), ("n.txt-2", " text b\n"), ("n.txt-3", " text c\n")
        ]  # fmt: skip
        assert {document.title for document in read} == {"n.txt"}, "what the model reads depends on no other file"

    def test_what_is_no_plain_file_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")  # reading it would wait for a writer
        for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
            with pytest.raises(OptionError) as caught:
                read_documents([path], MIB)
            assert caught.value.message == f"{path}: this is {kind}, not a text file"

    def test_a_name_that_no_file_can_have(self) -> None:
        for name, shown in (("a\0b", r"'a\\x00b'"), ("a\ud800b", r"'a\\ud800b'")):
            with pytest.raises(OptionError, match=f"^{shown}: this cannot be the name of a file"):
                read_documents([Path(name)], MIB)

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path / "n") + b"\xff.txt"
        Path(os.fsdecode(path)).write_text("x")
        (read,) = read_documents([Path(os.fsdecode(path))], MIB)
        assert (read.name, read.text) == ("n\ufffd.txt", "x")

    def test_files_are_refused_unread_when_they_cannot_fit(self, tmp_path: Path) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(3 * 2**30)
        with pytest.raises(OptionError) as caught:
            read_documents([tmp_path / "sparse"], MIB)
        assert caught.value.message == f"{tmp_path}/sparse: the file has 3.0 GiB, and there is room for 1.0 MiB"
        assert caught.value.hint == "leave it out, or use only part of it"

    def test_the_room_is_that_of_all_files_together(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"x" * 600)
        (tmp_path / "b").write_bytes(b"y" * 401)
        assert len(read_documents([tmp_path / "a", tmp_path / "b"], 1001)) == 2
        with pytest.raises(OptionError, match="b: the file has 401 B, and there is room for 400 B"):
            read_documents([tmp_path / "a", tmp_path / "b"], 1000)

    def test_a_file_that_does_not_say_its_size(self) -> None:
        path = Path("/proc/self/status")
        assert path.stat().st_size == 0
        with pytest.raises(OptionError, match="there is room for 10 B"):
            read_documents([path], 10)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "the file is empty"),
            (b" \n\t", "the file is empty"),
            (b"ab\xff", "the file is not UTF-8: byte 2 is 0xff"),
            ("hi".encode("utf-16-le"), "the file is not text: character 2 is NUL (U+0000)"),
        ],
    )
    def test_what_is_no_text(self, data: bytes, words: str, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(data)
        with pytest.raises(OptionError) as caught:
            read_documents([tmp_path / "f"], MIB)
        assert caught.value.message == f"{tmp_path / 'f'}: {words}"

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="no file is given"):
            read_documents([], MIB)
        with pytest.raises(OptionError, match="cannot be read: No such file"):
            read_documents([tmp_path / "gone"], MIB)


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


class TestReadingAgain:
    """A file that did not change is not read again."""

    @staticmethod
    def settled(path: Path, text: str) -> Path:
        """Write a file, and wait until a change of it would show in its time stamps."""
        path.write_text(text)
        time.sleep(0.02)
        return path

    def test_what_did_not_change_is_not_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = DocumentReader()
        path = self.settled(tmp_path / "a.txt", "one")
        assert reader.read(path, MIB) == "one"
        monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened again"))
        assert reader.read(path, MIB) == "one"

    def test_an_edit_is_seen_also_of_the_same_length_and_time(self, tmp_path: Path) -> None:
        reader = DocumentReader()
        path = self.settled(tmp_path / "a.txt", "one")
        assert reader.read(path, MIB) == "one"
        before = path.stat()
        path.write_text("two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert reader.read(path, MIB) == "two"
        path.write_text("six")
        assert reader.read(path, MIB) == "six", "a file just written may change within one tick of the clock"
        path.unlink()
        with pytest.raises(OptionError, match="cannot be read"):
            reader.read(path, MIB)

    def test_a_limit_holds_for_what_is_known_too(self, tmp_path: Path) -> None:
        reader = DocumentReader()
        path = self.settled(tmp_path / "a.txt", "one")
        reader.read(path, MIB)
        with pytest.raises(OptionError, match="room for 2 B"):
            reader.read(path, 2)
