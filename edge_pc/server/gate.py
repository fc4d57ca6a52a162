"""Who may come in: the checks of a request before anything of it is used.

A server on one's own machine can be reached by every web page that is open in a browser there. So requests must name
the machine by a name of its own (a page cannot, even if its name leads here), and bodies must be declared as JSON,
which a page may only send to its own server.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from typing import Any, NoReturn

import anyio
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_pc.server.refusals import Refusal

# Seconds that a client may take to send a request's body.
_BODY_SECONDS = 30.0

_MOST_LEVELS = 64

# Ways in that need no key: a check of health, and the page, which asks for the key.
OPEN_PATHS = ("/", "/health", "/page.css", "/page.js", "/icon.svg")

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Gate:
    """ASGI middleware that refuses requests.

    Args:
        app: what comes behind.
        local: the server listens on this machine only: the header `Host` must name it.
        key: that requests must have; None: none.
        count: told of the path and the status of what was refused here.
    """

    def __init__(self, app: ASGIApp, *, local: bool, key: str | None, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._local = local
        self._key = key
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                self._check(scope["path"], headers)
            except Refusal as refusal:
                self._count("refused", refusal.status)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if self._local and _name(host) not in LOCAL_NAMES:
            raise Refusal(403, f"the host {host!r} is not this server: it is reached as {' or '.join(LOCAL_NAMES)}")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, f"pages of {origin!r} may not use this server")
        if self._key is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._key.encode()):
                message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
                raise Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object that a request holds.

    Raises:
        Refusal: it is no JSON object, not declared as one, too large, or does not come.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "send JSON with the header Content-Type: application/json")
    try:
        with anyio.fail_after(_BODY_SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError as exc:
        raise Refusal(408, f"the request did not come within {_BODY_SECONDS:.0f} seconds") from exc
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise Refusal(400, f"the request is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise Refusal(400, "the request must be a JSON object")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Whatever goes through a request later may do so by recursion."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inside = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inside if isinstance(item, (dict, list))]
    if level:
        raise Refusal(400, f"the request is nested more than {_MOST_LEVELS} levels deep")


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdigit() and int(declared) > max_bytes):
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise Refusal(413, f"the request has more than {max_bytes} bytes")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _name(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
