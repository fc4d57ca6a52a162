"""Lays out questions about documents: about all of them where they fit, else about the parts that matter.

Parts are picked by their words, those most like the question first, as long as there is room, and stand in the order of
the documents. Nothing is kept free for those that are not picked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_pc.compose.choices import DEFAULT_SYSTEM
from edge_pc.compose.composer import Composer, TextModel
from edge_pc.compose.documents import (
    PICKED_CHARACTERS,
    Part,
    cut_at_paragraphs,
    documents_schema,
    parts_of,
    parts_schema,
    question,
    written,
)
from edge_pc.compose.encodings import Encoding
from edge_pc.compose.laid_out import Cited, LaidOut, PickedParts
from edge_pc.compose.ranking import Ranking
from edge_pc.documents import Document
from edge_pc.errors import ContextLengthError
from edge_pc.pml import Schema

# So many parts fit at least, of a model with few positions; a character is seldom more than a token.
LEAST_PARTS = 5

# Of picked parts together. Of four meetings in one text, 24 questions of QMSum about one of them were answered with a
# Rouge-L of 0.224 from 2048 tokens picked, 0.197 from 4096, and 0.223 from the meeting alone; from the first 2048 or
# 4096 tokens with 0.200 and 0.209 (benchmarks/long_inputs.py).
PICKED_TOKENS = 2048

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
# In characters.
_SHORT_QUOTE, _LONGEST_QUOTE = 40, 200

# Parts that are too long for what room is left, before no more are tried.
_MISFITS = 8


class Questions:
    """Questions to one model. Safe to use from several threads.

    Args:
        model: its spec, tokenizer and chat template.
        composer: lays out for the same model.
    """

    def __init__(self, model: TextModel, composer: Composer) -> None:
        self._model = model
        self._composer = composer
        self._chat = model.chat_template.source is not None
        self._part_size = min(PICKED_CHARACTERS, model.spec.max_positions // LEAST_PARTS)
        self._ranked = lru_cache(1)(self._rank)  # of the documents asked about last

    def lay_out(
        self, text: str, documents: Sequence[Document], answer_tokens: int, system: str = DEFAULT_SYSTEM
    ) -> LaidOut:
        """A question's prompt.

        Args:
            answer_tokens: room that the answer is to have.
            system: stands before the documents.

        Raises:
            OptionError: the question is empty.
            ContextLengthError: no part of the documents fits with the question and the answer.
        """
        alone = self._compose(self._schema((), system), text)
        positions = self._model.spec.max_positions
        if self._fit(documents, positions - alone.end - answer_tokens):
            return self._compose(self._schema(documents, system), text)
        # Parts can be moved where there is room for the neutral text that they are encoded after.
        after = max(alone.end - alone.schema.length + answer_tokens, self._composer.neutral_tokens)
        room = min(positions - alone.schema.length - after, PICKED_TOKENS)
        parts, ranking = self._ranked(tuple(documents))
        picked = self._pick(parts, ranking.scores(text), room)
        if not picked:
            raise _no_room(alone, answer_tokens, positions)
        laid_out = self._compose(parts_schema(picked, chat=self._chat, system=system), text)
        return replace(laid_out, picked=_summary(parts, picked))

    def encodings(self, documents: Sequence[Document], system: str = DEFAULT_SYSTEM) -> list[Encoding]:
        """All that questions about any of the documents, in any order, have of them in common.

        Of each document that fits: it alone, as full prefill has it, and after others. Where not all fit together: the
        parts that are picked from.
        """
        room = self._model.spec.max_positions - self._composer.schema(self._schema((), system)[0]).layout.length
        found: list[Encoding] = []
        for document in documents:
            if self._fit([document], room):
                found += self._versions(self._schema([document], system))
        if not self._fit(documents, room):
            for part in self._ranked(tuple(documents))[0]:
                schema, paths = parts_schema([part], chat=self._chat, system=system)
                encodings = self._composer.schema(schema).encodings
                *text, here = encodings.of_prompt(paths)
                found += [*text, encodings.other_version(here)]
        return list({encoding.key: encoding for encoding in found}.values())

    def source(
        self, text: str, answer: str, documents: Sequence[Document], picked: Sequence[PickedParts]
    ) -> Cited | None:
        """The part of the documents that an answer is most likely from; None where none has anything of it.

        The words of question and answer find it far more often than their attention: of 60 questions of NQ with 10
        documents each, the one with the right answer for 56, against at most 11.

        Args:
            picked: those that the question was about; empty: all.
        """
        asked_about = {(each.file, number) for each in picked for number in each.parts}
        parts, ranking = self._ranked(tuple(documents))
        scores = ranking.scores(text) + ranking.scores(answer)
        order = np.argsort(-scores, kind="stable").tolist()
        for index in order:
            part = parts[index]
            if scores[index] > 0 and (not picked or (part.document, part.number) in asked_about):
                of = sum(each.document == part.document for each in parts)
                return Cited(part.document, part.number, of, _quote(part, text, answer))
        return None

    def _schema(self, documents: Sequence[Document], system: str) -> tuple[Schema, tuple[str, ...]]:
        return documents_schema(documents, chat=self._chat, system=system)

    def _compose(self, schema: tuple[Schema, tuple[str, ...]], text: str) -> LaidOut:
        return self._composer.compose(schema[0], question(text, schema[1], chat=self._chat))

    def _versions(self, schema: tuple[Schema, tuple[str, ...]]) -> list[Encoding]:
        """The encodings of a schema's modules, and their other versions."""
        encodings = self._composer.schema(schema[0]).encodings
        here = encodings.of_prompt(schema[1])
        return [*here, *map(encodings.other_version, here)]

    def _fit(self, documents: Sequence[Document], room: int) -> bool:
        """Whether all documents have at most `room` tokens; what is too long is not tokenized to its end."""
        for document in documents:
            for text in cut_at_paragraphs(written(document)):
                room -= self._tokens(text)
                if room < 0:
                    return False
        return True

    def _rank(self, documents: tuple[Document, ...]) -> tuple[list[Part], Ranking]:
        parts = [part for document in documents for part in parts_of(document, self._part_size)]
        return parts, Ranking([part.written for part in parts])

    def _pick(self, parts: Sequence[Part], scores: NDArray[np.float32], room: int) -> list[Part]:
        """Parts of at most `room` tokens together, in their order: those with the highest scores.

        Where no part has anything of the question, those at the beginning.
        """
        order = np.argsort(-scores, kind="stable")
        picked, misfits = [], 0
        for index in order[scores[order] > 0].tolist() or order.tolist():
            tokens = self._tokens(parts[index].written)
            if tokens <= room:
                room -= tokens
                picked.append(index)
            elif (misfits := misfits + 1) == _MISFITS:
                break
        return [parts[index] for index in sorted(picked)]

    def _tokens(self, text: str) -> int:
        return len(self._model.tokenizer.encode(text))


