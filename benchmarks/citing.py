"""Which document is an answer from? Finds it by words and by attention, and counts how often that is the right one.

    python -m benchmarks.citing nq_multidoc_10.dev.jsonl.gz --model MODEL_FOLDER

The data must say which document has the answer. Words: BM25 of the documents for question, answer, or both. Attention:
that of the prompt's last tokens, or of these and the answer, summed up or averaged over each document's cells.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets import Item, read_items
from benchmarks.lab import Lab
from edge_pc.backends.base import Plan
from edge_pc.compose.composer import Composer
from edge_pc.compose.documents import documents_schema, question
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.ranking import Ranking
from edge_pc.documents import Document

ANSWER_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=60)
    options = parser.parse_args(arguments)
    right: Counter[str] = Counter()
    items = read_items(options.dataset)[: options.questions]
    with Lab(options.model) as lab:
        for item in items:
            right.update(way for way, scores in ways(lab, item).items() if int(np.argmax(scores)) == item.gold)
            lab.forget()
    for way, count in right.most_common():
        print(f"{way:24} {count} of {len(items)}")


def ways(lab: Lab, item: Item) -> dict[str, NDArray[Any]]:
    """Way → how likely each document is the source by it."""
    documents = [Document(f"d{n}", each.title or f"d{n}", each.text) for n, each in enumerate(item.documents)]
    schema, modules = documents_schema(documents, chat=lab.chat)
    prompt = Composer(lab.backend, lab.backend.kv_layout.name).compose(
        schema, question(item.question, modules, chat=lab.chat)
    )
    token_ids = lab.greedy(lab.cached(prompt, "balanced"), ANSWER_TOKENS).token_ids
    ranking = Ranking([f"{document.title}\n{document.text}" for document in documents])
    by_question, by_answer = ranking.scores(item.question), ranking.scores(lab.tokenizer.decode(token_ids))
    found = {"words, question": by_question, "words, answer": by_answer, "words, both": by_question + by_answer}
    plan = lab.cached(prompt).plan
    for name, asked in (("question", plan), ("both", _continued(plan, token_ids, prompt.end))):
        with closing(lab.backend.new_context(prompt.tokens + ANSWER_TOKENS)) as context:
            weights = context.attention(asked)
        per_document = [weights[cells] for cells in _cells(prompt, plan, modules)]
        found[f"attention, {name}, sum"] = np.array([each.sum() for each in per_document])
        found[f"attention, {name}, mean"] = np.array([each.mean() for each in per_document])
    return found


def _continued(plan: Plan, answer: Sequence[int], end: int) -> Plan:
    token_ids = np.concatenate([plan.token_ids, np.array(answer, dtype=np.int32)])
    position_ids = np.concatenate([plan.position_ids, np.arange(end, end + len(answer), dtype=np.int32)])
    return replace(plan, token_ids=token_ids, position_ids=position_ids)


def _cells(prompt: LaidOut, plan: Plan, modules: Sequence[str]) -> list[NDArray[Any]]:
    """For each document, which of the plan's cached cells are its."""
    versions = [
        *zip(prompt.encodings, prompt.encodings, strict=True),
        *zip(prompt.others, prompt.encodings, strict=True),
    ]
    versions += zip(prompt.exact, prompt.encodings, strict=False)
    paths = {version.key: encoding.outermost for version, encoding in versions}
    owners = np.concatenate([np.full(span.tokens, paths[span.states.key], dtype=object) for span in plan.spans])
    return [owners == module for module in modules if "/" not in module]


if __name__ == "__main__":
    main()
