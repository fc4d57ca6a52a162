"""Which files are read as documents, and the text that is taken out of them, whatever their format."""

from __future__ import annotations

import os
import time
import zipfile
from importlib import metadata
from io import BytesIO
from pathlib import Path

import pytest

from edge_pc.documents import Document, DocumentReader, document_of, formats
from edge_pc.documents.kept import FOLDER, KeptTexts
from edge_pc.errors import MissingDependencyError, OptionError

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100)
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"


def pdf_of(*pages: str, password: str | None = None) -> bytes:
    from fpdf import FPDF

    pdf = FPDF()
    if password is not None:
        pdf.set_encryption("owner", password)
    for text in pages:
        pdf.add_page()
        pdf.set_font("Helvetica")
        if text:
            pdf.multi_cell(0, text=text)
        else:
            pdf.ellipse(10, 10, 50, 50)
    return bytes(pdf.output())


def docx_of(body: str) -> bytes:
    parts = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/></Types>',
        "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r" Type="{RELATION}" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
    }
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return file.getvalue()


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


def read(*sources: Path | str | Document, max_bytes: int = 2**20) -> list[Document]:
    return DocumentReader(max_bytes=max_bytes).read(list(sources))


def names(*sources: Path | str) -> list[str]:
    return [document.name for document in read(*sources)]


def text_in(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    (document,) = read(path)
    return document.text


class TestFiles:
    def test_names_are_unique_titles_and_texts_whole(self, tmp_path: Path) -> None:
        for folder in ("a", "b", "c"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "n.txt").write_text(f"\ufeff text {folder}\n", encoding="utf-8")
        documents = read(*(tmp_path / folder / "n.txt" for folder in ("a", "b", "c")))
        assert [(d.name, d.text) for d in documents] == [
            ("n.txt", " text a\n"), ("n.txt-2", " text b\n"), ("n.txt-3", " text c\n")
        ]  # fmt: skip
        assert {document.title for document in documents} == {"n.txt"}, "what the model reads depends on no other file"

    def test_a_text_that_is_in_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "note").write_text("from a file")
        documents = read(Document("note", "note", "given"), tmp_path / "note")
        assert [(d.name, d.text) for d in documents] == [("note", "given"), ("note-2", "from a file")]

    def test_what_is_no_plain_file_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")  # reading it would wait for a writer
        for path, kind in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device")):
            with pytest.raises(OptionError) as caught:
                read(path)
            assert caught.value.message == f"{path}: this is {kind}, not a text file"

    def test_a_name_that_no_file_can_have(self) -> None:
        for name, shown in (("a\0b", r"'a\\x00b'"), ("a\ud800b", r"'a\\ud800b'")):
            with pytest.raises(OptionError, match=f"^{shown}: this cannot be the name of a file"):
                read(Path(name))

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path / "n") + b"\xff.txt"
        Path(os.fsdecode(path)).write_text("x")
        (document,) = read(Path(os.fsdecode(path)))
        assert (document.name, document.text) == ("n\ufffd.txt", "x")

    def test_a_file_that_is_too_large_is_not_read(self, tmp_path: Path) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.write(b"x" * 5000)
            file.truncate(3 * 2**30)
        with pytest.raises(OptionError) as caught:
            read(tmp_path / "sparse")
        assert caught.value.message == f"{tmp_path}/sparse: the file has 3.0 GiB, and there is room for 1.0 MiB"
        assert caught.value.hint == "leave it out, or use only part of it"

    def test_the_room_is_that_of_all_texts_together(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"x" * 600)
        (tmp_path / "b").write_bytes(b"y" * 401)
        assert len(read(tmp_path / "a", tmp_path / "b", max_bytes=1001)) == 2
        with pytest.raises(OptionError, match="the texts have more than 1000 B together"):
            read(tmp_path / "a", tmp_path / "b", max_bytes=1000)

    def test_a_file_that_does_not_say_its_size(self) -> None:
        path = Path("/proc/self/status")
        assert path.stat().st_size == 0
        with pytest.raises(OptionError, match="there is room for 10 B"):
            read(path, max_bytes=10)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="no file is given"):
            read()
        with pytest.raises(OptionError, match="cannot be read: No such file"):
            read(tmp_path / "gone")

    @pytest.mark.parametrize("url", ["https://example.org/a.html", "http:/x", "file:///etc/hosts", "s3://bucket/key"])
    def test_a_url(self, url: str) -> None:
        with pytest.raises(OptionError) as caught:
            read(url)
        assert caught.value.message == f"{url}: this is a URL, and edge-pc uses no network"
        assert caught.value.hint == "save the page, and name its file"


