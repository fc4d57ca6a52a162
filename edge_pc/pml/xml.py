"""Reads XML into a tree that knows the place of everything, and refuses whatever is unsafe: DTDs, hence all entities.

Comments and processing instructions vanish without splitting a text, CDATA is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.parsers.expat import ErrorString

from edge_pc.errors import PMLError
from edge_pc.pml.faults import MAX_DEPTH, fault, normal, too_deep
from edge_pc.pml.model import Location
from edge_pc.system.text import TextFileError, read_text

# More text than any model has positions for.
MAX_BYTES = 16 * 2**20

MARKUP_HINT = "code with < or & belongs in <![CDATA[ … ]]> or, in a schema, in a separate file that src= names"
# XML's white space; a no-break space, for example, is text.
SPACE = " \t\r\n"
_XML_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


@dataclass(frozen=True, slots=True)
class Chars:
    """A text between two tags; `at` is its first character that is not white space."""

    text: str
    at: Location


@dataclass(frozen=True, slots=True)
class Element:
    """An element; `preserve` says whether `xml:space` preserves the white space of its own texts."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | Chars]
    preserve: bool
    at: Location


def read_pml(path: Path) -> str:
    """The text of a file with PML in it.

    Raises:
        PMLError: it is not a regular file, has more than `MAX_BYTES`, cannot be read, or is not UTF-8.
    """
    try:
        return read_text(path, MAX_BYTES)
    except TextFileError as exc:
        raise PMLError(exc.problem, source=path, hint=exc.hint) from exc


def read_document(text: str, source: Path | None, tag: Literal["schema", "prompt"]) -> Element:
    """The root element of a document, which must be a `tag`.

    Raises:
        PMLError: the text is not well-formed, has a DTD, is nested too deeply, or has another root.
    """
    root = _read_xml(text, source)
    if root.tag != tag:
        hint = f"this is a {root.tag}; a {tag} is expected here" if root.tag in ("schema", "prompt") else None
        raise fault(f"expected <{tag}>, not <{root.tag}>", root.at, name=root.tag, among=(tag,), hint=hint)
    return root


def _read_xml(text: str, source: Path | None) -> Element:
    # Not its SAX parser: that one imports urllib.request, which takes longer than everything else here.
    from defusedxml.ElementTree import DTDForbidden, ParseError, XMLParser

    text = text.removeprefix("\ufeff")
    builder = _TreeBuilder(source)
    parser = XMLParser(target=builder, forbid_dtd=True)
    builder.follow(parser.parser)
    try:
        parser.feed(text)
        parser.close()
    except ParseError as exc:
        line, column = exc.position
        message = builder.explain(ErrorString(exc.code))
        raise fault(message, Location(source, line, column + 1), hint=MARKUP_HINT) from exc
    except DTDForbidden as exc:
        raise fault(
            "a DOCTYPE is not allowed in PML, nor are entities that it would declare",
            builder.here(),
            hint="remove it and write the text itself; &lt; &gt; &amp; &quot; &apos; and &#…; need no declaration",
        ) from exc
    except UnicodeEncodeError as exc:
        before = text[: exc.start]
        at = Location(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise fault(f"U+{ord(text[exc.start]):04X} is half a character and cannot stand in a text", at) from exc
    return builder.root


class _TreeBuilder:
    """Builds the tree from the parser's events."""

    def __init__(self, source: Path | None) -> None:
        self.root: Element
        self._source = source
        self._expat: Any = None
        self._open: list[Element] = []
        self._parts: list[str] = []
        self._text_at: Location | None = None

    def follow(self, expat: Any) -> None:
        """Take places from the parser `expat`, which is to hand over each line of text by itself for that."""
        expat.buffer_text = False
        self._expat = expat

    def here(self) -> Location:
        return Location(self._source, self._expat.CurrentLineNumber, self._expat.CurrentColumnNumber + 1)

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._end_text()
        at = self.here()
        tag = normal(tag)
        names = [normal(name) for name in attributes]
        if len(set(names)) < len(names):
            raise fault(f"<{tag}> has an attribute twice, in two Unicode forms", at, name=tag)
        attributes = dict(zip(names, attributes.values(), strict=True))
        if len(self._open) == MAX_DEPTH:
            raise too_deep(f"<{tag}>", at, name=tag)
        space = attributes.pop(_XML_SPACE, None)
        if space not in (None, "preserve", "default"):
            raise fault(f'xml:space="{space}": expected "preserve" or "default"', at, name="xml:space")
        inherited = self._open[-1].preserve if self._open else False
        element = Element(tag, attributes, [], inherited if space is None else space == "preserve", at)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def end(self, tag: str) -> None:
        self._end_text()
        self._open.pop()

    def data(self, text: str) -> None:
        if self._text_at is None and (blank := len(text) - len(text.lstrip(SPACE))) < len(text):
            here = self.here()
            self._text_at = Location(here.source, here.line, here.column + blank)
        self._parts.append(text)

    def explain(self, message: str) -> str:
        """What the parser's `message` means here, with the element that is open where that helps."""
        if message == "not well-formed (invalid token)":
            message = "a bare < or &, an incomplete tag, or a character that XML does not have"
        elif message == "no element found" and not self._open:
            message = "there is no element"
        elif self._open:
            opened = f"<{self._open[-1].tag}>, opened in line {self._open[-1].at.line},"
            if message == "mismatched tag":
                message = f"{opened} is not closed before this end tag"
            elif message in ("no element found", "unclosed token"):
                message = f"the text ends before {opened} is closed"
        return f"not well-formed: {message}"

    def _end_text(self) -> None:
        if self._parts:
            self._open[-1].children.append(Chars("".join(self._parts), self._text_at or self.here()))
        self._parts = []
        self._text_at = None
