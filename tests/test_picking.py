"""Questions about more than fits: which parts are picked, and what of their states is reused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_pc import Engine, Sampling, Serving
from edge_pc.compose.composer import Composer, TextModel
from edge_pc.compose.document_questions import LEAST_PARTS, Questions
from edge_pc.compose.documents import parts_of
from edge_pc.compose.laid_out import LaidOut, PickedParts
from edge_pc.compose.ranking import Ranking
from edge_pc.documents import Document
from edge_pc.errors import ContextLengthError, OptionError
from edge_pc.models.description import describe

PART = 1024 // LEAST_PARTS  # characters, of a model with 1024 positions
FILLER = "Nothing of note is said here. "


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> TextModel:
    return describe(tiny_model)


@pytest.fixture(scope="module")
def composer(model: TextModel) -> Composer:
    return Composer(model)


@pytest.fixture(scope="module")
def questions(model: TextModel, composer: Composer) -> Questions:
    return Questions(model, composer)


def document(name: str, *paragraphs: str) -> Document:
    return Document(name, name, "\n\n".join(paragraphs))


def long_document(name: str, said: dict[int, str], paragraphs: int = 40) -> Document:
    """Many paragraphs that are too long for one part together, some of which say something."""
    return document(name, *(said.get(number, "") + FILLER * 3 for number in range(paragraphs)))


def picked(prompt: LaidOut) -> dict[str, tuple[int, ...]]:
    return {each.file: each.parts for each in prompt.picked if each.parts}


class TestWhatIsPicked:
    def test_everything_where_it_fits(self, questions: Questions) -> None:
        prompt = questions.lay_out("Who?", [document("a", "one"), document("b", "two")], 32)
        assert prompt.picked == ()
        assert prompt.modules == ("", "a", "b")

    def test_up_to_the_last_token(self, questions: Questions, model: TextModel) -> None:
        documents = [document("a", "x" * 300), document("b", "y" * 200)]
        whole = questions.lay_out("Who?", documents, 32)
        room = model.spec.max_positions - whole.end
        assert questions.lay_out("Who?", documents, room).picked == ()
        assert questions.lay_out("Who?", documents, room + 1).picked != ()

    def test_the_part_of_one_long_file_that_the_question_is_about(self, questions: Questions) -> None:
        long = long_document("long", {33: "The lighthouse keeper is called Ottilie. "})
        prompt = questions.lay_out("What is the name of the lighthouse keeper?", [long], 32)
        (part,) = (part for part in parts_of(long, PART) if "Ottilie" in part.written)
        assert part.number in picked(prompt)["long"]
        assert prompt.picked[0].of == len(parts_of(long, PART))

    def test_files_and_parts_of_files_together(self, questions: Questions) -> None:
        short = document("short", "Zebras graze.")
        others = [long_document(f"other{n}", {5: "Owls hunt at night. "}) for n in range(3)]
        prompt = questions.lay_out("Where do zebras graze?", [*others, short], 32)
        assert picked(prompt) == {"short": (1,)}
        assert prompt.picked == (*(PickedParts(o.name, (), len(parts_of(o, PART))) for o in others),
                                 PickedParts("short", (1,), 1))  # fmt: skip

    def test_a_question_with_words_of_no_file_is_about_the_beginning(self, questions: Questions) -> None:
        prompt = questions.lay_out("Quetzalcoatl?", [long_document("long", {})], 32)
        numbers = picked(prompt)["long"]
        assert numbers == tuple(range(1, len(numbers) + 1))

    def test_parts_stand_in_their_order_without_gaps(self, questions: Questions) -> None:
        long = long_document("long", {3: "A kestrel. ", 30: "A kestrel, a kestrel, a kestrel. "})
        prompt = questions.lay_out("Which kestrel?", [long], 32)
        assert [int(name.partition("#")[2]) for name in prompt.modules[1:]] == list(picked(prompt)["long"])
        assert prompt.end == prompt.tokens

    @pytest.mark.parametrize("answer_tokens", [1, 32, 500])
    def test_question_and_answer_fit_with_them(
        self, questions: Questions, composer: Composer, model: TextModel, answer_tokens: int
    ) -> None:
        said = dict.fromkeys(range(40), "A kestrel. ")
        prompt = questions.lay_out("Which kestrel?", [long_document("long", said)], answer_tokens)
        question_tokens = prompt.end - prompt.schema.length
        unused = model.spec.max_positions - prompt.end - answer_tokens
        assert unused >= 0
        unused -= max(composer.neutral_tokens - question_tokens - answer_tokens, 0)
        assert 0 <= unused < 150, "no further part of so many tokens fits"

    def test_what_cannot_be_picked_from(self, questions: Questions) -> None:
        long = long_document("long", {})
        with pytest.raises(ContextLengthError, match="the answer 1000, the model has room for 1024") as caught:
            questions.lay_out("Who?", [long], 1000)
        assert caught.value.hint == "ask for fewer tokens"
        with pytest.raises(ContextLengthError, match="no part of the files fits with them") as caught:
            questions.lay_out("x" * 1000, [long], 1)
        assert caught.value.hint == "shorten the question"
        with pytest.raises(OptionError, match="the question is empty"):
            questions.lay_out(" ", [long], 1)


class TestStates:
    """A part's states are its own: which others are picked with it, and where it stands, does not matter."""

    def test_their_keys_are_the_same_in_every_pick(self, questions: Questions) -> None:
        said = {n: f"Owl {n}. " for n in range(5, 40, 3)} | {20: "Kestrels and owls. ", 38: "A kestrel. "}
        long, short = long_document("long", said), document("short", "Owls and kestrels.")
        keys: dict[str, set[str]] = {}
        first = set()
        for asked, documents in (
            ("Where are owls?", [long]), ("Where are kestrels?", [long]), ("Where are owls?", [short, long]),
            ("Where do owls live?", [long_document("before", {7: "An owl. "}), long]),
        ):  # fmt: skip
            prompt = questions.lay_out(asked, documents, 32)
            assert prompt.picked
            _, *parts = prompt.encodings
            first.add(parts[0].paths[0])
            for encoding, other in zip(parts, prompt.others[1:], strict=True):
                keys.setdefault(encoding.paths[0], set()).add(other.key if encoding is parts[0] else encoding.key)
        assert len(keys) > len(first) > 1
        assert {name for name, found in keys.items() if len(found) > 1} == set()

    def test_an_edit_changes_the_parts_around_it(self) -> None:
        paragraphs = [f"Paragraph {number} says {number * 7919 % 1000}. " + FILLER * 4 for number in range(200)]
        before = parts_of(document("long", *paragraphs))
        paragraphs[100] = "An edit of another length."
        after = parts_of(document("long", *paragraphs))
        assert len(before) > 15
        assert len({part.written for part in after} - {part.written for part in before}) <= 4

    def test_a_second_question_computes_only_itself(self, tiny_model: Path, tmp_path: Path) -> None:
        file, short, fast = tmp_path / "long.txt", Sampling(max_tokens=4), Serving(fidelity="fast")
        said = {3: "A kestrel. ", 20: "A kestrel and an owl. ", 30: "An owl. "}
        file.write_text(long_document("", said).text)
        with Engine(tiny_model, cache_dir=tmp_path / "states", threads=1) as engine:
            first = engine.ask("Which kestrel?", file, short, fast).stats
            owl = engine.ask("Which owl?", file, short, fast).stats
            both = engine.ask("Which owl? Which kestrel?", file, short, fast).stats
            balanced = engine.ask("Which kestrel?", file, short).stats
            compared = engine.compare_ask("Which owl?", file, max_tokens=4)
            cold = engine.ask("Which kestrel?", file, short, Serving(use_cache=False)).stats
        pages = [[module.path for module in stats.modules[1:]] for stats in (first, owl, both)]
        assert pages == [["long.txt#2", "long.txt#11"], ["long.txt#11", "long.txt#16"],
                         ["long.txt#2", "long.txt#11", "long.txt#16"]]  # fmt: skip
        assert not any(module.hit for module in first.modules)
        assert [module.hit for module in owl.modules] == [True, True, False]
        assert all(module.hit for module in both.modules)
        assert both.computed_tokens < 64
        assert first.picked == balanced.picked == cold.picked
        assert compared.full_ttft_ms > 0


