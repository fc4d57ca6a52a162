"""Requests as they come in: OpenAI's fields, as far as they are understood here, and a few of our own.

Unknown fields are ignored, as clients send many. A field that is known, and asks for what cannot be done, is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from edge_pc.runtime.serving import DEFAULT_FIDELITY, Fidelity

# Far above what any model takes, and few enough to be looked at.
_MOST_MESSAGES = 4096
_MOST_PROMPTS = 64

Text = Annotated[str, StringConstraints(min_length=1)]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _joined(content: Any) -> Any:
    """The text of a content that comes in parts."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise ValueError("only parts of the type 'text' can be used, each with its text")
    return "".join(texts)


class FunctionCall(_Wire):
    name: Text
    arguments: str = ""


class ToolCall(_Wire):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return self.content or ""

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self


class Function(_Wire):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Wire):
    type: Literal["function"]
    function: Function


class FunctionName(_Wire):
    name: Text


class NamedTool(_Wire):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(_Wire):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self


class StreamOptions(_Wire):
    include_usage: bool | None = None


class Selection(_Wire):
    """What a prompt takes of a schema.

    Attributes:
        prompt: PML text; in place of all that follows but the fidelity.
        schema_: the name of a schema that the server has loaded.
        imports: paths of modules.
        arguments: `path.parameter` → text.
        fidelity: see `Serving`.
    """

    prompt: str | None = None
    schema_: str | None = Field(default=None, alias="schema")
    imports: list[str] = []
    arguments: dict[str, str] = {}
    fidelity: Fidelity = DEFAULT_FIDELITY

    @model_validator(mode="after")
    def _one_way(self) -> Selection:
        if self.prompt is not None and (self.schema_ is not None or self.imports or self.arguments):
            raise ValueError("give a prompt, or a schema with imports and arguments, not both")
        if self.schema_ is None and (self.imports or self.arguments):
            raise ValueError("imports and arguments need a schema")
        return self


class _Generation(_Wire):
    """What chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    edge_pc: Selection = Selection()

    @model_validator(mode="after")
    def _can_be_done(self) -> _Generation:
        if self.n not in (None, 1):
            raise ValueError("n must be 1: there is one answer to a request")
        if self.presence_penalty or self.frequency_penalty:
            raise ValueError("presence_penalty and frequency_penalty must be 0; repetition_penalty can be used instead")
        if self.logit_bias:
            raise ValueError("logit_bias cannot be used")
        return self

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    functions: list[Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.functions:
            raise ValueError("functions cannot be used: give tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if named is not None and named not in [tool.function.name for tool in self.tools or []]:
            raise ValueError(f"tool_choice names the tool {named!r}, which is not in tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is required, and there are no tools")
        if self.tools and self.response_format and self.response_format.type != "text":
            raise ValueError("tools and response_format cannot be used together")
        return self


class CompletionRequest(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _is_plain(self) -> CompletionRequest:
        if self.echo or self.suffix or self.best_of not in (None, 1):
            raise ValueError("echo, suffix and best_of cannot be used")
        if not 0 < len(self.prompts) <= _MOST_PROMPTS:
            raise ValueError(f"prompt must be 1 to {_MOST_PROMPTS} texts")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(item, int) for item in self.prompt):
            return [self.prompt] if self.prompt else []  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class LayoutRequest(_Wire):
    """What the page asks of a selection before it is sent."""

    messages: list[ChatMessage] = []
    edge_pc: Selection = Selection()
