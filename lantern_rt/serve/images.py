"""`POST /v1/images/generations`: one request from its body to its last byte, however it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .drawing import Order, Summary, Update
from .front import Front
from .protocol import Form, HttpError, error_event, read_request

HEARTBEAT = 15.0  # seconds without news after which a comment keeps a stream open
PATIENCE = 5.0  # seconds that a client has to take in a refusal
DISCONNECTED = 499  # what logs say of a client that left
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class ClientLeftError(Exception):
    """The client is gone."""


class Images:
    """The endpoint, as an ASGI application."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = _Answering(self._front, Request(scope, receive), send)
        self._front.active.add(answering)
        try:
            await answering.run()
        finally:
            self._front.active.discard(answering)


class _Answering:
    """One request being answered."""

    def __init__(self, front: Front, request: Request, send: Send) -> None:
        self._front, self._request, self._send = front, request, send
        self._began, self._streaming, self._model = time.perf_counter(), False, ""
        self._facts: dict[str, Any] = {}  # for the log

    async def run(self) -> None:
        status = 500
        try:
            summary = await self._draw()
            status = 200
            self._front.metrics.finished(summary)
            self._facts |= {"method": summary.method, "images": len(summary.seeds)}
            self._facts["queue_seconds"] = round(summary.waited, 4)
            self._facts["tokens_per_forward_pass"] = round(summary.tokens_per_forward_pass, 3)
        except (ClientLeftError, ClientDisconnect, ConnectionError):
            status = self._left()
        except asyncio.CancelledError:  # by a server that stops, or by Ray Serve because the client left
            status = 503 if self._front.draining else self._left()
            if self._front.draining:
                text = "the server stopped before the image was done"
                await self._refuse(HttpError(503, text, None, "stopped", 5))
            raise
        except Exception as error:
            refusal = HttpError.of(error)
            status = refusal.status
            if status == 504:
                self._front.metrics.aborted.labels(self._model, "deadline").inc()
            if status == 500:
                _LOG.error("a request failed", exc_info=error)
            part, _, _ = refusal.message.partition(":")
            hidden = part in ("prompt", "body") and not self._front.limits.log_prompts  # it may quote the prompt
            self._facts["error"] = f"{part}: refused" if hidden else refusal.message
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(PATIENCE):  # a client that reads nothing must not hold a place
                    await self._refuse(refusal)
        finally:
            self._front.metrics.requests.labels(self._model, str(status)).inc()
            self._log(status)

    def _left(self) -> int:
        self._front.metrics.aborted.labels(self._model, "disconnected").inc()
        return DISCONNECTED

    async def _draw(self) -> Summary:
        front = self._front
        front.check_open()
        front.check_key(self._request)
        asked = read_request(await self._body())
        drawer = front.drawer(asked.model)
        self._model, order = drawer.name, front.limited(asked.order())
        form = Form(order.file, order.options.get("size", drawer.size), asked.response_format == "url")
        if front.limits.log_prompts:
            self._facts["prompt"] = asked.prompt
        updates = drawer.draw(order)
        work = self._stream(updates, form) if asked.stream else self._answer(updates, form)
        return await self._within(work, order)

    async def _body(self) -> bytes:
        kind, limits, body = self._request.headers.get("content-type", ""), self._front.limits, b""
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"content-type: found {kind[:80]!r}, expected application/json")
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in self._request.stream():
                    body += part
                    if len(body) > limits.body:
                        found = f"body: found more than {limits.body:,} bytes, expected at most that"
                        raise HttpError(413, f"{found}; shorten it")
        except TimeoutError as error:
            found = f"body: not all of it was there after {limits.body_seconds:g} s"
            raise HttpError(408, f"{found}; send it faster") from error
        return body

    async def _answer(self, updates: AsyncGenerator[Update, None], form: Form) -> Summary:
        async with aclosing(updates):
            async for update in updates:
                last = update
        assert last.summary is not None
        await self._respond(JSONResponse(form.answer(last)))
        return last.summary

    async def _stream(self, updates: AsyncGenerator[Update, None], form: Form) -> Summary:
        """Send events as they come; the status is sent once the request was taken."""
        summary = None
        async with aclosing(with_pauses(updates, HEARTBEAT)) as news:
            async for update in news:
                if not self._streaming:
                    if update is None:  # it may still be refused
                        continue
                    await self._begin_stream()
                data = b": waiting\n\n" if update is None else form.events(update)
                if data:
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
                summary = summary if update is None else update.summary
        assert summary is not None
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return summary

    async def _begin_stream(self) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        headers["x-accel-buffering"] = "no"
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        self._streaming = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _within(self, work: Coroutine[Any, Any, T], order: Order) -> T:
        """What the work gives, unless the client leaves, or the deadline comes first; then it is cancelled."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(self._request.receive))
        left = None if order.deadline is None else max(0.0, self._began + order.deadline - time.perf_counter())
        try:
            await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientLeftError
            text = (
                f"deadline: the image was not done after {order.deadline:g} s; give more time, or ask for fewer images"
            )
            raise HttpError(504, text, "deadline", "deadline_exceeded")
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _refuse(self, refusal: HttpError) -> None:
        if self._streaming:
            await self._send({"type": "http.response.body", "body": error_event(refusal), "more_body": False})
        else:
            await self._respond(JSONResponse(refusal.body(), refusal.status, headers=refusal.headers))

    async def _respond(self, response: JSONResponse) -> None:
        await response(self._request.scope, self._request.receive, self._send)

    def _log(self, status: int) -> None:
        """One line a request, as JSON."""
        facts = {"status": status, "model": self._model, "seconds": round(time.perf_counter() - self._began, 4)}
        self._front.log(self._request, facts | self._facts)


async def with_pauses(updates: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """The updates, and None whenever none came for so long. Closes them at the end."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(updates))
            done, _ = await asyncio.wait({pending}, timeout=seconds)
            if not done:
                yield None
                continue
            try:
                update = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield update
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await updates.aclose()


async def _gone(receive: Receive) -> None:
    """Waits until the client disconnects; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
