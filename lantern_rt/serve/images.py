"""`POST /v1/images/generations`, and its sisters: one request from its body to its last byte, however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing
from datetime import UTC, datetime
from traceback import clear_frames
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .backend import ImageBackend
from .forms import FORM, FormReader
from .protocol import Completion, Event, HttpError, ImagesRequest, read_request, set_defaults
from .state import ServerState

PING_SECONDS = 15  # without news, after which a comment keeps a stream open
SEND_SECONDS = 60.0  # that a client has to take an event, so that one that reads nothing ends, too
DISCONNECTED = 499  # what logs say of a client that left
KINDS = ("generations", "edits", "variations")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class ImagesEndpoint:
    """An endpoint, as an ASGI application. kind: one of `KINDS`."""

    def __init__(self, state: ServerState, kind: str = "generations") -> None:
        self._state, self._kind = state, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.active_requests += 1
        try:
            await _RequestHandler(self._state, Request(scope, receive), send, self._kind).run()
        finally:
            self._state.active_requests -= 1


class _RequestHandler:
    def __init__(self, state: ServerState, http: Request, send: Send, kind: str) -> None:
        self._state, self._kind = state, kind
        self._http = http
        self._send = send
        self._began = time.perf_counter()
        self._model = self._key = self._quality = ""
        self._client = http.client.host if http.client else ""
        self._completion: Completion | None = None
        self._failure: Exception | None = None  # which a stream has told

    async def run(self) -> None:
        status = DISCONNECTED
        facts: dict[str, Any] = {}
        try:
            completion = await self._handle()
            status = 200
            self._state.metrics.count_completion(completion)
            figures = completion.figures
            facts = {
                "method": figures.method,
                "images": len(figures.seeds),
                "queue_seconds": round(figures.queue_seconds, 4),
                "tokens_per_forward_pass": round(figures.tokens_per_forward_pass, 3),
            }
        except (ClientDisconnect, ConnectionError, SendTimeoutError):
            pass
        except Exception as error:
            refusal = HttpError.from_exception(error)
            status = refusal.status
            if refusal.field == "quality_budget" and self._quality:
                refusal.field = refusal.param = "quality"
            if status == 500:
                _LOG.error("a request failed", exc_info=error)
            clear_frames(error.__traceback__)  # which hold the body
            may_quote_prompt = status == 400 and refusal.field in ("prompt", "body", "")
            facts = {"error": f"{refusal.field or 'request'}: refused" if may_quote_prompt else str(refusal)}
            if self._failure is None:
                await self._respond(JSONResponse(refusal.body(), refusal.status, headers=refusal.headers))
            del refusal  # whose traceback refers to this frame
        finally:  # also when it is cancelled: by a server that stops, or by Ray Serve because the client left
            self._log(status, facts)

    async def _handle(self) -> Completion:
        state = self._state
        limits = state.limits
        state.check_open()
        self._key = state.check_key(self._http)
        is_form = self._kind != "generations"
        kind, max_size = (FORM, limits.max_form_bytes) if is_form else ("application/json", limits.max_body_bytes)
        headers = self._http.headers
        found = headers.get("content-type", "")
        if found.partition(";")[0].strip().lower() != kind:
            raise HttpError(415, field="content-type", found=repr(found[:80]), expected=kind)
        size = int(headers.get("content-length", max_size))
        if size > max_size:
            raise _too_large(max_size)
        with state.body_memory.reserve((self._key or self._client, kind), size):
            request = await self._read(max_size)
            state.check_request(request)
            self._quality = request.quality or ""
            backend = state.backend(request.model)
            self._model = backend.name
            async with aclosing(self._generate(backend, request)) as updates:
                await self._unless_disconnected(anext(updates))  # accepted, or refused
                if request.stream:
                    return await self._stream(request, updates)
                completion = await self._unless_disconnected(_completion_of(updates))
        await self._respond(JSONResponse(completion.answer(request)))
        return completion

    async def _read(self, max_size: int) -> ImagesRequest:
        limits = self._state.limits
        if self._kind == "generations":
            body = bytearray()
            await self._receive(body.extend, max_size)
            return read_request(bytes(body), limits.deadline)
        with closing(FormReader(self._http.headers["content-type"], limits.max_body_bytes)) as reader:
            await self._receive(reader.write, max_size)
            form = reader.request()
        if self._kind == "variations" and form.mask is None and form.keep_rows is None:
            form = form.model_copy(update={"keep_rows": self._state.backend(form.model).describe()["rows"] // 2})
        return set_defaults(form, limits.deadline)

    async def _receive(self, write: Callable[[bytes], None], max_size: int) -> None:
        seconds = self._state.limits.body_timeout
        size = 0
        try:
            async with asyncio.timeout(seconds):
                async for part in self._http.stream():
                    size += len(part)
                    if size > max_size:
                        raise _too_large(max_size)
                    write(part)
        except TimeoutError as error:
            raise HttpError(408, f"not all of it was there after {seconds:g} s", field="body") from error

    async def _generate(
        self, backend: ImageBackend, request: ImagesRequest
    ) -> AsyncGenerator[Event | Completion, None]:
        assert request.deadline is not None
        left = request.deadline - (time.perf_counter() - self._began)
        end = asyncio.get_running_loop().time() + left
        own = request.model_copy(update={"deadline": left})
        async with aclosing(backend.generate(own, self._key or self._client)) as updates:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        update = await anext(updates)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    problem = f"the image was not done after {request.deadline:g} s"
                    raise HttpError(504, problem, "deadline_exceeded", field="deadline") from error
                yield update

    async def _stream(self, request: ImagesRequest, updates: AsyncGenerator[Event | Completion, None]) -> Completion:
        events = self._events(request, updates)
        response = EventSourceResponse(events, ping=PING_SECONDS, sep="\n", send_timeout=SEND_SECONDS)
        await response(self._http.scope, self._http.receive, self._send)
        if self._failure is not None:
            raise self._failure
        if self._completion is None:
            raise ClientDisconnect
        return self._completion

    async def _events(
        self, request: ImagesRequest, updates: AsyncGenerator[Event | Completion, None]
    ) -> AsyncGenerator[dict[str, str], None]:
        """Server-sent events; an error in the middle is the last one, without a name, as OpenAI's client wants it."""
        try:
            async for update in updates:
                event = update.event(request) if isinstance(update, Completion) else update
                yield {"event": event["type"], "data": json.dumps(event)}
                if isinstance(update, Completion):
                    self._completion = update
        except Exception as error:
            self._failure = error
            yield {"data": json.dumps(HttpError.from_exception(error).body())}

    async def _unless_disconnected(self, work: Awaitable[T]) -> T:
        """What the work gives, unless the client leaves first; then it is cancelled. Raises: ClientDisconnect."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.create_task(_wait_for_disconnect(self._http.receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _respond(self, response: JSONResponse) -> None:
        await response(self._http.scope, self._http.receive, self._send)

    def _log(self, status: int, facts: dict[str, Any]) -> None:
        """Count the request, and log a line of JSON; never its prompt."""
        metrics = self._state.metrics
        metrics.requests.labels(self._model, str(status)).inc()
        if status in (DISCONNECTED, 504):
            metrics.aborted.labels(self._model, "deadline" if status == 504 else "disconnected").inc()
        seconds = round(time.perf_counter() - self._began, 4)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self._http.state.request_id,
            "client": self._client,
            "key": self._key,
            "path": self._http.url.path,
            "status": status,
            "model": self._model,
            "seconds": seconds,
        }
        _LOG.info("%s", json.dumps(line | facts))


def _too_large(max_size: int) -> HttpError:
    return HttpError(413, field="body", expected=f"at most {max_size:,} bytes")


async def _completion_of(updates: AsyncGenerator[Event | Completion, None]) -> Completion:
    async for update in updates:
        last = update
    assert isinstance(last, Completion)
    return last


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
