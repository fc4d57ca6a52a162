"""Reads a prompt: PML text → `Prompt`. What it names is looked up later, by `select`."""

from __future__ import annotations

from pathlib import Path

from edge_pc.pml.faults import fault
from edge_pc.pml.grammar import IMPORT, PROMPT_ELEMENTS, check_place, read_attributes
from edge_pc.pml.model import ROLES, FreeText, Import, Location, Prompt, Role
from edge_pc.pml.text import Flow, content
from edge_pc.pml.xml import SPACE, Element, read_document, read_pml


def load_prompt(path: Path) -> Prompt:
    """Read a prompt from a UTF-8 file.

    Raises:
        PMLError: the file cannot be read or is not a prompt.
    """
    return parse_prompt(read_pml(path), path)


def parse_prompt(text: str, source: Path | None = None) -> Prompt:
    """Read a prompt.

    Args:
        text: PML.
        source: the file it comes from, for messages.

    Raises:
        PMLError: the text is not a prompt.
    """
    root = read_document(text, source, "prompt")
    schema = read_attributes(root, PROMPT_ELEMENTS["prompt"])["schema"]
    reader = _PromptReader()
    reader.read(root, None)
    return Prompt(schema, tuple(reader.imports), tuple(reader.free_text), root.at)


class _PromptReader:
    """Collects the imports and the free text of one prompt in document order."""

    def __init__(self) -> None:
        self.imports: list[Import] = []
        self.free_text: list[FreeText] = []
        self._flow = Flow()
        self._pieces: list[tuple[str, Location]] = []

    def read(self, element: Element, role: Role | None) -> None:
        """Read what stands in `element`, the prompt itself or a chat tag of `role`."""
        for child in content(element):
            if not isinstance(child, Element):
                if text := self._flow.text(child.text, preserve=element.preserve):
                    self._pieces.append((text, child.at))
                continue
            check_place(child, element, PROMPT_ELEMENTS[element.tag])
            turn = next((role for role in ROLES if role == child.tag), None)
            if turn is None:
                self.imports.append(_read_import(child))
            else:
                self._end_text(role)
                self.read(child, turn)
        self._end_text(role)

    def _end_text(self, role: Role | None) -> None:
        """Make one free text of the pieces read so far, and pass the border of a chat tag."""
        if self._pieces:
            text = "".join(piece for piece, _ in self._pieces)
            self.free_text.append(FreeText(text, role, self._pieces[0][1]))
        self._pieces = []
        self._flow.border()


def _read_import(element: Element) -> Import:
    scaffold = element.tag == "scaffold"
    rule = PROMPT_ELEMENTS["scaffold"] if scaffold else IMPORT
    children = []
    for child in element.children:
        if isinstance(child, Element):
            check_place(child, element, rule)
            children.append(_read_import(child))
        elif child.text.strip(SPACE):
            message = f"text cannot stand in the import <{element.tag}>"
            hint = "arguments are attributes; a question stands outside, in a chat tag for example"
            raise fault(message, child.at, name=element.tag, hint=hint)
    if scaffold:
        return Import(read_attributes(element, rule)["name"], {}, tuple(children), element.at, scaffold=True)
    return Import(element.tag, element.attributes, tuple(children), element.at)
