"""Conversations as programs hand them over: messages, written whole by the model's own template.

Reuse goes by what the template wrote, not by who sent it: the token ids are cut into modules nested in one another,
whose states are then those of full prefill. A later request that begins with the same tokens has the same modules,
whatever follows. Cuts depend only on what stands before them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from edge_pc.compose.encodings import EncodingOptions, SchemaEncodings
from edge_pc.compose.laid_out import LaidOut
from edge_pc.compose.schema_layout import ROOT, ModuleLayout, SchemaLayout
from edge_pc.errors import OptionError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.pml.model import NOWHERE, Schema

Message = Mapping[str, Any]

SCHEMA_NAME = "messages"

# Fewer tokens are computed again about as fast as their states are found and placed.
STORED_FROM = 256
# A longer message is cut, so that an edit in its middle leaves what stands before it.
PART_TOKENS = 1536

# Beginnings of conversations whose parts are kept, those used last.
_KEPT_BEGINNINGS = 64

_BLANK_LINE = "\n\n"


class MessageWriter:
    """Writes messages for one model.

    Args:
        bos_id: the token at position 0 that the model wants, or None.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, bos_id: int | None) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._bos_id = bos_id

    def ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, answer: bool) -> list[int]:
        """Token ids of messages as the template writes them; what spells a control token in them stays text.

        Messages that the template has no place for are merged with others, a blank line between them.

        Args:
            messages: each with its `role` and `content`, and what else the template may ask for.
            tools: what the model may call, in OpenAI's form.
            answer: with what makes the model answer at the end.

        Raises:
            OptionError: the template refuses the messages, or has no place for tools.
            ModelError: there is no template, or it is broken.
        """
        if tools:
            self._template.require_tools()
        guard = _unused_character(messages, tools)
        guarded = [
            _mapped(message, lambda text: self._tokenizer.break_control_tokens(text, guard)) for message in messages
        ]
        guarded_tools = _mapped(tools, lambda text: self._tokenizer.break_control_tokens(text, guard))
        try:
            text = self._template.render_messages(guarded, guarded_tools, answer=answer)
        except OptionError:
            merged = list(_merged(guarded, self._template))
            if merged == guarded:
                raise
            text = self._template.render_messages(merged, guarded_tools, answer=answer)
        ids = self._tokenizer.encode_template(text, boundary=True, guard=guard)
        return [self._bos_id, *ids] if self._bos_id is not None and ids[:1] != [self._bos_id] else ids

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a plain text from the very start of a prompt."""
        bos = [] if self._bos_id is None else [self._bos_id]
        return bos + self._tokenizer.encode(text, boundary=True)

    def cuts(self, ids: Sequence[int], before_last: Sequence[int]) -> list[int]:
        """Where ids are cut into modules: after a control token, at least `STORED_FROM` tokens after the cut before,
        and at most `PART_TOKENS`. Nothing after the last cut is kept.

        Args:
            before_last: ids of all messages but the last one. The last one is new, and seldom comes again.
        """
        limit = common_prefix(np.array(ids), np.array(before_last))
        ends = [index + 1 for index, id_ in enumerate(ids[:limit]) if self._tokenizer.is_control(id_)]
        cuts = [0]
        for end, whole in [*((end, True) for end in ends), (limit, False)]:
            while end - cuts[-1] >= PART_TOKENS:
                cuts.append(cuts[-1] + PART_TOKENS)
            if whole and end - cuts[-1] >= STORED_FROM:
                cuts.append(end)
        return cuts[1:]


def lay_out_ids(
    ids: Sequence[int],
    cuts: Sequence[int],
    identity: tuple[str, ...],
    options: EncodingOptions,
) -> LaidOut:
    """A prompt of these ids at contiguous positions; what stands before each of `cuts` is in modules.

    Raises:
        OptionError: there is no token.
    """
    if not ids:
        raise OptionError("the prompt is empty")
    token_ids = np.array(ids, dtype=np.int32)
    start = cuts[-1] if cuts else 0
    stored = _stored_parts(token_ids[:start].tobytes(), tuple(cuts), identity, options)
    rest = np.arange(start, len(ids), dtype=np.int32)
    return replace(stored, token_ids=token_ids[start:], position_ids=rest, end=len(ids), last_text=len(rest))


@lru_cache(_KEPT_BEGINNINGS)
def _stored_parts(ids: bytes, cuts: tuple[int, ...], identity: tuple[str, ...], options: EncodingOptions) -> LaidOut:
    """The modules that int32 `ids` are cut into. Conversations that begin alike, or go on, have the same."""
    token_ids = np.frombuffer(ids, dtype=np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32)
    modules: dict[str, ModuleLayout] = {}
    path, parent, start = ROOT, None, 0
    for number, end in enumerate(cuts or [0], 1):
        part = slice(start, end)
        length = len(token_ids) - start
        modules[path] = ModuleLayout(path, parent, start, length, token_ids[part], positions[part], (), True)
        path, parent, start = f"{path}/part{number + 1}" if path else f"part{number + 1}", path, end
    layout = SchemaLayout(Schema(SCHEMA_NAME, (), NOWHERE), modules, (), (), start, None, ())
    # What stands before is certain, so no other rule could do better.
    encodings = SchemaEncodings(layout, identity, replace(options, rule="guaranteed"))
    reused = tuple(encodings.of_prompt([path for path in modules if path != ROOT]))
    places = tuple(encoding.kept_position_ids for encoding in reused)
    exact = tuple(encodings.exact(reused, places, start))
    none = token_ids[:0]
    return LaidOut(layout, tuple(modules), reused, places, reused, exact, none, none, start, 0)


def common_prefix(one: Any, other: Any) -> int:
    """How many items two integer arrays have in common from the first on."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differing[0]) if len(differing) else length


def _unused_character(*values: Any) -> str:
    """A character for private use that none of the texts has."""
    used = json.dumps(values, ensure_ascii=False, default=str)
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _merged(messages: Collection[Message], template: ChatTemplate) -> Iterator[Message]:
    """The messages, a system text opening the user's turn and neighbours of one role being one message."""
    opening, pending = "", None
    for message in messages:
        message = dict(message)
        if message["role"] == "system" and not template.accepts("system", None):
            opening += message["content"] + _BLANK_LINE
            continue
        if message["role"] == "user":
            message["content"], opening = opening + message["content"], ""
        if pending and pending["role"] == message["role"] and set(message) == set(pending) == {"role", "content"}:
            pending["content"] += _BLANK_LINE + message["content"]
            continue
        if pending:
            yield pending
        pending = message
    if pending:
        yield pending
    if opening:
        yield {"role": "user", "content": opening.removesuffix(_BLANK_LINE)}
