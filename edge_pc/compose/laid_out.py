"""Lays a checked prompt out over its schema: which encodings it reuses, and which tokens must be computed.

Computed are arguments (at their slot's first positions), text with `cache="false"`, the schema's short closing text,
and the prompt's free text. Free text starts right after the last present cell, or with `tail="schema"` after the whole
schema, as in the paper. With `tail="packed"`, the default where states can be moved, nothing has a gap before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from edge_pc.backends.base import IntArray, KVStates, Plan, Span
from edge_pc.compose.choices import Tail
from edge_pc.compose.conversation import check_turns
from edge_pc.compose.encodings import Encoding, SchemaEncodings
from edge_pc.compose.length import length_error
from edge_pc.compose.schema_layout import ROOT, SchemaLayout, Slot
from edge_pc.compose.turns import TurnWriter
from edge_pc.errors import PMLError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.faults import fault
from edge_pc.pml.model import Role, Selection


@dataclass(frozen=True, slots=True)
class PickedParts:
    """What of a file a question is asked about, where not everything fits.

    Attributes:
        file: its name.
        parts: 1-based numbers, ascending; none where all of the file is left out.
        of: how many parts it has.
    """

    file: str
    parts: tuple[int, ...]
    of: int


@dataclass(frozen=True, slots=True)
class Cited:
    """Where an answer is from.

    Attributes:
        file: its name.
        part, of: the number (1-based) of the part of it, and how many it has; one if it is short.
        quote: the sentence there that is most like question and answer.
    """

    file: str
    part: int
    of: int
    quote: str

    def __str__(self) -> str:
        part = "" if self.of == 1 else f", part {self.part} of {self.of}"
        return f"{self.file}{part}: {self.quote}"


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A prompt's tokens and positions.

    Attributes:
        schema: the schema's layout.
        modules: paths of the imported modules, the root first.
        encodings: what is reused, disjoint in positions, by its first position.
        places: int32 `[encoding.tokens]` for each of them: where its cells are in this prompt.
        others: for each of them another version of the same cells that serves too, see `other_version`; else itself.
        exact: of these, from the first on, versions that were made after all text before them in this prompt.
        token_ids, position_ids: int32 `[n]`, of what must be computed, positions ascending.
        end: the position of the first token of the answer.
        picked: which parts of files it is about; empty where it is about all that was given.
        last_text: how many of the last tokens are those of the prompt's last text and of what opens the answer.
        in_schema: where gaps were closed: int32 `[tokens]`, ascending, where the tokens would be with them.
    """

    schema: SchemaLayout
    modules: tuple[str, ...]
    encodings: tuple[Encoding, ...]
    places: tuple[IntArray, ...]
    others: tuple[Encoding, ...]
    exact: tuple[Encoding, ...]
    token_ids: IntArray
    position_ids: IntArray
    end: int
    last_text: int
    picked: tuple[PickedParts, ...] = ()
    in_schema: IntArray | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) + sum(encoding.tokens for encoding in self.encodings)

    def in_position_order(self) -> IntArray:
        """All token ids of the prompt, int32 `[tokens]`, as a person would read it: what full prefill computes."""
        return self.computed_plan().token_ids

    def places_of(self, path: str) -> IntArray:
        """Where the cells of an imported module are in this prompt, int32 `[tokens of the module]`."""
        positions = self.schema.modules[path].position_ids
        if self.in_schema is None:
            return positions
        return np.searchsorted(self.in_schema, positions).astype(np.int32)

    def computed_plan(self) -> Plan:
        """The plan that computes every token at its own position, nothing reused."""
        return self.cached_plan(())

    def full_plan(self) -> Plan:
        """Full prefill: the same tokens at contiguous positions, nothing reused."""
        token_ids = self.in_position_order()
        return Plan((), token_ids, np.arange(len(token_ids), dtype=np.int32))

    def cached_plan(self, states: Sequence[KVStates], *, exact: bool = False) -> Plan:
        """The plan that injects `states`, those of the first encodings, and computes the rest.

        Where stored states end the prompt, their last cell is computed again, for its logits.
        """
        served = len(states)
        spans = [span for s, place in zip(states, self.places, strict=False) for span in _placed(s, place)]
        token_ids = np.concatenate([*(e.kept_token_ids for e in self.encodings[served:]), self.token_ids])
        position_ids = np.concatenate([*self.places[served:], self.position_ids])
        if spans:
            ends = [int(span.position_ids[-1]) for span in spans]
            last = int(np.argmax(ends))
            if ends[last] > position_ids.max(initial=-1):
                span = spans[last]
                spans[last] = replace(span, stop=span.stop - 1)
                token_ids = np.append(token_ids, span.token_ids[-1:])
                position_ids = np.append(position_ids, span.position_ids[-1:])
        order = np.argsort(position_ids, kind="stable")
        return Plan(tuple(span for span in spans if span.tokens), token_ids[order], position_ids[order], exact)


