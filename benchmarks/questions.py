"""Turns an item of a data set into a schema and a prompt: one module a document, the question as the user's turn.

Instructions are short and stand next to the question, because small models otherwise answer with whole sentences or
forget what was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.datasets import Document, Item
from benchmarks.lab import Lab
from edge_pc.compose.documents import cut_at_paragraphs, nested
from edge_pc.compose.laid_out import LaidOut
from edge_pc.errors import OptionError
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.model import FreeText, Location, Module, Node, Schema, Selection, Text, Turn

NOWHERE = Location(None, 0, 0)

# A rest of a document that is shorter than this is left out: it would be little more than its heading.
_MIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """What a data set asks for.

    Attributes:
        metric: the one its answers are scored with.
        instruction: opens the prompt, before the documents.
        request: follows the question.
        max_tokens: of the answer.
    """

    metric: str
    instruction: str
    request: str
    max_tokens: int = 32


_FACTS = ("Answer the question from the documents below.", "Answer with a few words from the documents.")
_FACT = Task("f1", *_FACTS)
_MEETING = Task("rouge_l", "Answer the question from the meeting below.", "Answer in one or two sentences.", 64)
_SUMMARY = Task("rouge_l", "Summarize the text below.", "Write a summary in a few sentences.", 128)
_RETRIEVAL = Task(
    "retrieval",
    "Below are numbered paragraphs, and then a summary of one of them.",
    "Which paragraph does this summarize? Answer like this: Paragraph 1",
)
TASKS = {
    "nq_multidoc": Task("substring", *_FACTS),
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), _FACT),
    "qmsum": _MEETING,
    **dict.fromkeys(("gov_report", "multi_news"), _SUMMARY),
    "passage_retrieval_en": _RETRIEVAL,
}
# Data sets of LongBench whose scores need more than words: classes, code, or cutting Chinese text into words.
_OTHERS = {"trec", "lsht", "samsum", "passage_count", "lcc", "repobench-p", "vcsum", "dureader"}
_OTHERS |= {"multifieldqa_zh", "passage_retrieval_zh"}


def task_of(item: Item) -> Task:
    """What the item's data set asks for; a data set that is not known asks for facts.

    Raises:
        OptionError: a data set whose scores are not computed here.
    """
    name = item.dataset.removesuffix("_e")
    if name in _OTHERS:
        raise OptionError(f"answers of {item.dataset} cannot be scored", hint=f"these can: {', '.join(TASKS)}")
    return TASKS.get(name, _FACT)


@dataclass(frozen=True, slots=True)
class Question:
    """An item as it is asked.

    Attributes:
        parts: for each document the texts that it is encoded as, one unless it is long and alone.
        cut_tokens: tokens of documents that had to be left out, because the model has no positions for them.
    """

    item: Item
    task: Task
    parts: tuple[tuple[str, ...], ...]
    cut_tokens: int

    def schema(self, *, chat: bool) -> tuple[Schema, Selection]:
        """A schema with one module a document, and the prompt that imports them all."""
        modules = [nested(parts, _names(number, parts)) for number, parts in enumerate(self.parts, start=1)]
        schema = wrap([Text(self.task.instruction, NOWHERE), *modules], chat=chat)
        return schema, self.ask(schema.modules(), chat=chat)

    def ask(self, modules: Sequence[str] | dict[str, Module], *, chat: bool) -> Selection:
        """The prompt that imports `modules` (their paths)."""
        text = f"{self.item.question}\n{self.task.request}".strip()
        free_text = FreeText(text, "user", NOWHERE) if chat else FreeText(f"\n\n{text}\nAnswer:", None, NOWHERE)
        return Selection(tuple(modules), free_text=(free_text,), at=NOWHERE)


def wrap(children: Sequence[Node], *, chat: bool) -> Schema:
    """A schema with `children` in the system turn, or without turns."""
    nodes = tuple(children)
    return Schema("documents", (Turn("system", nodes, NOWHERE),) if chat else nodes, NOWHERE)


def question_of(item: Item, lab: Lab) -> Question:
    """Cut the item's documents from the end so that they and an answer fit into the model's positions.

    Raises:
        OptionError: a data set whose scores are not computed here.
        ContextLengthError: not even the question fits.
    """
    task = task_of(item)
    alone = len(item.documents) == 1
    texts = [_written(document, number) for number, document in enumerate(item.documents, start=1)]
    parts = [tuple(cut_at_paragraphs(text)) if alone else (text,) for text in texts]
    room = lab.spec.max_positions - lay_out(Question(item, task, (), 0), lab).end - task.max_tokens
    kept, cut_tokens = _fit(parts, room, lab.tokenizer)
    return Question(item, task, kept, cut_tokens)


def lay_out(question: Question, lab: Lab) -> LaidOut:
    """Lay a question out over one module a document, with the engine's defaults."""
    return lab.lay_out(*question.schema(chat=lab.chat))


def _written(document: Document, number: int) -> str:
    return f"\n\n{document.title or f'Document {number}'}:\n{document.text}"


def _names(number: int, parts: Sequence[str]) -> list[str]:
    return [f"document-{number}", *(f"part-{part}" for part in range(2, len(parts) + 1))]


def _fit(
    documents: Sequence[tuple[str, ...]], room: int, tokenizer: Tokenizer
) -> tuple[tuple[tuple[str, ...], ...], int]:
    """As much of the documents, from the first on, as has at most `room` tokens; and how many tokens were left out."""
    fitted, left_out = [], 0
    for parts in documents:
        kept: list[str] = []
        for part in parts:
            token_ids = tokenizer.encode(part)
            text = part if len(token_ids) <= room else _first_tokens(part, room, tokenizer)
            taken = len(tokenizer.encode(text))
            left_out += len(token_ids) - taken
            room = room - taken if text == part else 0
            if text:
                kept.append(text)
        if kept:
            fitted.append(tuple(kept))
    return tuple(fitted), left_out


def _first_tokens(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The longest beginning of `text`, a little short of it maybe, that has at most `tokens` tokens."""
    if tokens < _MIN_TOKENS:
        return ""
    # A cut inside a character leaves a replacement character; a cut text may have other tokens than it had uncut.
    cut = tokenizer.decode(tokenizer.encode(text)[:tokens]).rstrip("\ufffd")
    while len(tokenizer.encode(cut)) > tokens:
        cut = cut[:-1]
    return cut
