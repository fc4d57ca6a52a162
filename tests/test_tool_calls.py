"""Calls of tools, in the form of the model's own template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from server_tools import MODEL, Served, serve

from edge_pc import OptionError
from edge_pc.models.chat_template import ChatTemplate
from edge_pc.models.tokenizer import Tokenizer
from edge_pc.server.tool_calls import Call, learn_form

_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}CALLS{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)


def template(calls: str) -> str:
    return _TOOLS + _TURNS.replace("CALLS", "{% for c in m.tool_calls %}" + calls + "{% endfor %}")


HERMES = template(
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
)
BARE = template('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}')
LISTED = template('[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]')
PYTHONIC = template("{{ c.function.name }}({{ c.function.arguments }})")

FERRY = {
    "type": "function",
    "function": {
        "name": "ferry",
        "description": "When a ferry leaves.",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"enum": ["Oslo", "Lisbon"]},
                "adults": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["to", "adults"],
            "additionalProperties": False,
        },
    },
}
WEATHER = {"type": "function", "function": {"name": "weather"}}
NAMES = ("ferry", "weather")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny._hf_tokenizer())


@pytest.mark.parametrize(
    ("source", "before", "after", "arguments"),
    [
        (HERMES, "<tool_call>\n", "\n</tool_call>", "arguments"),
        (BARE, "", "", "parameters"),
        (LISTED, "[", "]", "arguments"),
    ],
)
def test_the_form_is_learned_from_the_template(
    tokenizer: Tokenizer, source: str, before: str, after: str, arguments: str
) -> None:
    form = learn_form(ChatTemplate(source, {}), tokenizer)
    assert (form.before, form.after, form.name_key, form.arguments_key) == (before, after, "name", arguments)
    text = f'{before}{{"name": "ferry", "{arguments}": {{"to": "Oslo"}}}}{after}'
    assert form.read(text, NAMES) == ("", [Call("ferry", '{"to": "Oslo"}')])
    assert form.read("No call at all.", NAMES) == ("No call at all.", [])
    unknown = text.replace("ferry", "train")
    assert form.read(unknown, NAMES) == (unknown, [])


def test_several_calls_and_text_before_them(tokenizer: Tokenizer) -> None:
    form = learn_form(ChatTemplate(HERMES, {}), tokenizer)
    one, two = (f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in NAMES)
    assert form.read(f"Let me look. {one}\n{two}", NAMES) == (
        "Let me look.",
        [Call("ferry", "{}"), Call("weather", "{}")],
    )
    broken = '<tool_call>\n{"name": "ferry", "arguments"'
    assert form.read(broken, NAMES) == (broken, [])
    assert form.begin("So <tool") == len("So "), "what may begin a call is held back"
    assert form.begin("So <b>") == len("So <b>")


def test_other_forms_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(OptionError, match="in a way that the server cannot read"):
        learn_form(ChatTemplate(PYTHONIC, {}), tokenizer)
    with pytest.raises(OptionError, match="has no place for tools"):
        learn_form(ChatTemplate(tiny.CHAT_TEMPLATE, {}), tokenizer)


@pytest.fixture(scope="module", params=[HERMES, BARE], ids=["hermes", "bare"])
def client(
    request: pytest.FixtureRequest, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    from edge_pc.export import export

    folder = tmp_path_factory.mktemp("tools")

    def knows_tools(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        _, types = fields["tokenizer.chat_template"]
        fields["tokenizer.chat_template"] = (request.param, types)

    changed = tiny.change_gguf(tiny_gguf, folder / "tools.gguf", knows_tools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_PC_HOME", str(folder))
        model = export(changed, folder / "tiny", bits=32)
    with serve(model, folder / "states") as served, client_of(served) as made:
        yield made


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "When does the ferry leave?"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "tools": [FERRY, WEATHER], **more}


def test_a_call_that_is_required_is_made(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "ferry"}}
    answer = client.chat.completions.create(**asked(tool_choice=choice, max_tokens=100)).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "ferry"
    arguments = json.loads(call.function.arguments)
    assert arguments["to"] in ("Oslo", "Lisbon")
    assert answer.message.content is None
    chunks = list(client.chat.completions.create(**asked(tool_choice=choice, max_tokens=100), stream=True))
    streamed = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert [(each.index, each.function and each.function.arguments) for each in streamed] == [
        (0, call.function.arguments)
    ]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    required = client.chat.completions.create(**asked(tool_choice="required", max_tokens=100)).choices[0]
    assert next(each.function.name for each in required.message.tool_calls or [] if each.type == "function") in NAMES


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**asked(max_tokens=6)).choices[0]
    streamed = client.chat.completions.create(**asked(max_tokens=6), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == plain.message.content
    called = {"id": "call_1", "type": "function", "function": {"name": "ferry", "arguments": '{"to": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "When does the ferry leave?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "At nine."},
    ]
    assert client.chat.completions.create(**asked(messages=messages, max_tokens=4)).usage
    without = client.chat.completions.create(**asked(tool_choice="none", max_tokens=6))
    assert without.usage
    with pytest.raises(openai.BadRequestError, match="tool_choice names the tool 'train', which is not in tools"):
        client.chat.completions.create(**asked(tool_choice={"type": "function", "function": {"name": "train"}}))
    with pytest.raises(openai.BadRequestError, match="cannot be used together"):
        client.chat.completions.create(**asked(response_format={"type": "json_object"}))
