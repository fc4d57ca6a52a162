"""A server in a thread, and clients of it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_pc import Engine
from edge_pc.server.app import Limits, Server
from edge_pc.server.running import listen, uvicorn_of

MODEL = "tiny"
SECONDS = 60.0  # nothing takes so long unless it hangs

SCHEMA = """<schema name="trip">
  <system>You are a helpful travel guide.</system>
  <user>
    <module name="plan">We travel for <param name="time" length="12"/>.
      <union>
        <module name="lisbon">In Lisbon, the old tram climbs the hills.</module>
        <module name="oslo">In Oslo, the roof of the opera is a square.</module>
      </union>
    </module>
    <module name="notes">Notes: <param name="text" length="8" default="none"/></module>
  </user>
</schema>"""


@dataclass(frozen=True)
class Served:
    """A running server: where it is, and what it runs on."""

    port: int
    server: Server
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request; `body` is sent as JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {name: value for name, value in {"Content-Type": "application/json", **named}.items() if value}
        try:
            connection.request(method, path, data, named)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> Any:
        """The JSON that a request is answered with, which must be a success."""
        status, _, data = self.send("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def chat(self, *texts: str, **more: Any) -> Any:
        """The answer to a conversation that begins with the user."""
        return self.post("/v1/chat/completions", chat_body(*texts, **more))


def chat_body(*texts: str, system: str | None = None, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **more}


@contextmanager
def serve(model: Path, states: Path, limits: Limits = Limits(), **more: Any) -> Iterator[Served]:
    """A server on a free port."""
    with Engine(model, cache_dir=states) as engine, listen("127.0.0.1", 0) as listening:
        engine.load_schema(SCHEMA)
        server = Server(engine, MODEL, limits=limits, **more)
        running = uvicorn_of(server)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        port = listening.getsockname()[1]
        wait_until(lambda: running.started)
        try:
            yield Served(port, server, engine)
        finally:
            running.should_exit = True
            thread.join(SECONDS)
            server.close()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)
