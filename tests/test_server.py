"""The server with the clients that people use: openai, LangChain, curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_tools import MODEL, Served, chat_body, serve

LONG = "You answer briefly, and you know the harbour, the tide and the old tram. " * 6


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model, tmp_path_factory.mktemp("states")) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def hello(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, **more}


def test_a_chat_is_the_answer_of_the_engine(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(**hello(max_tokens=8))
    from edge_pc import Sampling

    prompt = '<prompt schema="hello"><user>Hello</user></prompt>'
    served.engine.load_schema('<schema name="hello"></schema>')
    expected = served.engine.generate(prompt, Sampling(max_tokens=8))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[expected.stop]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.stats.new_tokens
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**hello(max_tokens=12))
    stream = client.chat.completions.create(**hello(max_tokens=12), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    plain = client.chat.completions.create(**hello(max_tokens=3), stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_completions(client: openai.OpenAI, served: Served) -> None:
    one = client.completions.create(model=MODEL, prompt="the harbour", max_tokens=6, temperature=0)
    ids = served.engine.tokenizer.encode("the harbour")
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    two = client.completions.create(model=MODEL, prompt=["the tide", "the harbour"], max_tokens=6, temperature=0)
    assert one.choices[0].text == by_ids.choices[0].text == two.choices[1].text
    assert [choice.index for choice in two.choices] == [0, 1]
    chunks = client.completions.create(model=MODEL, prompt="the harbour", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == one.choices[0].text
    assert one.usage is not None
    assert one.usage.prompt_tokens == len(ids)


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**hello(max_tokens=5, logprobs=True, top_logprobs=3))
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 5
    assert all(len(each.top_logprobs) == 3 and each.top_logprobs[0].logprob == each.logprob for each in content)
    raw = b"".join(bytes(each.bytes or []) for each in content)
    assert raw.decode("utf-8", "replace") == answer.choices[0].message.content
    chunks = list(client.chat.completions.create(**hello(max_tokens=5, logprobs=True, top_logprobs=3), stream=True))
    streamed = [
        each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == content
    plain = client.completions.create(model=MODEL, prompt="the", max_tokens=4, temperature=0, logprobs=2)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 4
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_stops_and_seeds(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**hello(max_tokens=12)).choices[0].message.content or ""
    cut = client.chat.completions.create(**hello(max_tokens=12, stop=[whole[4:6]]))
    assert cut.choices[0].message.content == whole[: whole.index(whole[4:6])]
    assert cut.choices[0].finish_reason == "stop"
    warm = {**hello(max_tokens=12), "temperature": 1.2, "top_p": 0.9, "seed": 7}
    first, second = (client.chat.completions.create(**warm).choices[0].message.content for _ in range(2))
    assert first == second
    limit = client.chat.completions.create(**hello(max_completion_tokens=2))
    assert limit.usage is not None
    assert limit.usage.completion_tokens == 2
    assert limit.choices[0].finish_reason == "length"


def test_a_response_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Lisbon"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**hello(response_format=wanted))
    value = json.loads(answer.choices[0].message.content or "")
    assert value["city"] in ("Oslo", "Lisbon")
    assert 1 <= value["days"] <= 9
    chunks = client.chat.completions.create(**hello(response_format=wanted), stream=True)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == value
    anything = client.chat.completions.create(**hello(response_format={"type": "json_object"}, max_tokens=20))
    assert (anything.choices[0].message.content or "").startswith("{")
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: nonsense"):
        client.chat.completions.create(**hello(response_format=wrong))


@pytest.mark.parametrize(
    ("change", "status", "said", "code", "param"),
    [
        ({"model": "gpt-4"}, 404, "the model 'gpt-4' is not here; the server has 'tiny'", "model_not_found", "model"),
        ({"messages": []}, 400, "messages: List should have at least 1 item", None, "messages"),
        ({"n": 2}, 400, "n must be 1: there is one answer to a request", None, None),
        ({"temperature": -1}, 400, "temperature is -1.0, expected a number from 0 to 1000", None, None),
        ({"max_tokens": "5"}, 400, "max_tokens: Input should be a valid integer", None, "max_tokens"),
        ({"max_tokens": 5000}, 400, "the model has room for 1024", "context_length_exceeded", "messages"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias cannot be used", None, None),
        ({"presence_penalty": 1.0}, 400, "repetition_penalty can be used instead", None, None),
        ({"stop": [""]}, 400, "none of them empty", None, None),
        ({"edge_pc": {"schema": "tip"}}, 400, "the schema 'tip' is not loaded (did you mean 'trip'?)", None, None),
        ({"edge_pc": {"imports": ["plan"]}}, 400, "imports and arguments need a schema", None, "edge_pc"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400, "only parts of the type 'text' can be used", None, "messages.0.content",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400, "template has no place for tools", None, None,
        ),
    ],
)  # fmt: skip
def test_errors_say_what_was_wrong(
    client: openai.OpenAI, change: dict[str, Any], status: int, said: str, code: str | None, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**hello(), extra_body=change, stream=stream)
        assert caught.value.status_code == status
        assert said in caught.value.message
        assert caught.value.code == code
        assert caught.value.param == param


def test_models_and_health(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    status, _, body = served.send("GET", "/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")


def test_metrics_count_what_was_done(served: Served) -> None:
    def value(name: str) -> float:
        text = served.send("GET", "/metrics")[2].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    before = value("edge_pc_answer_tokens_total")
    served.chat("Count this", max_tokens=3)
    assert value("edge_pc_answer_tokens_total") == before + 3
    assert value('edge_pc_requests_total{path="/v1/chat/completions",status="200"}') >= 1
    assert value("edge_pc_first_token_seconds_count") >= 1
    assert value("edge_pc_open_answers") == 0


def test_a_conversation_that_goes_on_computes_only_what_is_new(served: Served) -> None:
    first = served.chat("Where is the harbour?", system="Be kind.", max_tokens=6)
    text = first["choices"][0]["message"]["content"]
    second = served.chat("Where is the harbour?", text, "And the tide?", system="Be kind.", max_tokens=6)
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 2
    again = served.chat("Where is the harbour?", text, "And the tide?", system="Be kind.", max_tokens=6)
    assert again["choices"][0]["message"] == second["choices"][0]["message"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again["usage"]["prompt_tokens"] - cached <= 2


def test_long_messages_are_found_after_a_restart_and_in_another_order(tiny_model: Path, tmp_path: Path) -> None:
    questions = ["Where is the tram?", "And the tide, where is it?"]
    answers = {}
    for attempt in range(2):
        with serve(tiny_model, tmp_path) as served:
            for question in questions if attempt == 0 else reversed(questions):
                answer = served.chat(question, system=LONG)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                if attempt or question != questions[0]:
                    assert cached >= 256
                    assert answer["edge_pc"]["computed_tokens"] < 60
                answers.setdefault(question, []).append(answer["choices"][0]["message"])
    for same in answers.values():
        assert same[0] == same[1]


def test_a_schema_is_named_by_an_extension(client: openai.OpenAI, served: Served) -> None:
    from edge_pc import Sampling

    pml = '<prompt schema="trip"><plan time="a week"><oslo/></plan><user>What now?</user></prompt>'
    expected = served.engine.generate(pml, Sampling(max_tokens=6)).text
    selection = {"schema": "trip", "imports": ["plan/oslo"], "arguments": {"plan.time": "a week"}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("What now?", selection),
        ("What now?", {"prompt": '<prompt schema="trip"><plan time="a week"><oslo/></plan></prompt>'}),
    ]
    for text, extension in bodies:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=6,
            extra_body={"edge_pc": extension},
        )  # fmt: skip
        assert answer.choices[0].message.content == expected
    assert answer.model_extra is not None
    modules = {module["path"]: module["hit"] for module in answer.model_extra["edge_pc"]["modules"]}
    assert modules == {"trip": True, "plan": True, "plan/oslo": True}
    with pytest.raises(openai.BadRequestError, match="needs an argument 'time'"):
        client.chat.completions.create(**hello(), extra_body={"edge_pc": {"schema": "trip", "imports": ["plan"]}})
    with pytest.raises(openai.BadRequestError, match="not both"):
        client.chat.completions.create(**hello(), extra_body={"edge_pc": {"prompt": "<prompt/>", "schema": "trip"}})


def test_schemas_and_layouts_for_the_page(served: Served) -> None:
    (trip,) = (s for s in json.loads(served.send("GET", "/edge_pc/schemas")[2])["schemas"] if s["name"] == "trip")
    by_path = {module["path"]: module for module in trip["modules"]}
    assert list(by_path) == ["plan", "plan/lisbon", "plan/oslo", "notes"]
    assert by_path["plan"]["parameters"] == [{"name": "time", "length": 12, "default": None}]
    assert by_path["plan/lisbon"]["union"] == by_path["plan/oslo"]["union"] is not None
    assert by_path["notes"]["union"] is None
    assert by_path["plan/lisbon"]["start"] == by_path["plan/oslo"]["start"]
    selection = {"schema": "trip", "imports": ["notes"]}
    laid = served.post("/edge_pc/layout", {"edge_pc": selection, "messages": [{"role": "user", "content": "Hi"}]})
    served.chat("Hi", edge_pc={**selection, "fidelity": "fast"})
    again = served.post(
        "/edge_pc/layout",
        {"edge_pc": {**selection, "fidelity": "fast"}, "messages": [{"role": "user", "content": "Hi"}]},
    )
    assert [part["path"] for part in laid["parts"]] == ["trip", "notes", ""]
    assert [part["stored"] for part in again["parts"]] == [True, True, False]
    ends = [part["start"] + part["tokens"] for part in laid["parts"]]
    assert [part["start"] for part in laid["parts"]] == [0, *ends[:-1]], "gaps are closed"
    assert ends[-1] == laid["end"]
    assert laid["end"] <= laid["max_positions"] == 1024


def test_langchain(served: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=6, max_retries=0
    )
    answer = model.invoke([("system", "Be kind."), ("user", "Hello")])
    assert answer.content == served.chat("Hello", system="Be kind.", max_tokens=6)["choices"][0]["message"]["content"]
    assert answer.usage_metadata["output_tokens"] == 6
    assert (
        "".join(chunk.content for chunk in model.stream([("system", "Be kind."), ("user", "Hello")])) == answer.content
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Served) -> None:
    def curl(*words: str) -> str:
        command = ["curl", "-sS", "-H", "Content-Type: application/json", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    url = f"{served.url}/v1/chat/completions"
    answer = json.loads(curl(url, "-d", json.dumps(chat_body("Hello"))))
    assert answer["object"] == "chat.completion"
    lines = [line for line in curl("-N", url, "-d", json.dumps(chat_body("Hello", stream=True))).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(pieces) == answer["choices"][0]["message"]["content"]
    assert "OK" not in curl("-o", "/dev/null", "-w", "%{http_code}", url.replace("chat", "chats"), "-d", "{}")
