"""Endpoints that generate images and codes, from reading the body of a request to sending the response."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from statistics import fmean
from traceback import clear_frames
from typing import TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .backend import ImageBackend
from .bodies import BODY_FORMATS, BodyFormat
from .log import RequestRecord
from .metrics import DISCONNECTED
from .protocol import Completion, Event, GenerationRequest, HttpError, ParsedBody
from .state import ServerState

PING_SECONDS = 15  # interval of comments that keep a silent stream open
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class ImagesEndpoint:
    """ASGI application of one endpoint, whose name is a key of `BODY_FORMATS`."""

    def __init__(self, state: ServerState, endpoint_name: str = "generations") -> None:
        self._state = state
        self._body_format = BODY_FORMATS[endpoint_name]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.active_requests += 1
        try:
            await _RequestHandler(self._state, HttpRequest(scope, receive), send, self._body_format).run()
        finally:
            self._state.active_requests -= 1


class _RequestHandler:
    def __init__(self, state: ServerState, http_request: HttpRequest, send: Send, body_format: BodyFormat) -> None:
        self._state = state
        self._body_format = body_format
        self._http_request = http_request
        self._send = send
        self._record: RequestRecord = http_request.state.record
        self._quality = ""
        self._completion: Completion | None = None
        self._failure: Exception | None = None  # error that a stream has already sent

    async def run(self) -> None:
        """Handle the request, send a response or an error, and record the status for the log and the metrics."""
        status = DISCONNECTED
        try:
            completions = await self._handle_request()
            status = 200
            for completion in completions:
                self._state.metrics.count_completion(completion)
            generation_stats = [completion.generation_stats for completion in completions]
            self._record.log_fields = {
                "method": generation_stats[0].method,
                "images": sum(len(each.seeds) for each in generation_stats),
                "queue_seconds": round(max(each.queue_seconds for each in generation_stats), 4),
                "tokens_per_forward_pass": round(fmean(each.tokens_per_forward_pass for each in generation_stats), 3),
            }
        except (ClientDisconnect, ConnectionError):
            pass
        except Exception as error:
            http_error = HttpError.from_exception(error)
            status = http_error.status
            if http_error.field == "quality_budget" and self._quality:
                http_error.field = http_error.param = "quality"
            if status == 500:
                _LOG.error("a request failed", exc_info=error)
            clear_frames(error.__traceback__)  # the frames hold the body
            may_quote_prompt = status == 400 and http_error.field in ("prompt", "input_ids", "body", "")
            text = f"{http_error.field or 'request'}: rejected" if may_quote_prompt else str(http_error)
            self._record.log_fields = {"error": text}
            if self._failure is None:
                await self._send_response(http_error.make_response())
            del http_error  # its traceback refers to this frame
        finally:  # also if this task is cancelled: the server stops, or the client of Ray Serve disconnected
            self._record.status = status

    async def _handle_request(self) -> Sequence[Completion]:
        """Check the request, generate the images, send the response, and return the images with their costs."""
        state = self._state
        server_limits = state.server_limits
        state.check_accepting_requests()
        record = self._record
        record.key_name = state.check_api_key(self._http_request)
        kind = self._body_format.media_type
        max_size = self._body_format.max_bytes(server_limits)
        headers = self._http_request.headers
        content_type = headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != kind:
            raise HttpError(415, field="content-type", found=repr(content_type[:80]), expected=kind)
        if int(headers.get("content-length", 0)) > max_size:
            raise _make_too_large_error(max_size)
        with state.body_memory.open_account(record.caller) as reserve:
            parsed_body = await self._read_body(max_size, reserve)
            requests = state.apply_limits(parsed_body.generation_requests)
            request = requests[0]
            self._quality = request.quality or ""
            backend = state.find_backend(request.model)
            record.model = backend.name
            async with AsyncExitStack() as stack:
                updates = [
                    await stack.enter_async_context(aclosing(self._generate_updates(backend, each)))
                    for each in requests
                ]
                await self._run_until_disconnect(
                    _gather_or_cancel([anext(each) for each in updates])
                )  # admitted or rejected
                if request.stream:
                    return [await self._send_event_stream(request, updates[0])]
                completions = await self._run_until_disconnect(
                    _gather_or_cancel([_await_completion(each) for each in updates])
                )
        await self._send_response(parsed_body.make_response(completions))
        return completions

    async def _read_body(self, max_bytes: int, reserve: Callable[[int], None]) -> ParsedBody:
        limits = self._state.server_limits
        timeout = limits.body_timeout
        size = 0
        with closing(self._body_format.make_parser(self._http_request.headers, limits)) as parser:
            try:
                async with asyncio.timeout(timeout):
                    async for chunk in self._http_request.stream():
                        size += len(chunk)
                        if size > max_bytes:
                            raise _make_too_large_error(max_bytes)
                        reserve(min(len(chunk), max(0, size - limits.max_body_bytes)))
                        parser.write(chunk)
            except TimeoutError as error:
                raise HttpError(408, f"incomplete after {timeout:g} s", field="body") from error
            return parser.parse_request()

    async def _generate_updates(
        self, backend: ImageBackend, request: GenerationRequest
    ) -> AsyncGenerator[Event | Completion, None]:
        """Yield the backend's events and the finished images. Raise `HttpError` when the deadline has passed."""
        assert request.deadline is not None
        remaining = request.deadline - (time.perf_counter() - self._record.start_time)
        end = asyncio.get_running_loop().time() + remaining
        timed_request = request.model_copy(update={"deadline": remaining})
        async with aclosing(backend.generate(timed_request, self._record.caller)) as updates:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        update = await anext(updates)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    problem = f"the image was not finished after {request.deadline:g} s"
                    raise HttpError(504, problem, "deadline_exceeded", field="deadline") from error
                yield update

    async def _send_event_stream(
        self, request: GenerationRequest, updates: AsyncGenerator[Event | Completion, None]
    ) -> Completion:
        events = self._format_stream_events(request, updates)
        response = EventSourceResponse(events, ping=PING_SECONDS, sep="\n")
        await response(self._http_request.scope, self._http_request.receive, self._send)
        if self._failure is not None:
            raise self._failure
        if self._completion is None:
            raise ClientDisconnect
        return self._completion

    async def _format_stream_events(
        self, request: GenerationRequest, updates: AsyncGenerator[Event | Completion, None]
    ) -> AsyncGenerator[dict[str, str], None]:
        """Yield server-sent events. The last event is an error, without a name, if generating fails."""
        try:
            async for update in updates:
                event = request.make_final_event(update) if isinstance(update, Completion) else update
                yield {"event": event["type"], "data": json.dumps(event)}
                if isinstance(update, Completion):
                    self._completion = update
        except Exception as error:
            self._failure = error
            yield {"data": json.dumps(HttpError.from_exception(error).body())}

    async def _run_until_disconnect(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`; if the client disconnects first, cancel it and raise ClientDisconnect."""
        result = asyncio.ensure_future(awaitable)
        disconnect = asyncio.create_task(_wait_for_disconnect(self._http_request.receive))
        try:
            await asyncio.wait({result, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnect
            return result.result()
        finally:
            for task in (result, disconnect):
                task.cancel()
            await asyncio.gather(result, disconnect, return_exceptions=True)

    async def _send_response(self, response: Response) -> None:
        await response(self._http_request.scope, self._http_request.receive, self._send)


def _make_too_large_error(max_bytes: int) -> HttpError:
    return HttpError(413, field="body", expected=f"at most {max_bytes:,} bytes")


async def _gather_or_cancel(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Run awaitables at the same time. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _await_completion(updates: AsyncGenerator[Event | Completion, None]) -> Completion:
    async for update in updates:
        last = update
    assert isinstance(last, Completion)
    return last


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