class TestCutting:
    @given(st.text(st.sampled_from("ab \n"), min_size=1, max_size=2000), st.integers(4, 60))
    def test_parts_have_all_of_the_text_and_are_no_longer_than_asked(self, text: str, size: int) -> None:
        parts = parts_of(document("d", text), size)
        bodies = [part.written.removeprefix("\n\nDocument: d\n").removesuffix("\n") for part in parts]
        assert "".join("".join(bodies).split()) == "".join(text.split())
        assert all(len(body) <= size for body in bodies)
        assert [part.number for part in parts] == list(range(1, len(parts) + 1))


class TestRanking:
    @pytest.mark.parametrize(
        ("query", "best"),
        [
            ("How many beds?", 0), ("How many bed?", 0),
            ("the TOWER'S height", 1), ("towers", 1), ("塔の高さ", 2), ("naïve Straße", 3),
        ],
    )  # fmt: skip
    def test_what_a_query_is_about(self, query: str, best: int) -> None:
        ranking = Ranking(["There are 34 beds.", "A tower of 31 metres.", "この塔は高い。", "Die naïve STRASSE.", ""])
        assert int(ranking.scores(query).argmax()) == best

    @pytest.mark.parametrize("texts", [["a b", ""], [""], ["...", "!"]])
    @pytest.mark.parametrize("query", ["", "?!", "zebra", " "])
    def test_nothing_in_common(self, texts: list[str], query: str) -> None:
        assert Ranking(texts).scores(query).tolist() == [0.0] * len(texts)
