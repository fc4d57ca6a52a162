"""Errors as OpenAI's clients know them. The texts are the project's own."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from edge_pc.errors import ContextLengthError, EdgePCError, EngineError, StatesError, StoreError
from edge_pc.server.jobs import Busy

INVALID = "invalid_request_error"

# How pydantic calls the readings of a field that has several.
_READINGS = ("str", "list[str]", "list[int]", "list[list[int]]", "NamedTool", "literal['none','auto','required']")

# Seconds that a client is told to wait when the queue is full.
RETRY_AFTER = 1


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: what was wrong and what was expected.
        code: OpenAI's short name for it, if there is one.
        param: the field at fault.
        kind: OpenAI's `type`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = headers

    def response(self) -> Response:
        return Response(as_json(self.body), self.status, self.headers, media_type="application/json")


def as_json(value: Any) -> bytes:
    """JSON; half a character, as a client may send, is written as an escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that tells of an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Busy):
        message = "too many requests are waiting; try again"
        wait = {"Retry-After": str(RETRY_AFTER)}
        return Refusal(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=wait)
    if isinstance(error, ValidationError):
        return _of_fields(error)
    if isinstance(error, ContextLengthError):
        return Refusal(400, _told(error), code="context_length_exceeded", param="messages")
    if isinstance(error, EngineError):
        return Refusal(503, _told(error), kind="server_error")
    if isinstance(error, (StatesError, StoreError)):
        return Refusal(500, _told(error), kind="server_error")
    if isinstance(error, EdgePCError):
        return Refusal(400, _told(error))
    return Refusal(500, "the server failed; its log says more", kind="server_error")


def _told(error: EdgePCError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _of_fields(error: ValidationError) -> Refusal:
    """The first thing that is wrong with a request's fields; of several readings of a field, the first one's."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"] if str(part) not in _READINGS)
    message = first["msg"].removeprefix("Value error, ")
    return Refusal(400, f"{param}: {message}" if param else message, param=param or None)
