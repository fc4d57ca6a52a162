"""Many clients at once, clients that leave, requests that are none."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_tools import MODEL, SCHEMA, SECONDS, Served, chat_body, serve, wait_until

from edge_pc.server.app import Limits

LONG = "You answer briefly, and you know the harbour, the tide and the old tram. " * 6
WAYS_IN = ("/v1/chat/completions", "/v1/completions", "/edge_pc/layout")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tiny_model, tmp_path_factory.mktemp("states")) as served:
        yield served


def text_of(answer: bytes) -> str:
    """All that a client gets to read, of an answer or of a stream."""
    if answer.startswith(b"data: "):
        lines = [line for line in answer.decode().split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
        return "".join(delta.get("content", "") for delta in deltas)
    (choice,) = json.loads(answer)["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def mixed_requests() -> list[tuple[str, dict[str, Any]]]:
    chat, plain = WAYS_IN[:2]
    selection = {"schema": "trip", "imports": ["plan/oslo"], "arguments": {"plan.time": "a week"}, "fidelity": "full"}
    return [
        *((chat, chat_body(f"Question {number}", max_tokens=4 + number)) for number in range(8)),
        *((chat, chat_body(f"Question {number}", system=LONG, stream=True)) for number in range(5)),
        *((chat, chat_body("One", "two", f"and {number}", "four", "five", max_tokens=6)) for number in range(4)),
        (chat, chat_body("Say JSON", response_format={"type": "json_object"}, max_tokens=12)),
        (chat, chat_body("What now?", edge_pc=selection)),
        *((chat, chat_body("Draw", temperature=1.0, seed=number, logprobs=True)) for number in range(2)),
        *(
            (plain, {"model": MODEL, "prompt": f"tide {number}", "max_tokens": 7, "temperature": 0})
            for number in range(4)
        ),
    ]


def test_two_hundred_mixed_requests_of_eight_clients_are_answered_as_alone(served: Served) -> None:
    requests = mixed_requests()
    assert len(requests) == 25
    alone = {}
    for number, (path, body) in enumerate(requests):
        status, _, data = served.send("POST", path, body)
        assert status == 200, data
        alone[number] = text_of(data)
    order = list(range(len(requests))) * 8
    random.Random(5).shuffle(order)
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda number: served.send("POST", *requests[number]), order))
    assert len(answers) == 200
    assert {status for status, _, _ in answers} == {200}
    assert [text_of(data) for _, _, data in answers] == [alone[number] for number in order]
    assert (served.server.scheduler.load.waiting, served.server.scheduler.load.answering) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(served: Served, stream: bool) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as connection:
        body = json.dumps(chat_body("Go on for long", max_tokens=900, stream=stream)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert connection.recv(100)
        wait_until(lambda: served.server.scheduler.load.answering == 1)
    wait_until(lambda: served.server.scheduler.load.answering == 0)
    assert served.chat("Hello")["usage"]["completion_tokens"] == 8


def test_a_full_queue_says_when_to_come_again(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, Limits(parallel=1, queue=0)) as served:
        assert served.send("POST", WAYS_IN[0], chat_body("Hi"))[0] == 429, "none may wait at all"
    with serve(tiny_model, tmp_path, Limits(parallel=1, queue=1)) as served, ThreadPoolExecutor(8) as clients:
        body = chat_body("Go on for long", max_tokens=300)
        answers = list(clients.map(lambda _: served.send("POST", WAYS_IN[0], body), range(8)))
    refused = [(headers, json.loads(data)["error"]) for status, headers, data in answers if status == 429]
    assert {status for status, _, _ in answers} == {200, 429}
    assert all(headers["retry-after"] == "1" for headers, _ in refused)
    assert refused[0][1]["code"] == "rate_limit_exceeded"


def test_an_answer_that_takes_too_long_is_ended(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, Limits(seconds=0.02)) as served:
        status, _, data = served.send("POST", WAYS_IN[0], chat_body("Go on", max_tokens=900))
        assert (status, json.loads(data)["error"]["code"]) == (504, "timeout")
        wait_until(lambda: served.server.scheduler.load.answering == 0)


def test_limits_of_a_request(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, Limits(body_bytes=2000)) as served:
        assert served.send("POST", WAYS_IN[0], chat_body("a" * 3000))[0] == 413
        # Without a length that is declared, too.
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
        pieces = (b"x" * 500 for _ in range(9))
        connection.request("POST", WAYS_IN[0], pieces, {"Content-Type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        deep = b'{"model": "tiny", "x": ' + b"[" * 500 + b"]" * 500 + b"}"
        status, _, data = served.send("POST", WAYS_IN[0], deep)
        assert status == 400
        assert b"nested more than 64 levels deep" in data


def test_other_pages_and_other_names_may_not_use_it(served: Served) -> None:
    body = chat_body("Hi", max_tokens=1)
    assert served.send("POST", WAYS_IN[0], body, Host="evil.example")[0] == 403
    assert served.send("GET", "/health", Host="evil.example:8000")[0] == 403
    for host in ("localhost:1234", "127.0.0.1", "[::1]:8000"):
        assert served.send("GET", "/health", Host=host)[0] == 200
    assert served.send("POST", WAYS_IN[0], body, Origin="https://evil.example")[0] == 403
    assert served.send("POST", WAYS_IN[0], body, Origin="null")[0] == 403
    assert served.send("POST", WAYS_IN[0], body, Origin=served.url)[0] == 200
    assert served.send("POST", WAYS_IN[0], body, Content_Type="text/plain")[0] == 415
    assert "access-control-allow-origin" not in served.send("POST", WAYS_IN[0], body)[1]


def test_a_key_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, tmp_path, key="secret") as served:
        body = chat_body("Hi", max_tokens=1)
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ä"}):
            status, headers, data = served.send("POST", WAYS_IN[0], body, **given)
            assert (status, json.loads(data)["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert served.send("POST", WAYS_IN[0], body, Authorization="Bearer secret")[0] == 200
        assert served.send("GET", "/v1/models")[0] == 401
        assert served.send("GET", "/health")[0] == 200


def test_a_bug_is_told_without_a_traceback(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served.engine.backend, "decode", lambda steps: 1 / 0)
        status, _, data = served.send("POST", WAYS_IN[0], chat_body("Hi"))
        streamed = served.send("POST", WAYS_IN[0], chat_body("Hi", stream=True))[2]
    assert status == 500
    assert json.loads(data)["error"]["message"] == "the server failed; its log says more"
    assert json.loads(streamed.split(b"data: ")[-1])["error"]["type"] == "server_error"
    assert b"Traceback" not in data + streamed
    assert "ZeroDivisionError" in caplog.text
    assert served.send("POST", WAYS_IN[0], chat_body("Hi"))[0] == 200


WRONG: tuple[Any, ...] = (None, True, -1, 1e308, 10**30, 0.5, "x", "\ud800", [], [[]], {}, {"a": 1}, [None], [{}])


def malformed(rng: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A request that cannot be answered: method, path, body, headers."""
    path = rng.choice(WAYS_IN)
    body: dict[str, Any] = chat_body("Hello", "there", "again", max_tokens=1)
    if path == WAYS_IN[1]:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    kind = rng.randrange(9)
    if kind == 0:  # cut off
        data = json.dumps(body).encode()
        return "POST", path, data[: rng.randrange(len(data))], {}
    if kind == 1:  # bytes that are no text
        return "POST", path, rng.randbytes(rng.randrange(1, 200)), {}
    if kind == 2:
        return "POST", path, json.dumps(rng.choice(WRONG[:10])).encode(), {}
    if kind == 3:
        word = rng.choice(["NaN", "Infinity", "-Infinity", "[" * 100_000, '{"a":' * 50_000])
        return "POST", path, json.dumps(body)[:-1].encode() + f', "x": {word}}}'.encode(), {}
    if kind == 4:
        return (
            "POST",
            path,
            json.dumps(body).encode(),
            {"Content-Type": rng.choice(["text/plain", "", "application/xml"])},
        )
    if kind == 5:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH"])
        return method, rng.choice([path, path + "/x", "/v1", "/v1/embeddings"]), b"{}", {}
    if kind == 6:
        key = rng.choice(["model", "temperature", "max_tokens", "stop", "edge_pc", "top_p", "seed", "stream"])
        unfit = {"a": [1]} if key != "edge_pc" else {"schema": rng.choice(["nowhere", 5, "\ud800"])}
        target = WAYS_IN[0] if path == WAYS_IN[2] else path
        return "POST", target, json.dumps({**body, "prompt": "x", key: unfit}).encode(), {}
    if kind == 7:
        message = rng.choice(WRONG) if rng.random() < 0.5 else {"role": rng.choice(WRONG), "content": rng.choice(WRONG)}
        return "POST", WAYS_IN[0], json.dumps({**body, "messages": [message]}).encode(), {}
    extension = {"prompt": rng.choice(["<prompt", "<prompt schema='trip'><plan/></prompt>", "", "&", "<a>" * 500])}
    return "POST", WAYS_IN[rng.choice([0, 2])], json.dumps({**body, "edge_pc": extension}).encode(), {}


