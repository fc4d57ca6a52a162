"""The ways into the server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_pc._version import __version__
from edge_pc.engine import Engine
from edge_pc.server.asking import Asked, Asking
from edge_pc.server.gate import Gate, read_json
from edge_pc.server.gauges import Gauges
from edge_pc.server.objects import Envelope
from edge_pc.server.refusals import Refusal, as_json, refusal_of
from edge_pc.server.replies import Choices, Reply, primed, stream_of_chunks, whole_answer
from edge_pc.server.scheduler import Scheduler
from edge_pc.server.views import layout_of, schema_tree
from edge_pc.server.wire import ChatRequest, CompletionRequest, LayoutRequest

log = logging.getLogger("edge_pc")

Endpoint = Callable[[Request], Awaitable[Response]]

# How a page may use what it is sent: nothing comes from elsewhere, and no other page may show it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_PAGE_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
_PAGE_FILES |= {"/page.js": ("page.js", "text/javascript"), "/icon.svg": ("icon.svg", "image/svg+xml")}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes.

    Attributes:
        parallel: answers that are decoded together, at most.
        queue: requests that may wait for their turn.
        kept_contexts: contexts of finished answers that are kept for conversations that go on.
        body_bytes: of a request.
        seconds: from a request to the end of its answer.
    """

    parallel: int = 4
    queue: int = 64
    kept_contexts: int = 4
    body_bytes: int = 8 << 20
    seconds: float = 600.0


class Server:
    """The server of one engine, which it does not close.

    Args:
        engine: with its schemas loaded. Nobody else uses it meanwhile.
        model: the name that requests must have.
        limits: see `Limits`.
        local: it listens on this machine only.
        key: that requests must have; None: none.
    """

    def __init__(
        self, engine: Engine, model: str, *, limits: Limits = Limits(), local: bool = True, key: str | None = None
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._asking = Asking(engine, model)
        self._scheduler = Scheduler(engine, parallel=limits.parallel, waiting=limits.queue, kept=limits.kept_contexts)
        self._gauges = Gauges(self._scheduler)
        routes = [
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/models", self._models),
            self._route("/v1/models/{model:path}", self._model),
            self._route("/edge_pc/schemas", self._schemas),
            self._route("/edge_pc/layout", self._layout, "POST"),
            self._route("/health", self._health),
            self._route("/metrics", self._metrics),
            *(self._route(path, self._page) for path in _PAGE_FILES),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
        self.app: ASGIApp = Gate(app, local=local, key=key, count=self._gauges.request)

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def close(self) -> None:
        """End all answers. Requests that come later are refused."""
        self._scheduler.close()

    def _route(self, path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        async def counted(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except Exception as exc:
                refusal = refusal_of(exc)
                if refusal.status == 500:
                    log.error("the server failed", exc_info=exc)
                response = refusal.response()
            self._gauges.request(path, response.status_code)
            return response

        return Route(path, counted, methods=[method])

    async def _chat(self, request: Request) -> Response:
        asked = ChatRequest.model_validate(await read_json(request, self._limits.body_bytes))
        return await self._answer(request, asked, await to_thread.run_sync(self._asking.chat, asked), chat=True)

    async def _complete(self, request: Request) -> Response:
        asked = CompletionRequest.model_validate(await read_json(request, self._limits.body_bytes))
        return await self._answer(request, asked, await to_thread.run_sync(self._asking.completion, asked), chat=False)

    async def _answer(
        self, request: Request, wire: ChatRequest | CompletionRequest, asked: Asked, *, chat: bool
    ) -> Response:
        reply = Reply(asked, self._scheduler, self._gauges, self._limits.seconds)
        choices = Choices(asked, self._engine.tokenizer, chat=chat)
        kind = "chat.completion" if chat else "text_completion"
        envelope = Envelope.new(self._asking.model, f"edge-pc-{__version__}", kind)
        if not wire.stream:
            return _json(await whole_answer(reply, choices, envelope, request, self._speed))
        stream = stream_of_chunks(reply, choices, envelope, request, self._speed, with_usage=wire.wants_usage)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(await primed(stream), media_type="text/event-stream", headers=headers)

    def _speed(self) -> float | None:
        return self._scheduler.prefill_tokens_per_s

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._asking.model:
            raise Refusal(404, f"the model {name!r} is not here", code="model_not_found", param="model")
        return _json(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._asking.model,
            "object": "model",
            "created": 0,
            "owned_by": "edge-pc",
            "max_model_len": self._engine.spec.max_positions,
        }

    async def _schemas(self, request: Request) -> Response:
        def trees() -> list[dict[str, Any]]:
            schemas = self._engine.schemas
            return [schema_tree(self._engine.composer.schema(schemas.named(name)).layout) for name in schemas.names]

        return _json({"schemas": await to_thread.run_sync(trees)})

    async def _layout(self, request: Request) -> Response:
        asked = LayoutRequest.model_validate(await read_json(request, self._limits.body_bytes))

        def layout() -> dict[str, Any]:
            prompt = self._asking.lay_out(asked.messages, asked.edge_pc)
            return layout_of(prompt, self._engine, asked.edge_pc.fidelity, self._speed())

        return _json(await to_thread.run_sync(layout))

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "model": self._asking.model, "version": __version__})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._gauges.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request) -> Response:
        name, media_type = _PAGE_FILES[request.url.path]
        text = files("edge_pc.server").joinpath("page").joinpath(name).read_bytes()
        return Response(text, media_type=media_type, headers=_PAGE_HEADERS)


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} cannot be used here"}
    return Refusal(status, what.get(status, "the request cannot be used")).response()
