"""A model's own chat template, cut into what stands before and after each turn's text.

A template is a Jinja program that writes a whole conversation. It is rendered here with sentinels for the contents,
and whatever it wrote around a sentinel is that turn's prefix and suffix. Templates come with model files, so they run
in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NoReturn

from edge_pc.errors import EdgePCError, ModelError, OptionError
from edge_pc.pml.model import ROLES, Role

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE = "chat_template.jinja"


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

    def prepare(self) -> None:
        """Do now, while something else is waited for, what the first prompt would wait for: load Jinja, cut turns."""
        if self.source is not None:
            with suppress(EdgePCError):  # told when a prompt needs it
                for role in ROLES:
                    self.affixes(role, first=role == "system")
                self.generation_prompt  # noqa: B018 - for its side effect

    def affixes(self, role: Role, first: bool) -> Affixes:
        """Prefix and suffix of a turn.

        Args:
            role: whose turn it is.
            first: it is the conversation's first; what a template writes only there (a BOS, a default system prompt)
                belongs to its prefix.

        Raises:
            ModelError: there is no template, it is broken, or it has no place for such a turn.
        """
        return self._affixes(role, first)

    @cached_property
    def generation_prompt(self) -> str:
        """What follows the last turn to make the model answer."""
        turns = _turns(["user"])
        without, with_prompt = self._render(turns, False), self._render(turns, True)
        if not with_prompt.startswith(without):
            raise ModelError("the model's chat template writes its generation prompt elsewhere than at the end")
        return with_prompt[len(without) :]

    def check(self, roles: Sequence[Role]) -> None:
        """Render a conversation with these turns, and compare it with the turns cut out one by one.

        Raises:
            OptionError: the template refuses this sequence of roles; the message has its own complaint.
            ModelError: there is no template, it is broken, or what it writes for a turn depends on the other turns.
        """
        if not roles:
            return
        turns = _turns(roles)
        whole = self._render(turns, False)
        parts = [self.affixes(role, first=i == 0) for i, role in enumerate(roles)]
        if whole != "".join(a.prefix + turn["content"] + a.suffix for a, turn in zip(parts, turns, strict=True)):
            raise ModelError(
                f"what the model's chat template writes for the turns {', '.join(roles)} depends on the turns around "
                "them, so it cannot be put together turn by turn"
            )

    def _cut_affixes(self, role: Role, first: bool) -> Affixes:
        """Cut the turn out of a short conversation that ends with it."""
        turns = _turns([role] if first else [*_BEFORE[role], role])
        before, content = turns[:-1], turns[-1]["content"]
        text = self._render(turns, False)
        text_before = self._render(before, False) if before else ""
        if not text.startswith(text_before):
            raise ModelError(f"the model's chat template writes earlier turns in another way before a {role} turn")
        prefix, found, suffix = text[len(text_before) :].partition(content)
        if not found or content in suffix:
            raise ModelError(f"the model's chat template has no single place for the text of a {role} turn")
        return Affixes(prefix, suffix)

    def _render(self, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(
                self._special_tokens,
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                # Templates of models that can call tools test these for none, not for being defined.
                tools=None,
                documents=None,
            )
        except _Complaint as exc:
            roles = ", ".join(turn["role"] for turn in turns)
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
                hint="take an instruction-tuned model, or write the text without chat tags",
            )
        # The settings that templates are written for. `strftime_now` is missing on purpose: a prompt that holds
        # today's date would miss every cached state tomorrow; templates fall back to a fixed date.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _complain
        try:
            return environment.from_string(self.source)
        except TemplateError as exc:
            raise ModelError(f"the model's chat template is not valid Jinja: {exc}") from exc


# The turns before one that is not the first, in an order that templates accept.
_BEFORE: dict[Role, tuple[Role, ...]] = {
    "system": ("user", "assistant"),
    "user": ("user", "assistant"),
    "assistant": ("user",),
}


def _turns(roles: Sequence[Role]) -> list[dict[str, str]]:
    """Messages as templates take them; contents are sentinels that no template trims, escapes or looks into."""
    return [{"role": role, "content": f"SENTINEL{i}TURN"} for i, role in enumerate(roles)]


class _Complaint(Exception):
    """A template called `raise_exception`."""


def _complain(message: str) -> NoReturn:
    raise _Complaint(message)
