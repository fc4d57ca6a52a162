"""Calls of tools, in the form in which the model's own template writes them.

The form is learned from the template: it writes a call with sentinels, and what it wrote around them is the form.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_pc.errors import EdgePCError, OptionError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.sampling import Grammar

_NAME, _ARGUMENT = "SENTINELNAME", "SENTINELARGUMENT"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template writes a call.

    Attributes:
        before, after: text around the JSON object, control tokens left out; white space at its ends does not count.
        name_key, arguments_key: of the object.
    """

    before: str
    after: str
    name_key: str
    arguments_key: str

    def begin(self, text: str) -> int:
        """Where in an answer its calls may begin, or else its end: the text before that is surely no call."""
        opening = self.before.strip() or "{"
        found = text.find(opening)
        if found >= 0:
            return found
        held = max((n for n in range(1, len(opening)) if text.endswith(opening[:n])), default=0)
        return len(text) - held

    def read(self, text: str, names: Collection[str]) -> tuple[str, list[Call]]:
        """What an answer says besides, and its calls of tools that there are."""
        begin = self.begin(text)
        calls = [Call(value[self.name_key], _arguments(value)) for value in self._objects(text[begin:], names)]
        return (text[:begin].strip() if calls else text), calls

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> Grammar:
        """An answer that is one call of one of these tools."""
        choices = [
            {
                "type": "object",
                "properties": {
                    self.name_key: {"const": tool["function"]["name"]},
                    self.arguments_key: tool["function"].get("parameters") or {"type": "object"},
                },
                "required": [self.name_key, self.arguments_key],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        call = json.dumps({"anyOf": choices, "x-guidance": {"whitespace_flexible": False}})
        literals = [json.dumps(part) if part else "" for part in (self.before, self.after)]
        return Grammar.lark(f"start: {literals[0]} call {literals[1]}\ncall: %json {call}")

    def _objects(self, text: str, names: Collection[str]) -> Iterator[Mapping[str, Any]]:
        """Every JSON object in a text that is a call."""
        decoder = json.JSONDecoder()
        index = text.find("{")
        while index >= 0:
            try:
                value, index = decoder.raw_decode(text, index)
            except (ValueError, RecursionError):
                index += 1
            else:
                if isinstance(value.get(self.name_key), str) and value[self.name_key] in names:
                    yield {**value, "arguments": value.get(self.arguments_key, {})}
            index = text.find("{", index)


def learn_form(template: ChatTemplate, tokenizer: Tokenizer) -> CallForm:
    """How a model writes calls.

    Raises:
        OptionError: its template has no place for tools, or writes calls in a way that is not read here.
    """
    template.require_tools()
    call = {"type": "function", "function": {"name": _NAME, "arguments": {_ARGUMENT: 1}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "SENTINELTEXT"},
    ]
    tools = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}]
    try:
        plain = template.render_messages(turns, tools, answer=False)
        turns[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
        calling = template.render_messages(turns, tools, answer=False)
    except EdgePCError as exc:
        raise _unreadable() from exc
    opening, _, ending = plain.partition("SENTINELTEXT")
    written = calling.removeprefix(_common_start(opening, calling)).removesuffix(ending)
    decoder = json.JSONDecoder()
    for start in (index for index, character in enumerate(written) if character == "{"):
        try:
            value, end = decoder.raw_decode(written, start)
        except ValueError:
            continue
        names = [key for key, item in value.items() if item == _NAME]
        arguments = [key for key, item in value.items() if item == {_ARGUMENT: 1}]
        if names and arguments:
            before, after = (_without_control(part, tokenizer) for part in (written[:start], written[end:]))
            return CallForm(before, after, names[0], arguments[0])
    raise _unreadable()


def _common_start(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _without_control(text: str, tokenizer: Tokenizer) -> str:
    """The text as it is decoded: control tokens leave nothing."""
    return tokenizer.decode(tokenizer.encode_template(text))


def _arguments(value: Mapping[str, Any]) -> str:
    arguments = value["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _unreadable() -> OptionError:
    return OptionError(
        "the model's chat template writes calls of tools in a way that the server cannot read",
        hint="use a model that writes calls as JSON",
    )