def test_a_thousand_malformed_requests_are_refused(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(12)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS)
    for number in range(1000):
        method, path, data, headers = malformed(rng)
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        answer = response.read()
        assert 400 <= response.status < 500, (number, method, path, data[:300], answer)
        assert json.loads(answer)["error"]["message"], (number, data[:300])
        assert b"Traceback" not in answer
    connection.close()
    assert caplog.text == ""


def test_fields_of_any_kind_are_answered_or_refused(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    fields = [
        "n",
        "stop",
        "seed",
        "top_k",
        "min_p",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
    ]
    fields += ["stream_options", "edge_pc", "repetition_penalty", "max_completion_tokens", "logit_bias", "functions"]
    statuses = []
    for _ in range(300):
        body = chat_body("Hello", max_tokens=1, **{field: rng.choice(WRONG) for field in rng.sample(fields, 2)})
        status, _, data = served.send("POST", WAYS_IN[0], json.dumps(body).encode())
        statuses.append(status)
        assert status == 200 or 400 <= status < 500, (body, data)
    assert 200 in statuses
    assert caplog.text == ""


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"POST\r\n\r\n", b"\r\n" * 50])
def test_what_is_no_http_is_refused(served: Served, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_the_command_serves_until_ctrl_c(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "trip.xml").write_text(SCHEMA, encoding="utf-8")
    command = [sys.executable, "-m", "edge_pc", "serve", "--model", str(tiny_model), "--port", "0"]
    command += ["--schema", str(tmp_path / "trip.xml"), "--cache-dir", str(tmp_path / "states")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "is served at http://127.0.0.1:" in line, line
        port = int(line.split("127.0.0.1:")[1].split()[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("GET", "/edge_pc/schemas")
        assert json.loads(connection.getresponse().read())["schemas"][0]["name"] == "trip"
        body = {**chat_body("Go on for long", max_tokens=900, stream=True), "model": tiny_model.name}
        connection.request("POST", WAYS_IN[0], json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.read(10)
        process.send_signal(signal.SIGINT)
        assert b"the server is shutting down" in response.read()
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said


def test_a_port_in_use_is_named(served: Served, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from edge_pc.cli import main

    assert main(["serve", "--model", str(tiny_model), "--port", str(served.port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1, port {served.port}" in said
    assert "choose another with --port" in said
