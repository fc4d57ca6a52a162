"""From jobs to what a client is sent: the events of the scheduler's thread become one answer, or a stream of chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import anyio
from starlette.requests import Request

from edge_pc.models.tokenizer import Tokenizer
from edge_pc.runtime.stats import Result
from edge_pc.server.asking import Asked
from edge_pc.server.gauges import Gauges
from edge_pc.server.jobs import Event
from edge_pc.server.objects import (
    Envelope,
    chat_logprobs,
    finish_reason,
    report,
    text_logprobs,
    tool_calls,
    usage,
)
from edge_pc.server.refusals import Refusal, as_json, refusal_of
from edge_pc.server.scheduler import Scheduler
from edge_pc.server.tool_calls import Call

# How a client's going away ends an answer: nobody is left to be told.
GONE = Refusal(499, "the client went away")


class Reply:
    """The answer to one request.

    Args:
        asked: what is to be answered.
        scheduler: computes it.
        gauges: count it.
        seconds: that it may take.
    """

    def __init__(self, asked: Asked, scheduler: Scheduler, gauges: Gauges, seconds: float) -> None:
        self._scheduler = scheduler
        self._gauges = gauges
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._jobs = asked.make(self._tell)

    def _tell(self, index: int, event: Event) -> None:
        """Called in the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def events(self, request: Request) -> AsyncGenerator[tuple[int, Event], None]:
        """(index of the prompt, event) until all prompts have their answers. Leaving early cancels them.

        Raises:
            Refusal: an answer failed; there is no room for it, or it takes too long; the client has gone.
        """
        gone = asyncio.ensure_future(_disconnected(request))
        deadline = self._loop.time() + self._seconds
        open_answers = len(self._jobs)
        try:
            for job in self._jobs:
                self._scheduler.submit(job)
            while open_answers:
                index, event = await self._next(gone, deadline)
                if event.error is not None:
                    raise event.error
                if event.result is not None:
                    open_answers -= 1
                    self._gauges.answered(event.result)
                yield index, event
        except Exception as exc:
            raise refusal_of(exc) from exc
        finally:
            gone.cancel()
            for job in self._jobs:
                job.watch.cancel()

    async def _next(self, gone: asyncio.Future[None], deadline: float) -> tuple[int, Event]:
        if not self._events.empty():
            return self._events.get_nowait()
        event = asyncio.ensure_future(self._events.get())
        try:
            wait = max(deadline - self._loop.time(), 0)
            done, _ = await asyncio.wait((event, gone), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if event in done:
                return event.result()
        finally:
            event.cancel()
        if gone in done:
            raise GONE
        raise Refusal(
            504, f"the answer took more than {self._seconds:.0f} seconds", kind="server_error", code="timeout"
        )


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Choices:
    """What the events of a request become: the choices of a whole answer, or of chunks.

    Args:
        asked: the request.
        tokenizer: spells tokens.
        chat: its messages are a chat's; otherwise plain texts.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer, *, chat: bool) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._chat = chat
        self._texts = [""] * asked.prompts
        self._sent = [0] * asked.prompts

    def whole(self, index: int, result: Result) -> dict[str, Any]:
        """The choice of a whole answer."""
        text, calls = (
            self._asked.calls.read(result.text, self._asked.tool_names) if self._asked.calls else (result.text, [])
        )
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason(result, calls), "logprobs": None}
        if not self._chat:
            if result.logprobs:
                choice["logprobs"] = text_logprobs(result.logprobs, self._tokenizer, 0)
            return {**choice, "text": text}
        if result.logprobs:
            choice["logprobs"] = chat_logprobs(result.logprobs, self._tokenizer)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = tool_calls(calls, streamed=False)
        return {**choice, "message": message}

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The choices of the chunks that an event becomes."""
        offset = len(self._texts[index])
        self._texts[index] += event.text
        text, calls = self._certain(index, event.result is not None)
        made = []
        if text or event.logprobs:
            made.append(self._chunk(index, text, event, offset))
        if calls:
            made.append(self._delta(index, {"tool_calls": tool_calls(calls, streamed=True)}))
        if event.result is not None:
            end = self._delta(index, {}) if self._chat else {"index": index, "text": "", "logprobs": None}
            made.append({**end, "finish_reason": finish_reason(event.result, calls)})
        return made

    def _certain(self, index: int, ended: bool) -> tuple[str, list[Call]]:
        """What can be sent of the text now, and the calls in it: what may be a call is held back until the end."""
        text, sent, form = self._texts[index], self._sent[index], self._asked.calls
        calls = form.read(text, self._asked.tool_names)[1] if form and ended else []
        self._sent[index] = form.begin(text) if form and (calls or not ended) else len(text)
        return text[sent : self._sent[index]], calls

    def _chunk(self, index: int, text: str, event: Event, offset: int) -> dict[str, Any]:
        if self._chat:
            choice = self._delta(index, {"content": text})
            if event.logprobs:
                choice["logprobs"] = chat_logprobs(event.logprobs, self._tokenizer)
            return choice
        logprobs = text_logprobs(event.logprobs, self._tokenizer, offset) if event.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


async def whole_answer(
    reply: Reply, choices: Choices, envelope: Envelope, request: Request, speed: Callable[[], float | None]
) -> dict[str, Any]:
    """The object of an answer that is not streamed.

    Raises:
        Refusal: as `Reply.events`.
    """
    results: dict[int, Result] = {}
    async with contextlib.aclosing(reply.events(request)) as events:
        async for index, event in events:
            if event.result is not None:
                results[index] = event.result
    ordered = [results[index] for index in sorted(results)]
    made = [choices.whole(index, result) for index, result in enumerate(ordered)]
    return envelope.whole(made, [result.stats for result in ordered], speed())


async def stream_of_chunks(
    reply: Reply,
    choices: Choices,
    envelope: Envelope,
    request: Request,
    speed: Callable[[], float | None],
    *,
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of an answer, the first one when its first event is there.

    Raises:
        Refusal: before the first chunk, as `Reply.events`; later it is sent as an event.
    """
    stats = {}
    begun = False
    extra: dict[str, Any] = {"usage": None} if with_usage else {}
    try:
        async with contextlib.aclosing(reply.events(request)) as events:
            async for index, event in events:
                if not begun and envelope.kind == "chat.completion":
                    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                    yield _sse(envelope.chunk([{**opening, "finish_reason": None}], **extra))
                begun = True
                if event.result is not None:
                    stats[index] = event.result.stats
                made = choices.chunks(index, event)
                for choice in made:
                    more = dict(extra)
                    if event.result is not None and choice is made[-1] and len(stats) == len(reply._jobs):
                        more["edge_pc"] = report([stats[key] for key in sorted(stats)], speed())
                    yield _sse(envelope.chunk([choice], **more))
    except Refusal as refusal:
        if not begun:
            raise
        if refusal is not GONE:
            yield _sse(refusal.body)
        return
    if with_usage:
        yield _sse(envelope.chunk([], usage=usage([stats[key] for key in sorted(stats)])))
    yield b"data: [DONE]\n\n"


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


async def primed(stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The stream with its first item waited for, so that what goes wrong before has a status of its own."""
    first = await anext(stream)

    async def items() -> AsyncIterator[bytes]:
        try:
            yield first
            async for item in stream:
                yield item
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    return items()
