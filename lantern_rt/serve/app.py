"""The server's routes, as a Starlette application."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from importlib.metadata import version
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import AnyUrl, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from ..inputs import short
from .images import KINDS, ImagesEndpoint
from .protocol import EditRequest, Figures, HttpError, ImagesRequest
from .state import ServerState

LINGER_SECONDS = 3.0  # in which the rest of a body is dropped, for its client to read the response
PAGE_FOLDER = Path(str(files(__package__) / "page"))
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a new version's page is seen at once
    "referrer-policy": "no-referrer",
}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(
    state: ServerState, lifespan: Lifespan | None = None, origins: Sequence[str] = (), hosts: Collection[str] = ()
) -> Starlette:
    """The application.

    Args:
        state: that requests share.
        lifespan: fills `state.backends`, and closes them.
        origins: sites whose pages may ask (CORS), as `read_origin` takes them.
        hosts: names of the server, besides addresses; empty where any will do.

    Raises:
        RequestError: an origin is none.
    """
    origins = [read_origin(one) for one in origins]
    pages = _InfoRoutes(state)
    routes = [
        *(Route(f"/v1/images/{kind}", ImagesEndpoint(state, kind), methods=["POST"]) for kind in KINDS),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/livez", pages.live),
        Route("/readyz", pages.ready),
        Route("/health", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/openapi.json", pages.openapi),
        Route("/docs", pages.docs),
        Route("/", pages.page),
        Mount("/page", StaticFiles(directory=PAGE_FOLDER)),
    ]
    middleware = [Middleware(_RequestGuard, origins, hosts)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends a dozen of its own
                expose_headers=["retry-after", "x-request-id"],
            )
        )
    handlers: dict[Any, Any] = {
        HTTPException: _routing_error,
        HttpError: _error_response,
        Exception: _error_response,
    }
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def read_origin(text: str) -> str:
    """Return an origin as browsers send it: in small letters, without the usual port and the slash at the end."""
    with suppress(ValidationError):
        origin = str(AnyUrl(text)).removesuffix("/")
        if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*,;]+", origin):
            return origin
    if text == "*":
        return text
    raise RequestError(field="cors", found=short(text), expected="one origin such as https://ui.example, or *")


class _InfoRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        self._state.check_key(request)
        names = [*self._state.backends, *(self._state.limits.aliases if self._state.backends else ())]
        models = [self._describe(name) for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        self._state.check_key(request)
        self._state.check_open()
        return JSONResponse(self._describe(request.path_params["name"]))

    def _describe(self, name: str) -> dict[str, Any]:
        backend, limits = self._state.backend(name), self._state.limits
        own = {"object": "model", "created": self._state.started, "owned_by": "lantern-rt", "root": backend.name}
        facts = backend.describe()
        methods = [method for method in facts["methods"] if method in (limits.methods or facts["methods"])]
        return {"id": name, **own, "lantern": {**facts, "methods": methods}}

    async def live(self, request: Request) -> Response:
        failed = self._state.status == "failed"
        return JSONResponse({"status": "failed" if failed else "live"}, 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        status = self._state.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.metrics.text(self._state.backends.values()), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        document = json.loads((PAGE_FOLDER / "openapi.json").read_text("utf-8"))
        document["info"]["version"] = version("lantern-rt")
        requests = {one.__name__: one.model_json_schema() for one in (ImagesRequest, EditRequest)}
        own = {**requests, "Figures": TypeAdapter(Figures).json_schema()}
        document["components"]["schemas"] |= own
        return JSONResponse(document)

    async def docs(self, request: Request) -> Response:
        return FileResponse(PAGE_FOLDER / "docs.html")

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE_FOLDER / "index.html")


class _RequestGuard:
    """Refuse requests of other sites' pages; give every request an identity and every response safe headers.

    A response to a body that was not read closes the connection, once the client had time to read it.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], hosts: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = headers.get("x-request-id", "")
        if not re.fullmatch(r"[\w.:-]{1,80}", identity, re.ASCII):
            identity = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = identity
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        closing = False

        async def receive_body() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal closing
            if message["type"] == "http.response.start":
                closing = unread
                own = {**_SECURITY_HEADERS, "x-request-id": identity} | ({"connection": "close"} if closing else {})
                for name, value in own.items():
                    MutableHeaders(scope=message).setdefault(name, value)
            elif closing:
                message = {**message, "more_body": True}
            await send(message)

        refusal = self._check_site(scope["method"], headers)
        app = self._app if refusal is None else JSONResponse(refusal.body(), refusal.status)
        await app(scope, receive_body, send_with_headers)
        if closing:
            with suppress(TimeoutError, asyncio.CancelledError):  # the latter of a server that ends
                async with asyncio.timeout(LINGER_SECONDS):
                    while unread:
                        await receive_body()
            await send({"type": "http.response.body"})

    def _check_site(self, method: str, headers: Headers) -> HttpError | None:
        remedy = "`lantern-rt serve --cors ORIGIN` allows a site"
        host = headers.get("host", "").lower()
        # Another site can give its name the server's address, so that the browser takes its pages for the server's own.
        if host and self._hosts and not self._names_server(host):
            return HttpError(403, field="host", found=short(host), expected="localhost or an address", remedy=remedy)
        origin = headers.get("origin", "").lower()
        own = origin in ("", f"http://{host}", f"https://{host}")
        site = headers.get("sec-fetch-site", "none" if own else "cross-site")  # programs and old browsers send none
        foreign = site not in ("same-origin", "none") and {origin, "*"}.isdisjoint(self._origins)
        if foreign and method not in ("GET", "HEAD", "OPTIONS"):
            return HttpError(403, field="origin", found=short(origin or site), expected="this site", remedy=remedy)
        return None

    def _names_server(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ip_address(name))
        return False


async def _error_response(request: Request, error: Exception) -> Response:
    refusal = HttpError.from_exception(error)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        refusal = HttpError(405, "another method is needed", field=place)
    else:
        problem = "there is nothing"
        refusal = HttpError(error.status_code, problem, field=place, remedy="images are at /v1/images/generations")
    return JSONResponse(refusal.body(), error.status_code, headers=error.headers)