def _quote(part: Part, text: str, answer: str) -> str:
    """The sentence, or line, of a part that is most like question and answer; a short one with those after it."""
    _, *sentences = (" ".join(sentence.split()) for sentence in _SENTENCE_END.split(part.written.strip()))
    sentences = [sentence for sentence in sentences if sentence]
    ranking = Ranking(sentences)
    best, *following = sentences[int(np.argmax(ranking.scores(text) + ranking.scores(answer))) :]
    while len(best) < _SHORT_QUOTE and following:
        best += f" {following.pop(0)}"
    return best if len(best) <= _LONGEST_QUOTE else f"{best[:_LONGEST_QUOTE]}…"


def _summary(parts: Sequence[Part], picked: Sequence[Part]) -> tuple[PickedParts, ...]:
    """What was picked of each document."""
    counts = Counter(part.document for part in parts)
    numbers = {name: tuple(part.number for part in picked if part.document == name) for name in counts}
    return tuple(PickedParts(name, numbers[name], of) for name, of in counts.items())


def _no_room(alone: LaidOut, answer_tokens: int, positions: int) -> ContextLengthError:
    return ContextLengthError(
        f"the question takes {alone.end} tokens and the answer {answer_tokens}, the model has room for {positions}: "
        "no part of the files fits with them",
        hint="shorten the question" if alone.end > answer_tokens else "ask for fewer tokens",
    )