def lay_out_prompt(
    selection: Selection,
    encodings: SchemaEncodings,
    layout: SchemaLayout,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    tail: Tail,
) -> LaidOut:
    """Give a checked prompt its tokens and positions.

    Raises:
        PMLError: an argument is longer than its parameter; the prompt has no text at all.
        EdgePCError: the chat template refuses the order of roles.
    """
    modules = (ROOT, *selection.modules)
    reused = sorted(encodings.of_prompt(selection.modules), key=lambda encoding: int(encoding.kept_position_ids[0]))
    computed = [*_uncached(layout, modules), *_arguments(layout, selection, tokenizer)]
    ends = [int(ids[-1]) + 1 for ids in (e.kept_position_ids for e in reused) if len(ids)]
    ends += [start + len(token_ids) for start, token_ids in computed if token_ids]
    start = max(ends, default=0)
    if tail == "schema":
        start = max(start, layout.length - len(layout.closing_ids))
    free_text, text_start = _free_text(selection, layout, tokenizer, template)
    computed.append((start, [*layout.closing_ids, *free_text]))
    computed.sort()
    token_ids = np.array([token for _, part in computed for token in part], dtype=np.int32)
    position_ids = np.array([p for begin, part in computed for p in range(begin, begin + len(part))], dtype=np.int32)
    end = start + len(computed[-1][1])
    if not end:
        raise fault("the prompt has no text: its schema has none, and it adds none", selection.at, name=layout.name)
    places = [encoding.kept_position_ids for encoding in reused]
    in_schema = None
    if tail == "packed":
        in_schema = np.sort(np.concatenate([*places, position_ids]))
        *places, position_ids = (np.searchsorted(in_schema, part).astype(np.int32) for part in [*places, position_ids])
        end = len(in_schema)
    exact = encodings.exact(reused, places, int(position_ids[0]) if len(position_ids) else end)
    others = [encodings.other_version(encoding) for encoding in reused]
    return LaidOut(
        layout, modules, tuple(reused), tuple(places), tuple(others), tuple(exact), token_ids, position_ids, end,
        len(free_text) - text_start, in_schema=in_schema,
    )  # fmt: skip


def _placed(states: KVStates, place: IntArray) -> Iterator[Span]:
    """Spans that put the cells of `states` in their places: one, unless gaps between them were closed."""
    shifts = place - states.position_ids
    edges = [0, *(np.flatnonzero(np.diff(shifts)) + 1).tolist(), len(place)]
    for start, stop in pairwise(edges):
        yield Span(states, start, stop, int(shifts[start]))


def check_length(prompt: LaidOut, max_tokens: int, max_positions: int) -> None:
    """Refuse a prompt whose answer may not fit; exactly the limit is allowed.

    Raises:
        ContextLengthError: the message lists the largest parts.
    """
    needed = prompt.end + max_tokens
    if needed > max_positions:
        modules = {path: len(prompt.schema.modules[path].token_ids) for path in prompt.modules}
        text = prompt.tokens - sum(modules.values())
        raise length_error(prompt.schema.schema, modules, needed, max_positions, text=text, answer=max_tokens)


def _uncached(layout: SchemaLayout, modules: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """(start, tokens) of each contiguous piece of text that is computed for every prompt."""
    for path in modules:
        module = layout.modules[path]
        if module.cache or not len(module.token_ids):
            continue
        cuts = np.flatnonzero(np.diff(module.position_ids) != 1) + 1
        pieces = zip(np.split(module.position_ids, cuts), np.split(module.token_ids, cuts), strict=True)
        yield from ((int(positions[0]), token_ids.tolist()) for positions, token_ids in pieces)


def _arguments(layout: SchemaLayout, selection: Selection, tokenizer: Tokenizer) -> Iterator[tuple[int, list[int]]]:
    """(start, tokens) of each argument, at its slot's first positions."""
    for path in selection.modules:
        for slot in layout.modules[path].slots:
            text = selection.arguments[path, slot.name]
            token_ids = tokenizer.encode(" " + text if slot.space_before and text else text)
            if len(token_ids) > slot.length:
                raise _too_long(path, slot, len(token_ids), selection)
            if token_ids:
                yield slot.start, token_ids


def _too_long(path: str, slot: Slot, tokens: int, selection: Selection) -> PMLError:
    return fault(
        f"the argument {slot.name!r} of module {path!r} has {tokens} tokens, at most {slot.length} fit",
        selection.locations.get(path, selection.at),
        name=slot.name,
        hint="shorten it, or raise the parameter's length in the schema",
    )


def _free_text(
    selection: Selection, layout: SchemaLayout, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], int]:
    """Tokens of the prompt's own text and, in a chat, of the mark that opens the answer; where the last text begins.

    In a schema with chat tags, text outside chat tags is the user's turn. An assistant's turn at the very end is left
    open: it is the beginning of the answer.
    """
    pieces = selection.free_text
    if not layout.roles and all(piece.role is None for piece in pieces):
        texts = [tokenizer.encode(piece.text) for piece in pieces]
        return [token for text in texts for token in text], sum(map(len, texts[:-1]))
    turns: list[tuple[Role, str]] = [(piece.role or "user", piece.text) for piece in pieces]
    check_turns(template, [*layout.roles, *(role for role, _ in turns)])
    writer = TurnWriter(template, tokenizer, layout.roles, bos_id=layout.bos_id, boundary=not layout.length)
    for role, text in turns:
        writer.turn(role, text)
    if not turns or turns[-1][0] != "assistant":
        writer.ask()
    return writer.token_ids, writer.text_start
