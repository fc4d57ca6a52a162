"""Files that are prepared before anyone asks about them, and answers that name their source."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_pc import Document, Engine, Sampling, Serving
from edge_pc.cli import main
from edge_pc.compose.laid_out import Cited

SHORT, FAST = Sampling(max_tokens=4), Serving(fidelity="fast", strict=True)
FILLER = "Nothing of note is said here. "


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(tiny_model, cache_dir=tmp_path / "states", threads=1) as opened:
        yield opened


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three short files, one of them of several parts for this model."""
    texts = {"one.txt": "The cat is old.", "two.txt": "The dog is young.", "three.txt": "An owl. " + FILLER * 8}
    folder = tmp_path / "files"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


class TestAdd:
    def test_any_of_the_files_in_any_order(self, engine: Engine, files: list[Path]) -> None:
        report = engine.add(files)
        assert len(report.encoded) == 7, "the text before them, and each file alone and after others"
        for count in (1, 2, 3):
            for chosen in itertools.permutations(files, count):
                stats = engine.ask("Who is old?", chosen, SHORT, FAST).stats
                assert stats.computed_tokens < 64

    def test_a_file_alone_is_as_full_prefill_has_it(self, engine: Engine, files: list[Path]) -> None:
        engine.add(files)
        for file in files:
            stats = engine.ask("Who?", file, SHORT, FAST).stats
            assert all(module.exact for module in stats.modules)
            assert engine.compare_ask("Who?", file).max_abs_logit_diff == 0.0

    def test_more_than_fits_is_prepared_in_parts(self, engine: Engine, files: list[Path], tmp_path: Path) -> None:
        long = tmp_path / "long.txt"
        long.write_text("\n\n".join(f"Owl number {number}. " + FILLER * 2 for number in range(30)))
        engine.add([*files, long])
        for question, chosen in (("Which owl?", [*files, long]), ("Owl 7?", [long]), ("Owl 3?", [long, files[2]])):
            stats = engine.ask(question, chosen, SHORT, FAST).stats
            assert stats.picked
            assert stats.computed_tokens < 64
        assert engine.ask("Who?", files, SHORT, FAST).stats.picked == ()

    def test_its_size_is_known_first(self, engine: Engine, files: list[Path]) -> None:
        size = engine.adding_size(files)
        report = engine.add(files)
        assert report.tokens == size.tokens
        assert report.nbytes <= size.nbytes
        assert engine.adding_size(files).tokens == 0
        assert engine.add(files).encoded == ()

    def test_a_system_text_is_part_of_what_is_prepared(self, engine: Engine, files: list[Path]) -> None:
        engine.add(files[0], system="Be brief.")
        stats = engine.ask("Who?", files[0], SHORT, FAST, system="Be brief.").stats
        assert all(module.hit for module in stats.modules)
        assert engine.ask("Who?", files[0], SHORT).stats.modules[0].hit is False
        without = engine.lay_out_question("Who?", files[0], system="")
        assert "Answer the question" not in engine.tokenizer.decode(without.in_position_order().tolist())

    def test_the_command(self, files: list[Path], tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        where = ["--model", str(tiny_model)]
        assert main(["add", str(files[0].parent), *where]) == 0
        said = capsys.readouterr().err
        assert said.startswith("files: computing ")
        assert "files: 7 encodings stored, 0 were already there" in said
        assert main(["ask", "Who?", str(files[1]), "--strict", "--max-tokens", "2", *where]) == 0
        assert main(["add", str(files[0].parent), "--max-cache-size", "1KiB", *where]) == 0, "nothing is left to store"
        files[0].write_text("Another text.")
        assert main(["add", str(files[0].parent), "--max-cache-size", "1KiB", *where]) == 3
        assert main(["add", "nowhere.txt", *where]) == 2


class TestSource:
    @pytest.mark.parametrize(
        ("question", "answer", "source"),
        [
            ("Who is old?", "The cat.", Cited("one.txt", 1, 1, "The cat is old.")),
            ("Who is it?", "A young dog.", Cited("two.txt", 1, 1, "The dog is young.")),
            ("Zebra?", "Quagga!", None),
        ],
    )
    def test_it_has_the_words_of_question_and_answer(
        self, engine: Engine, files: list[Path], question: str, answer: str, source: Cited | None
    ) -> None:
        from dataclasses import replace

        result = replace(engine.ask(question, files, SHORT), text=answer)
        assert engine.source_of(question, result, files) == source

    def test_the_part_of_a_long_file(self, engine: Engine) -> None:
        text = "\n\n".join("An owl sings. " * (n == 20) + FILLER * 2 for n in range(30))
        documents = [Document("long", "long", text), Document("short", "short", "Cats.")]
        result = engine.ask("Which owl sings?", documents, SHORT, cite=True)
        assert result.source is not None
        assert (result.source.file, result.stats.picked[0].parts) == ("long", (result.source.part,))
        assert (
            str(result.source)
            == f"long, part {result.source.part} of {result.source.of}: An owl sings. {FILLER.strip()}"
        )

    def test_a_quote_is_short(self, engine: Engine) -> None:
        document = Document("d", "d", "An owl " + "sings and " * 19 + "sleeps.")
        result = engine.ask("Which owl sleeps?", document, SHORT, cite=True)
        assert result.source is not None
        assert result.source.quote == "An owl " + "sings and " * 19 + "sle…"

    def test_only_what_was_picked_is_named(self, engine: Engine) -> None:
        from dataclasses import replace

        text = "\n\n".join(("Owls. " if n < 6 else "Kestrels. ") + FILLER * 2 for n in range(30))
        documents = [Document("long", "long", text)]
        result = engine.ask("Where are owls?", documents, SHORT)
        source = engine.source_of("", replace(result, text="kestrels"), documents)
        assert source is None or source.part in result.stats.picked[0].parts

    def test_the_command(self, files: list[Path], tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        import json

        words = ["ask", "Who is old?", *map(str, files), "--cite", "--max-tokens", "2", "--model", str(tiny_model)]
        assert main(words) == 0
        assert "source: one.txt: The cat is old.\n" in capsys.readouterr().err
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["source"] == {
            "file": "one.txt", "part": 1, "of": 1, "quote": "The cat is old."
        }  # fmt: skip


class TestWatch:
    @pytest.fixture
    def watching(self, files: list[Path], tiny_model: Path) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "edge_pc", "watch", str(files[0].parent), "--model", str(tiny_model)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
            yield process
            process.kill()

    @staticmethod
    def said(process: subprocess.Popen[str], words: str) -> str:
        """Wait until it says so; all that it said before."""
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if words in line:
                return "".join(lines)
        pytest.fail(f"it ended and said only {lines}")

    def test_a_folder_is_kept_prepared_until_ctrl_c(
        self, watching: subprocess.Popen[str], files: list[Path], tiny_model: Path, home: Path
    ) -> None:
        self.said(watching, "watching; Ctrl-C ends it")
        files[0].unlink()
        (files[0].parent / "new.txt").write_text("A new file.")
        self.said(watching, "encodings stored")
        with Engine(tiny_model, threads=1) as engine:
            new = files[0].parent / "new.txt"
            assert engine.ask("What?", [files[1], new], SHORT, FAST).stats.new_tokens
        for path in files[0].parent.iterdir():
            path.unlink()
        self.said(watching, "not prepared: ")
        watching.send_signal(signal.SIGINT)
        self.said(watching, "no longer watched")
        assert watching.wait() == 0

    @pytest.mark.parametrize("folder", ["nowhere", "files/one.txt", ""])
    def test_what_cannot_be_watched(
        self, folder: str, files: list[Path], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        where = ["--model", str(tiny_model), "--cache-dir", str(tmp_path / "states")]
        assert main(["watch", str(tmp_path / folder), *where]) == 2
        said = capsys.readouterr().err
        assert ("this is not a folder" if folder else "the states are kept in it") in said
