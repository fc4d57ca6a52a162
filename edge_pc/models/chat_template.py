"""A model's own chat template, cut into what stands before and after each turn's text.

A template is a Jinja program that writes a whole conversation. It is rendered here with sentinels for the contents,
and whatever it wrote around a sentinel is that turn's prefix and suffix. Templates come with model files, so they run
in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edge_pc.errors import EdgePCError, ModelError, OptionError
from edge_pc.pml.model import Role

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE = 2**20  # in bytes or characters, far above the longest ones


def read_template(path: Path) -> str:
    """The template in a file.

    Raises:
        ModelError: it is missing, not UTF-8, or far too large.
    """
    try:
        if path.stat().st_size > MAX_TEMPLATE:
            raise ModelError(f"{path} has {path.stat().st_size} bytes, expected at most {MAX_TEMPLATE}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Affixes:
    """What a template writes before and after the text of one turn; it may hold control tokens."""

    prefix: str
    suffix: str


class ChatTemplate:
    """The chat template of one model. Safe to use from several threads.

    Args:
        source: Jinja text, or None: the model has none.
        special_tokens: what templates may ask for (`bos_token`, `eos_token`, …).

    Attributes:
        source: as given.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._affixes = cache(self._cut_affixes)
        self._accepts = cache(self._has_place)

    def prepare(self) -> None:
        """Do now, while something else is waited for, what the first prompt would wait for: load Jinja, cut turns."""
        if self.source is not None:
            with suppress(EdgePCError):  # told when a prompt needs it
                self.generation_prompt  # noqa: B018 - for its side effect
                self.affixes("user", None)
                self.affixes("system", None)
                self.affixes("user", "system")

    def affixes(self, role: Role, after: Role | None) -> Affixes:
        """Prefix and suffix of a turn.

        Args:
            role: whose turn it is.
            after: whose turn stands before it. None: it is the conversation's first, and what a template writes only
                there (a BOS, a default system prompt) belongs to its prefix.

        Raises:
            OptionError: the template refuses such a turn; the message quotes its complaint.
            ModelError: there is no template, it is broken, or it has no place for such a turn.
        """
        return self._affixes(role, after)

    def accepts(self, role: Role, after: Role | None) -> bool:
        """Whether the template has a place for such a turn."""
        return self._accepts(role, after)

    @cached_property
    def generation_prompt(self) -> str:
        """What follows the last turn to make the model answer."""
        turns: list[tuple[Role, str]] = [("user", "text")]
        without, with_prompt = self._render(turns, False), self._render(turns, True)
        if not with_prompt.startswith(without):
            raise ModelError("the model's chat template does not write its generation prompt at the end")
        return with_prompt[len(without) :]

    def render(self, turns: Sequence[tuple[Role, str]]) -> str:
        """What the template writes for a conversation of these (role, text).

        Raises:
            OptionError: the template refuses it; the message has its own complaint.
            ModelError: there is no template, or it is broken.
        """
        return self._render(turns, False)

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, answer: bool
    ) -> str:
        """What the template writes for messages with all that they hold, and for tools in OpenAI's form.

        Args:
            answer: with the generation prompt.

        Raises:
            OptionError, ModelError: as `render`.
        """
        return self._write(messages, answer, tools)

    def require_tools(self) -> None:
        """Raises:
        OptionError: the template has no place for tools.
        """
        if not self._knows_tools:
            raise OptionError(
                "the model's chat template has no place for tools", hint="use a model that was trained to call tools"
            )

    @cached_property
    def _knows_tools(self) -> bool:
        tool = {"name": "SENTINELTOOL", "description": "SENTINEL", "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._write([{"role": "user", "content": "text"}], True, [{"type": "function", "function": tool}])
        except (OptionError, ModelError):
            return False
        return "SENTINELTOOL" in text

    def _cut_affixes(self, role: Role, after: Role | None) -> Affixes:
        """Cut the turn out of a short conversation that ends with it."""
        before = _up_to(after)
        pieces = self._cut_turns((*before, role))
        if pieces is None:
            raise ModelError(f"the model's chat template has no single place for the text of a {role} turn")
        between, suffix = pieces[len(before) : len(before) + 2]
        ending = "" if after is None else self.affixes(after, before[-2] if len(before) > 1 else None).suffix
        if not between.startswith(ending):
            raise ModelError(f"the model's chat template writes earlier turns differently before one of the {role}")
        return Affixes(between[len(ending) :], suffix)

    def _cut_turns(self, roles: tuple[Role, ...]) -> list[str] | None:
        """As `_cut`; a system turn is cut before the user's where the template has no place for it alone."""
        if roles[-1] == "system":
            with suppress(OptionError):
                if (alone := self._cut(roles)) is not None:
                    return alone
            roles = (*roles, "user")
        return self._cut(roles)

    def _cut(self, roles: tuple[Role, ...]) -> list[str] | None:
        """What stands before, between and after the texts of a conversation; None if one is missing or there twice."""
        turns = [(role, f"SENTINEL{i}TURN") for i, role in enumerate(roles)]  # nothing to trim, escape or look into
        rest = self._render(turns, False)
        pieces = []
        for _, text in turns:
            piece, found, rest = rest.partition(text)
            if not found:
                return None
            pieces.append(piece)
        pieces.append(rest)
        return None if any(text in piece for piece in pieces for _, text in turns) else pieces

    def _has_place(self, role: Role, after: Role | None) -> bool:
        try:
            self.affixes(role, after)
        except (OptionError, ModelError):  # of a template that is broken, all turns tell
            return False
        return True

    def _render(self, turns: Sequence[tuple[Role, str]], add_generation_prompt: bool) -> str:
        return self._write([{"role": role, "content": text} for role, text in turns], add_generation_prompt, None)

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(
                self._special_tokens,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                # Templates of models that can call tools test these for none, not for being defined.
                tools=tools or None,
                documents=None,
            )
        except _Complaint as exc:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise OptionError(f"the model's chat template refuses the turns {roles}: {exc}") from exc
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as exc:
            raise ModelError(f"the model's chat template cannot be rendered: {exc}") from exc

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.source is None:
            raise ModelError(
                "the model has no chat template, so the tags <system>, <user> and <assistant> cannot be used",
                hint="use an instruction-tuned model, or write the text without chat tags",
            )
        # The settings that templates are written for. `strftime_now` is missing on purpose: a prompt that holds
        # today's date would miss every cached state tomorrow; templates fall back to a fixed date.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _complain
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self.source)
        except TemplateError as exc:
            raise ModelError(f"the model's chat template is not valid Jinja: {exc}") from exc


def _up_to(role: Role | None) -> tuple[Role, ...]:
    """A conversation that ends with a turn of `role`, in an order that templates accept."""
    if role is None:
        return ()
    return ("user", role) if role == "assistant" else (role,)


class _Complaint(Exception):
    """A template called `raise_exception`."""


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it: Jinja's own filter writes it for HTML."""
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _complain(message: str) -> NoReturn:
    raise _Complaint(message)
