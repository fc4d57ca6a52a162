"""White space of PML: which of it reaches the model, and where it stands.

Inside a text, the common indentation of its element's lines is removed and everything else is kept. Between texts, a
run of white space counts as one space, and that space opens the text (or the argument) that follows it: this is where
the tokens of a BPE vocabulary carry it, and a module keeps its tokens whatever is imported before it. There is no space
at the start of a schema or a prompt, nor on either side of a chat tag's border. `xml:space="preserve"` keeps all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_pc.pml.xml import SPACE, Chars, Element

# Neither can occur in XML, so they can stand for elements while lines are looked at.
_TAG, _SLOT = "\0", "\1"
_SLOT_TAGS = ("param", "parameter")


def content(element: Element) -> Iterator[Element | Chars]:
    """The children of `element` in order, its own texts dedented unless white space is preserved."""
    if element.preserve:
        yield from element.children
        return
    lines = dedent("".join(_shown(child) for child in element.children))
    texts = iter(lines.replace(_SLOT, _TAG).split(_TAG))
    text = next(texts)
    for child in element.children:
        if isinstance(child, Chars):
            yield Chars(text, child.at)
        else:
            yield child
            text = next(texts)


def _shown(child: Element | Chars) -> str:
    if isinstance(child, Chars):
        return child.text
    return _SLOT if child.tag in _SLOT_TAGS else _TAG


def dedent(text: str) -> str:
    """Remove the indentation that the lines of `text` have in common, and the spaces of blank lines.

    What stands on the line of the opening tag has no indentation, so a text that begins there stays as it is (code
    would otherwise lose its structure). A line that a child element other than a parameter opens does not count.
    """
    first, *lines = text.split("\n")
    if _opens_with_text(first):
        return text
    margin = os.path.commonprefix(  # noqa: RUF071 - characters are what is compared, not folders
        [line[: -len(line.lstrip(SPACE))] for line in lines if _opens_with_text(line)]
    )
    kept = (line[len(margin) :] if line.startswith(margin) else line.lstrip(SPACE) for line in lines)
    return "\n".join([first, *(line if line.strip(SPACE) else "" for line in kept)])


def _opens_with_text(line: str) -> bool:
    return line.lstrip(SPACE)[:1] not in ("", _TAG)


@dataclass(slots=True)
class Flow:
    """The place between two texts, moved along a document as it is read.

    Attributes:
        started: some text or parameter stands before, in the same chat tag.
        spaced: white space stands between that and this place.
    """

    started: bool = False
    spaced: bool = False

    def border(self) -> None:
        """Pass the border of a chat tag."""
        self.started = self.spaced = False

    def text(self, text: str, *, preserve: bool = False) -> str:
        """Pass the text of a document; what the model is given of it, empty where that is nothing."""
        if preserve:
            return self.verbatim(text, separator=" ")
        body = text.strip(SPACE)
        if not body:
            self._pass_space(text)
            return ""
        self._pass_space(text[: text.index(body[0])])
        opening = " " if self.spaced else ""
        self.started = True
        self.spaced = text[-1] in SPACE
        return opening + body

    def verbatim(self, text: str, *, separator: str) -> str:
        """Pass a text that is kept as it is, opened by `separator` where space would otherwise get lost before it."""
        if not text:
            return ""
        opening = separator if self.spaced and text[0] not in SPACE else ""
        self.started = True
        self.spaced = False
        return opening + text

    def slot(self) -> bool:
        """Pass a parameter; whether a space opens its argument."""
        spaced = self.spaced
        self.started = True
        self.spaced = False
        return spaced

    def _pass_space(self, text: str) -> None:
        self.spaced = self.started and (self.spaced or bool(text))


def join(ends: Sequence[Flow]) -> Flow:
    """The place after alternatives that end at `ends`, any of which may be the one that stands there."""
    return Flow(any(end.started for end in ends), any(end.spaced for end in ends))
