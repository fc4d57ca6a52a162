"""Formats that text is taken out of: PDF, DOCX, HTML. What reads them is an extra, loaded when it is needed.

Tables, headings and lists become Markdown, which models know.
"""

from __future__ import annotations

import io
import re
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_pc.errors import MissingDependencyError
from edge_pc.system.sizes import format_size
from edge_pc.system.text import TextFileError

Convert = Callable[[bytes], str]

# Of a file that is converted; its text is much smaller.
MAX_FILE_BYTES = 256 << 20
# A DOCX file's parts, unpacked.
_MAX_UNPACKED_BYTES = 256 << 20

# Counted up when this file gives another text for the same bytes.
_OWN_VERSION = 1

# PDFium may be used by one thread at a time.
_pdfium = threading.Lock()

_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html)\b", re.I | re.DOTALL)
_UNSEEN = ["script", "style", "noscript", "template", "svg", "iframe", "nav", "head"]
# A hyphen at the end of a line, as PDFium gives it: the word goes on.
_SOFT_HYPHEN = re.compile("[\\x02\ufffe]\\s*")
_BLANK_LINES = re.compile(r"\s*\n\s*\n\s*")


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes:
        name: its own.
        packages: what reads it.
        read: takes the text out of bytes; the path is for errors.
    """

    name: str
    packages: tuple[str, ...]
    read: Callable[[bytes, Path], str]

    @property
    def version(self) -> str:
        """Of everything that its texts depend on."""
        from importlib import metadata

        versions = (f"{package} {metadata.version(package)}" for package in self.packages)
        return f"{self.name} {_OWN_VERSION} {' '.join(versions)}"

    def converter(self, path: Path) -> Convert:
        """What takes the text out of the bytes of the file `path`.

        Raises:
            MissingDependencyError: a package is not installed.
        """
        from importlib import metadata

        try:
            self.version  # noqa: B018
        except metadata.PackageNotFoundError as exc:
            raise MissingDependencyError(
                f"{path}: reading {self.name} needs the package {exc.name}, which is not installed",
                hint='pip install "edge-prompt-cache[documents]"',
            ) from exc
        return lambda data: self.read(data, path)


def format_of(data: bytes, path: Path) -> Format | None:
    """The format of a file, given all of its bytes or the first ones; None: it is plain text, or nothing of these."""
    if b"%PDF-" in data[:1024]:
        return PDF
    if data.startswith(b"PK\x03\x04") and (path.suffix.lower() == ".docx" or b"word/" in data[:4096]):
        return DOCX
    if path.suffix.lower() in (".html", ".htm", ".xhtml") or _HTML.match(data[:4096]):
        return HTML
    return None


def _read_pdf(data: bytes, path: Path) -> str:
    import pypdfium2

    with _pdfium:
        try:
            pdf = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as exc:
            if exc.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
                raise TextFileError(path, "the PDF is protected by a password", hint="save it without one") from exc
            raise _damaged(path, "PDF", exc) from exc
        try:
            pages = [_page_text(page) for page in pdf]
        except pypdfium2.PdfiumError as exc:
            raise _damaged(path, "PDF", exc) from exc
        finally:
            pdf.close()
    text = "\n\n".join(page for page in pages if page)
    if not text:
        hint = "make its text readable first, as with ocrmypdf"
        raise TextFileError(path, "there is no text in the PDF: its pages are pictures, or empty", hint=hint)
    return text


def _page_text(page: object) -> str:
    text: str = page.get_textpage().get_text_bounded()  # type: ignore[attr-defined]
    lines = _SOFT_HYPHEN.sub("", text.replace("\0", "")).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip()


def _read_docx(data: bytes, path: Path) -> str:
    import mammoth

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            size = sum(part.file_size for part in parts.infolist())
        if size > _MAX_UNPACKED_BYTES:
            raise TextFileError(path, f"the DOCX file has {format_size(size)} unpacked", hint="save it as text")
        html = mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda _: []).value
    except TextFileError:
        raise
    except Exception as exc:  # of zipfile, of the XML parser, or of mammoth, which expects whole files
        raise _damaged(path, "DOCX file", exc) from exc
    return _markdown(html, path)


def _read_html(data: bytes, path: Path) -> str:
    return _markdown(data, path)


def _markdown(html: bytes | str, path: Path) -> str:
    """The text of a page: without what nobody sees, without menus, links and pictures."""
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    try:
        page = BeautifulSoup(html, "lxml")
        for element in page(_UNSEEN):
            element.decompose()
        markdown: str = MarkdownConverter(
            heading_style="ATX", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
        ).convert_soup(page)
    except RecursionError as exc:
        raise TextFileError(path, "its elements are nested too deeply", hint="save it as text") from exc
    return _BLANK_LINES.sub("\n\n", markdown.replace("\0", "")).strip()


def _damaged(path: Path, what: str, exc: Exception) -> TextFileError:
    return TextFileError(path, f"the {what} is damaged: {exc}", hint="open it and save it again")


_FROM_HTML = ("markdownify", "beautifulsoup4", "lxml")
PDF = Format("PDF", ("pypdfium2",), _read_pdf)
DOCX = Format("DOCX", ("mammoth", *_FROM_HTML), _read_docx)
HTML = Format("HTML", _FROM_HTML, _read_html)