class TestFoldersAndPatterns:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("b.md", "a.txt", "sub/c.md", "sub/deep/d.md", ".hidden/e.md", ".f.md", ".git/config",
                     "node_modules/g.js", "__pycache__/h.py", "env/pyvenv.cfg", "env/i.py"):  # fmt: skip
            path = tmp_path / "notes" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {name}")
        return tmp_path / "notes"

    def test_a_folder_has_those_below_it_in_their_order(self, folder: Path) -> None:
        assert names(folder) == ["a.txt", "b.md", "c.md", "d.md"]

    def test_hidden_files_can_be_named(self, folder: Path) -> None:
        assert names(folder / ".f.md", folder / ".hidden") == [".f.md", "e.md"]

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("*.md", ["b.md"]),
            ("**/*.md", ["b.md", "c.md", "d.md"]),
            ("s*", ["c.md", "d.md"]),
            ("[ab].*", ["a.txt", "b.md"]),
        ],
    )
    def test_patterns(self, folder: Path, pattern: str, found: list[str]) -> None:
        assert names(f"{folder}/{pattern}") == found

    def test_a_file_whose_name_looks_like_a_pattern(self, folder: Path) -> None:
        (folder / "[ab].md").write_text("mine")
        (document,) = read(f"{folder}/[ab].md")
        assert document.text == "mine"

    def test_each_file_once(self, folder: Path) -> None:
        assert names(folder / "b.md", folder, f"{folder}/*.md", f"{folder}/../notes/sub") == [
            "b.md", "a.txt", "c.md", "d.md", "c.md-2", "d.md-2"
        ]  # fmt: skip

    def test_links_to_folders_are_not_followed(self, folder: Path) -> None:
        (folder / "loop").symlink_to(folder)
        (folder / "link.txt").symlink_to(folder / "a.txt")
        assert names(folder) == ["a.txt", "b.md", "link.txt", "c.md", "d.md"]

    def test_what_has_no_text_is_left_out_and_named(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "a.png").write_bytes(PNG)
        (folder / "empty").write_bytes(b"")
        os.mkfifo(folder / "fifo")
        reader = DocumentReader()
        for _ in range(2):
            assert [document.name for document in reader.read(folder)] == ["a.txt", "b.md", "c.md", "d.md"]
        assert caplog.messages == [
            f"{folder}: left out:\n  {folder}/a.png: the file is not text, but a picture"
            f"\n  {folder}/empty: the file is empty\n  {folder}/fifo: this is a FIFO, not a text file"
        ], "it is said once"
        (folder / "empty").unlink()
        reader.read(folder)
        assert len(caplog.messages) == 2

    def test_only_some_of_many_are_named(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        for number in range(40):
            (folder / f"{number:02}.png").write_bytes(PNG)
        assert len(names(folder)) == 4
        assert caplog.messages[0].endswith("04.png: the file is not text, but a picture\n  and 35 more")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_a_folder_that_cannot_be_read_is_named(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "sub").chmod(0)
        assert names(folder) == ["a.txt", "b.md"]
        (folder / "sub").chmod(0o700)
        assert caplog.messages == [f"{folder}/sub: left out: the folder cannot be read: Permission denied"]

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "pictures").mkdir()
        with pytest.raises(OptionError, match="pictures: there are no files in this folder"):
            read(tmp_path / "pictures")
        (tmp_path / "pictures" / "a.png").write_bytes(PNG)
        with pytest.raises(OptionError, match=r"pictures: no file has text:\n  .*a.png: the file is not text"):
            read(tmp_path / "pictures")
        with pytest.raises(OptionError, match=r"\*\.md: no file matches this pattern"):
            read(f"{tmp_path}/*.md")


