"""One question's documents in many arrangements: as one text, as few or many modules, with gaps between them.

Whatever the arrangement, a prompt has the same tokens, so that one full prefill serves for all. A gap is a module that
no prompt imports: it takes positions and has no text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.questions import NOWHERE, Question, wrap
from edge_pc.pml.model import Module, Node, Parameter, Scaffold, Schema, Selection, Text


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How documents stand in a schema.

    Attributes:
        modules: how many modules they are put into, as evenly as can be; 0: none, they are anonymous text and see each
            other.
        gap: positions left empty, all gaps together.
        places: a gap stands before each of these modules (documents, where there are no modules), counted from 0; one
            more than the last stands for the end. Gaps are equally long.
        scaffold: all modules are joined by one.
    """

    modules: int
    gap: int = 0
    places: tuple[int, ...] = ()
    scaffold: bool = False

    def schema(self, question: Question, *, chat: bool) -> Schema:
        """The question's documents in this arrangement."""
        texts = [Text("".join(parts), NOWHERE) for parts in question.parts]
        nodes: list[Node] = [Text(question.task.instruction, NOWHERE)]
        if self.scaffold:
            modules = tuple(_module(f"documents-{i}", group) for i, group in enumerate(self._groups(texts), start=1))
            return wrap([*nodes, Scaffold("all", modules, NOWHERE)], chat=chat)
        groups = self._groups(texts)
        for number, group in enumerate(groups):
            nodes += self._gap(number)
            nodes.append(_module(f"documents-{number + 1}", group) if self.modules else group[0])
        return wrap([*nodes, *self._gap(len(groups))], chat=chat)

    def pieces(self, documents: int) -> int:
        """How many places for gaps there are before the end."""
        return min(self.modules or documents, documents)

    def _groups(self, texts: Sequence[Text]) -> list[tuple[Text, ...]]:
        count = self.pieces(len(texts))
        bounds = [len(texts) * index // count for index in range(count + 1)]
        return [tuple(texts[start:stop]) for start, stop in pairwise(bounds)]

    def _gap(self, before: int) -> list[Node]:
        """The empty module before piece `before`, if a gap stands there."""
        if before not in self.places or not self.gap:
            return []
        length = self.gap // len(self.places)
        return [_module(f"gap-{before}", (Parameter("room", length, "", False, NOWHERE),))]


def ask_all(question: Question, schema: Schema, *, chat: bool) -> Selection:
    """The prompt that imports every module with text."""
    return question.ask([path for path in schema.modules() if not path.startswith("gap-")], chat=chat)


def subset(question: Question, gold: int | None, size: int, seed: str) -> tuple[Question, tuple[int, ...]]:
    """The question with its documents in random order, and the places of `size` of them, the answer's among them."""
    rng = random.Random(seed)
    order = list(range(len(question.parts)))
    rng.shuffle(order)
    chosen = [] if gold is None else [order.index(gold)]
    others = [place for place in range(len(order)) if place not in chosen]
    places = tuple(sorted([*chosen, *rng.sample(others, size - len(chosen))]))
    return replace(question, parts=tuple(question.parts[index] for index in order)), places


def _module(name: str, children: tuple[Node, ...]) -> Module:
    return Module(name, name, children, True, NOWHERE)
