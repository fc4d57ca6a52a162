"""From a request to what the scheduler is to answer. What is wrong with a request shows here, before it waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from edge_pc.compose.laid_out import LaidOut
from edge_pc.engine import Engine
from edge_pc.errors import OptionError
from edge_pc.pml import Prompt, build_prompt, parse_prompt
from edge_pc.pml.model import NOWHERE, FreeText, Role
from edge_pc.runtime.sampling import Grammar, Sampling
from edge_pc.runtime.serving import Serving
from edge_pc.server.jobs import Event, Job
from edge_pc.server.refusals import Refusal
from edge_pc.server.tool_calls import CallForm, learn_form
from edge_pc.server.wire import ChatMessage, ChatRequest, CompletionRequest, NamedTool, Selection

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood.

    Attributes:
        make: makes its jobs, one for each prompt, given what each tells its events to.
        prompts: how many there are.
        calls: how the model writes calls of tools; None where there are no tools.
        tool_names: of the tools.
    """

    make: Callable[[Callable[[int, Event], None]], list[Job]]
    prompts: int
    calls: CallForm | None = None
    tool_names: tuple[str, ...] = ()


class Asking:
    """Understands requests for one engine. Safe to use from several threads.

    Args:
        engine: lays prompts out.
        model: the name that requests must have.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self.model = model

    def chat(self, request: ChatRequest) -> Asked:
        """A conversation.

        Raises:
            Refusal: another model, or a field that cannot be used.
            EdgePCError: the messages do not fit the model, its template or the schema.
        """
        self._check_model(request.model)
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        offered = tools if request.tool_choice != "none" else []
        calls = self._calls if offered else None
        sampling = self._sampling(
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=self._grammar(request, offered, calls),
        )
        prompt = self.lay_out(request.messages, request.edge_pc, offered)
        names = tuple(tool["function"]["name"] for tool in offered)
        return self._asked([prompt], sampling, request.edge_pc, calls, names)

    def completion(self, request: CompletionRequest) -> Asked:
        """Plain texts to go on with.

        Raises:
            Refusal, EdgePCError: as `chat`.
        """
        self._check_model(request.model)
        sampling = self._sampling(request, max_tokens=request.max_tokens, logprobs=request.logprobs)
        prompts = [self._lay_out_text(prompt, request.edge_pc) for prompt in request.prompts]
        return self._asked(prompts, sampling, request.edge_pc)

    def lay_out(
        self, messages: Sequence[ChatMessage], selection: Selection, tools: Sequence[Mapping[str, Any]] = ()
    ) -> LaidOut:
        """Messages in the model's template, or behind what they select of a schema.

        Raises:
            EdgePCError: as `chat`.
        """
        prompt = self._prompt(selection)
        if prompt is None:
            return self._engine.lay_out_messages([_as_template(message) for message in messages], tools)
        if tools:
            raise OptionError("tools cannot be used together with a schema")
        unusable = next((message.role for message in messages if message.role not in _ROLES), None)
        if unusable:
            raise OptionError(f"a message of the role {unusable!r} cannot follow a schema")
        texts = [FreeText(message.text, _ROLES[message.role], NOWHERE) for message in messages]
        if not self._uses_turns(prompt):
            texts = [replace(text, role=None) for text in texts]
        return self._engine.lay_out(replace(prompt, free_text=(*prompt.free_text, *texts)))

    def _lay_out_text(self, text: str | list[int], selection: Selection) -> LaidOut:
        prompt = self._prompt(selection)
        if isinstance(text, list):
            if prompt is not None:
                raise OptionError("token ids cannot be used together with a schema")
            return self._engine.composer.ids(text)
        if prompt is None:
            return self._engine.composer.text(text)
        added = (FreeText(text, None, NOWHERE),) if text else ()
        return self._engine.lay_out(replace(prompt, free_text=(*prompt.free_text, *added)))

    def _prompt(self, selection: Selection) -> Prompt | None:
        """What is selected of a schema; None: nothing is."""
        if selection.prompt is not None:
            return parse_prompt(selection.prompt)
        if selection.schema_ is None:
            return None
        schema = self._engine.schemas.named(selection.schema_)
        return build_prompt(schema, selection.imports, selection.arguments, "")

    def _uses_turns(self, prompt: Prompt) -> bool:
        return bool(self._engine.composer.schema(self._engine.schemas.named(prompt.schema)).layout.roles)

    def _asked(
        self,
        prompts: Sequence[LaidOut],
        sampling: Sampling,
        selection: Selection,
        calls: CallForm | None = None,
        names: tuple[str, ...] = (),
    ) -> Asked:
        answering = self._engine.answering
        answers = [answering.answer(sampling) for _ in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            answering.make_room(prompt, answer)
        serving = Serving(fidelity=selection.fidelity)

        def make(tell: Callable[[int, Event], None]) -> list[Job]:
            return [
                Job(prompt, answer, serving, lambda event, index=index: tell(index, event))  # type: ignore[misc]
                for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]

        return Asked(make, len(prompts), calls, names)

    def _check_model(self, model: str) -> None:
        if model != self.model:
            message = f"the model {model!r} is not here; the server has {self.model!r}"
            raise Refusal(404, message, code="model_not_found", param="model")

    @cached_property
    def _calls(self) -> CallForm:
        return learn_form(self._engine.backend.chat_template, self._engine.tokenizer)

    def _grammar(
        self, request: ChatRequest, tools: Sequence[Mapping[str, Any]], calls: CallForm | None
    ) -> Grammar | None:
        """What the answer must be: JSON, a call, or anything (None)."""
        wanted = request.response_format
        if wanted is not None and wanted.type == "json_object":
            return Grammar.json()
        if wanted is not None and wanted.json_schema is not None:
            return Grammar.json(wanted.json_schema.schema_)
        if calls is None or request.tool_choice in (None, "auto"):
            return None
        if isinstance(request.tool_choice, NamedTool):
            tools = [tool for tool in tools if tool["function"]["name"] == request.tool_choice.function.name]
        return calls.grammar(tools)

    def _sampling(self, request: ChatRequest | CompletionRequest, **more: Any) -> Sampling:
        """How the answer is sampled: OpenAI's default is a temperature of 1."""
        stop = request.stop or ()
        given = {
            name: getattr(request, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if getattr(request, name) is not None
        }
        return Sampling(**{"temperature": 1.0, **given}, seed=request.seed, stop=stop, **more)


def _as_template(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it: a call's arguments as an object."""
    written: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": message.text}
    if message.name is not None:
        written["name"] = message.name
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _parsed(call)}}
            for call in message.tool_calls
        ]
    return written


def _parsed(call: Any) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        return call.function.arguments