class TestPlainText:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
    def test_unicode(self, encoding: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        text = "naïve — 日本 🚋\n"
        assert text_in(tmp_path / "f", text.encode(encoding)) == text
        assert caplog.messages == []

    @pytest.mark.parametrize("order", ["le", "be"])
    def test_utf_16_by_its_mark(self, order: str, tmp_path: Path) -> None:
        assert text_in(tmp_path / "f", f"\ufeffÜber {order}".encode(f"utf-16-{order}")) == f"Über {order}"

    @pytest.mark.parametrize(
        ("data", "text", "used"),
        [(b"caf\xe9 \x80 5", "café € 5", "Windows-1252"), (b"caf\xe9 \x81", "café \x81", "Latin-1")],
    )
    def test_what_is_not_utf_8(
        self, data: bytes, text: str, used: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert text_in(tmp_path / "f", data) == text
        assert caplog.messages == [f"{tmp_path}/f: the file is not UTF-8 (byte 3 is 0xe9); it is read as {used}"]

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "the file is empty"),
            (b" \n\t", "the file is empty"),
            ("hi".encode("utf-16-le"), "the file is not text: byte 1 is 0x00"),
            (b"\xff\xfeh", "the file is not UTF-16, though it begins so"),
            (b"caf\xe9 \x01", "the file is not text: byte 5 is 0x01"),
            (PNG, "the file is not text, but a picture"),
            (b"\xff\xd8\xff\xe0\0\x10JFIF", "the file is not text, but a picture"),
            (b"PK\x03\x04\x14\0" + bytes(200), "the file is not text, but an archive"),
            (b"\x7fELF\x02\x01\x01\0", "the file is not text, but a program"),
            (b"SQLite format 3\0", "the file is not text, but a database"),
            (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0", "the file is not text, but an old Office file, or one that is "
             "protected by a password"),
        ],
    )  # fmt: skip
    def test_what_is_no_text(self, data: bytes, words: str, tmp_path: Path) -> None:
        with pytest.raises(OptionError) as caught:
            text_in(tmp_path / "f", data)
        assert caught.value.message == f"{tmp_path / 'f'}: {words}"
        assert caught.value.hint

    def test_text_that_begins_like_a_program(self, tmp_path: Path) -> None:
        assert text_in(tmp_path / "f", b"MZ is a country code. ID3 too.") == "MZ is a country code. ID3 too."

    def test_a_character_across_the_first_bytes(self, tmp_path: Path) -> None:
        text = "x" * 4095 + "é\x01"
        assert text_in(tmp_path / "f", text.encode()) == text


class TestPDF:
    def test_its_pages_in_order(self, tmp_path: Path) -> None:
        text = text_in(tmp_path / "a.pdf", pdf_of("The hostel has 34 beds.", "The tower is 31 meters high."))
        assert text == "The hostel has 34 beds.\n\nThe tower is 31 meters high."

    def test_it_is_known_by_its_bytes(self, tmp_path: Path) -> None:
        assert text_in(tmp_path / "scan.txt", pdf_of("Found.")) == "Found."
        assert document_of(pdf_of("Found."), "stdin") == Document("stdin", "stdin", "Found.")

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (pdf_of("secret", password="x"), "the PDF is protected by a password"),
            (pdf_of("", ""), "there is no text in the PDF: its pages are pictures, or empty"),
            (b"%PDF-1.7\nnothing more", "the PDF is damaged: Failed to load document (PDFium: Data format error)."),
        ],
    )
    def test_what_cannot_be_read(self, data: bytes, words: str, tmp_path: Path) -> None:
        with pytest.raises(OptionError) as caught:
            text_in(tmp_path / "a.pdf", data)
        assert caught.value.message == f"{tmp_path / 'a.pdf'}: {words}"
        assert caught.value.hint

    def test_one_that_anyone_may_open(self, tmp_path: Path) -> None:
        assert text_in(tmp_path / "a.pdf", pdf_of("Not secret.", password="")) == "Not secret."


class TestDOCX:
    def test_paragraphs_headings_and_tables(self, tmp_path: Path) -> None:
        heading = '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Beds</w:t></w:r></w:p>'
        row = "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in ("Hall", "34"))
        body = heading + paragraph("All of them.") + f"<w:tbl><w:tr>{row}</w:tr></w:tbl>"
        text = text_in(tmp_path / "a.docx", docx_of(body))
        assert text.startswith("# Beds\n\nAll of them.\n\n|")
        assert "| Hall | 34 |" in text

    @pytest.mark.parametrize("data", [b"PK\x03\x04 not an archive", docx_of("")[:300], docx_of("<w:p>")])
    def test_a_damaged_one(self, data: bytes, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"a.docx: the DOCX file is damaged: "):
            text_in(tmp_path / "a.docx", data)

    def test_an_empty_one(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"a.docx: the file is empty"):
            text_in(tmp_path / "a.docx", docx_of(""))

    def test_one_that_would_fill_the_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "_MAX_UNPACKED_BYTES", 1000)
        with pytest.raises(OptionError, match=r"a.docx: the DOCX file has .* unpacked"):
            text_in(tmp_path / "a.docx", docx_of(paragraph("x" * 1000)))


