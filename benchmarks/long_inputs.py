"""Asks about a text longer than the model: parts that are picked for the question, against the beginning of the text.

    python -m benchmarks.long_inputs qmsum.dev.jsonl.gz --model MODEL_FOLDER

Each question's meeting stands among others of its data set, in an order made by chance, as one text. Compared are the
first tokens that fit, parts that are picked, and the meeting alone, which is what a perfect choice would be.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.datasets import Item, read_items
from benchmarks.lab import Lab, Ready
from benchmarks.metrics import rouge_l
from edge_pc.compose.composer import Composer
from edge_pc.compose.document_questions import Questions
from edge_pc.compose.documents import documents_schema, question
from edge_pc.documents import Document

ANSWER_TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--meetings", type=int, default=4, help="in each text")
    parser.add_argument("--rooms", type=int, nargs="*", default=[2048, 4096], help="tokens of prompt and answer")
    options = parser.parse_args(arguments)
    items = read_items(options.dataset)
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with Lab(options.model) as lab:
        for number in range(options.questions):
            others = random.Random(number).sample([item for item in items if item != items[number]], options.meetings)
            meetings = [items[number], *others[1:]]
            random.Random(number).shuffle(meetings)
            for way, ready in ways(lab, items[number], meetings, options.rooms):
                scores[way].append(scored(lab, ready, items[number]))
            lab.forget()
            for way, pairs in scores.items():
                rouges, likelihoods = zip(*pairs, strict=True)
                print(f"{number + 1} {way:20} rouge-l {mean(rouges):.4f}  answer {mean(likelihoods):.4f} nats a token")


def ways(lab: Lab, item: Item, meetings: list[Item], rooms: list[int]) -> Iterator[tuple[str, Ready]]:
    text = "\n".join(map(written, meetings))
    composer = Composer(lab.backend, lab.backend.kv_layout.name)
    for room in rooms:
        document = Document("meetings.txt", "meetings.txt", text)
        answer = lab.spec.max_positions - room + ANSWER_TOKENS
        prompt = Questions(lab.backend, composer).lay_out(item.question, [document], answer)
        yield f"picked, {room}", lab.cached(prompt, "balanced")
        for way, beginning in (("first", first_tokens(lab, text, room - 2 * ANSWER_TOKENS)), ("alone", written(item))):
            if way == "first" or room == max(rooms):
                schema, modules = documents_schema([Document("m", "meetings.txt", beginning)], chat=lab.chat)
                whole = composer.compose(schema, question(item.question, modules, chat=lab.chat))
                yield f"{way}, {room}", lab.cached(whole, "balanced")


def written(item: Item) -> str:
    return "\n".join(document.text for document in item.documents)


def first_tokens(lab: Lab, text: str, room: int) -> str:
    """Lines from the beginning of `text` that have at most `room` tokens."""
    taken = []
    for line in text.splitlines(keepends=True):
        room -= len(lab.tokenizer.encode(line))
        if room < 0:
            break
        taken.append(line)
    return "".join(taken)


def scored(lab: Lab, ready: Ready, item: Item) -> tuple[float, float]:
    """Rouge-L of the model's answer, and the log-likelihood of the right one, in nats a token."""
    answer = lab.tokenizer.decode(lab.greedy(ready, ANSWER_TOKENS).token_ids)
    right = lab.tokenizer.encode(item.answers[0])[:ANSWER_TOKENS]
    return max(rouge_l(answer, each) for each in item.answers), mean(lab.log_likelihoods(ready, right))


if __name__ == "__main__":
    main()
