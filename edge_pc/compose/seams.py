"""Seams of a schema: places where two texts meet whose tokens, made apart, differ from those of the joined text.

Texts are tokenized apart, so that a module keeps its tokens whatever is imported before it. Where a word or a run of
line breaks goes across a seam, a model then reads other tokens than it would in one piece of text.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.model import Module, Parameter, Schema, Text, Turn, Union, Walk

# Characters looked at on either side: more than any token of a usual vocabulary is long.
_WINDOW = 200


@dataclass(frozen=True, slots=True)
class Seam:
    """`after` may follow `before` in a prompt, and the joined text has other tokens than the two apart."""

    before: Text
    after: Text


def find_seams(schema: Schema, tokenizer: Tokenizer) -> list[Seam]:
    """The seams of a schema, at most one for each text: with the nearest text that may stand before it."""
    walk = _SeamWalk(tokenizer)
    walk.nodes(schema.children, "", [])
    return walk.seams


class _SeamWalk(Walk[list[Text]]):
    """Carries the texts that may come right before (nearest first): a module may be absent, and then its predecessor's
    text meets its successor's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seams: list[Seam] = []

    def text(self, node: Text, path: str, place: list[Text]) -> list[Text]:
        self._check(place, node)
        return [node]

    def parameter(self, node: Parameter, path: str, place: list[Text]) -> list[Text]:
        return []  # what an argument ends with is not known

    def module(self, node: Module, path: str, place: list[Text]) -> list[Text]:
        return _merged(super().module(node, path, place), place)

    def union(self, node: Union, path: str, place: list[Text]) -> list[Text]:
        return _merged(*[self.nodes(member.children, member.path, place) for member in node.members], place)

    def turn(self, node: Turn, path: str, place: list[Text]) -> list[Text]:
        # A template's marks stand on both sides of a turn, and no token goes across them.
        super().turn(node, path, [])
        return []

    def _check(self, before: list[Text], after: Text) -> None:
        for text in before:
            left, right = text.text[-_WINDOW:], after.text[:_WINDOW]
            encode = self._tokenizer.encode
            if encode(left + right) != encode(left) + encode(right):
                self.seams.append(Seam(text, after))
                return


def _merged(*lists: list[Text]) -> list[Text]:
    """All texts once, in order."""
    return list({id(text): text for texts in lists for text in texts}.values())