class TestHTML:
    PAGE = (
        "<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body><nav>Home</nav><h2>Beds</h2>"
        "<p>There are <a href='x'>34</a> in_all *.</p><script>alert(1)</script><ul><li>one<li>two</ul></body></html>"
    )

    @pytest.mark.parametrize("name", ["a.html", "a.HTM", "page"])
    def test_what_a_reader_sees(self, name: str, tmp_path: Path) -> None:
        text = text_in(tmp_path / name, self.PAGE.encode())
        assert text.split() == ["##", "Beds", "There", "are", "34", "in_all", "*.", "*", "one", "*", "two"]

    def test_its_encoding_is_what_it_says(self, tmp_path: Path) -> None:
        page = '<html><meta charset="iso-8859-2"><p>Łódź</p></html>'
        assert text_in(tmp_path / "a.html", page.encode("iso-8859-2")) == "Łódź"

    def test_a_text_about_html_stays_as_it_is(self, tmp_path: Path) -> None:
        text = "The element <html> holds all.\n<p>"
        assert text_in(tmp_path / "a.md", text.encode()) == text

    def test_one_nested_too_deeply(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"a.html: its elements are nested too deeply"):
            text_in(tmp_path / "a.html", b"<div>" * 5000 + b"x")


class TestConverters:
    @pytest.mark.parametrize(("name", "package"), [("a.pdf", "pypdfium2"), ("a.html", "markdownify")])
    def test_one_that_is_not_installed(
        self, name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def version(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(MissingDependencyError, match=f"{name}: reading .* needs the package {package}") as caught:
            text_in(tmp_path / name, pdf_of("x") if name == "a.pdf" else b"<p>x")
        assert caught.value.hint == 'pip install "edge-prompt-cache[documents]"'

    def test_a_text_is_converted_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "a.pdf"
        file.write_bytes(pdf_of("Once."))
        assert DocumentReader(KeptTexts(tmp_path)).read(file)[0].text == "Once."
        with monkeypatch.context() as patch:
            patch.setattr(formats, "_page_text", lambda _: pytest.fail("converted again"))
            file.rename(tmp_path / "b.pdf")
            assert DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "b.pdf")[0].text == "Once."

    def test_a_new_version_converts_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.pdf").write_bytes(pdf_of("Old."))
        DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "a.pdf")
        monkeypatch.setattr(formats, "_page_text", lambda _: "New.")
        monkeypatch.setattr(formats, "_OWN_VERSION", 2)
        assert DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "a.pdf")[0].text == "New."

    @pytest.mark.parametrize("damage", [b"", b"other text", b"0" * 32 + b"\nother text"])
    def test_a_kept_text_that_is_damaged_is_converted_again(self, tmp_path: Path, damage: bytes) -> None:
        (tmp_path / "a.pdf").write_bytes(pdf_of("Whole."))
        DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "a.pdf")
        (kept,) = (tmp_path / FOLDER).iterdir()
        assert kept.stat().st_mode & 0o777 == 0o600
        kept.write_bytes(damage)
        assert DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "a.pdf")[0].text == "Whole."

    def test_a_folder_that_cannot_be_written_costs_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "a.pdf").write_bytes(pdf_of("Still."))
        (tmp_path / FOLDER).write_text("a file in its place")
        assert DocumentReader(KeptTexts(tmp_path)).read(tmp_path / "a.pdf")[0].text == "Still."
        assert len(caplog.messages) == 1

    def test_those_used_last_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("edge_pc.documents.kept._MOST", 3)
        texts = KeptTexts(tmp_path)
        for number in range(5):
            texts.get(b"%d" % number, "v", lambda data: data.decode())
            for path in (tmp_path / FOLDER).iterdir():
                os.utime(path, (path.stat().st_mtime - 10,) * 2)
            texts.get(b"0", "v", lambda _: "made again")
        assert texts.get(b"0", "v", lambda _: "made again") == "0"
        assert texts.get(b"1", "v", lambda _: "made again") == "made again"
        assert len(list((tmp_path / FOLDER).iterdir())) == 3
        texts.clear()
        assert not (tmp_path / FOLDER).exists()


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
        assert reader.read(path)[0].text == "one"
        monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened again"))
        assert reader.read(path)[0].text == "one"

    def test_an_edit_is_seen_also_of_the_same_length_and_time(self, tmp_path: Path) -> None:
        reader = DocumentReader()
        path = self.settled(tmp_path / "a.txt", "one")
        assert reader.read(path)[0].text == "one"
        before = path.stat()
        path.write_text("two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert reader.read(path)[0].text == "two"
        path.write_text("six")
        assert reader.read(path)[0].text == "six", "a file just written may change within one tick of the clock"
        path.unlink()
        with pytest.raises(OptionError, match="cannot be read"):
            reader.read(path)
