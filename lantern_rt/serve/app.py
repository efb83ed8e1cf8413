"""The server's routes, as a Starlette application."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import AnyUrl, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
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

PAGE = Path(str(files(__package__) / "page"))
_SAFE = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a new version's page is seen at once
    "referrer-policy": "no-referrer",
}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(state: ServerState, lifespan: Lifespan | None = None, origins: Sequence[str] = ()) -> Starlette:
    """The application.

    Args:
        state: that requests share.
        lifespan: fills `state.backends`, and closes them.
        origins: sites whose pages may ask (CORS), each as browsers send it; RequestError if not.
    """
    pages = _Pages(state)
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
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [Middleware(_Headers)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[_read_origin(one) for one in origins],
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends a dozen of its own
                expose_headers=["retry-after", "x-request-id"],
            )
        )
    handlers: dict[Any, Any] = {HTTPException: _no_route, HttpError: _refuse, Exception: _refuse}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def _read_origin(text: str) -> str:
    """Return an origin as browsers send it: in small letters, without the usual port and the slash at the end."""
    with suppress(ValidationError):
        origin = str(AnyUrl(text)).removesuffix("/")
        if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*,;]+", origin):
            return origin
    if text == "*":
        return text
    raise RequestError(field="cors", found=short(text), expected="one origin such as https://ui.example, or *")


class _Pages:
    """Everything but images."""

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
        document = json.loads((PAGE / "openapi.json").read_text("utf-8"))
        document["info"]["version"] = version("lantern-rt")
        requests = {one.__name__: one.model_json_schema() for one in (ImagesRequest, EditRequest)}
        own = {**requests, "Figures": TypeAdapter(Figures).json_schema()}
        document["components"]["schemas"] |= own
        return JSONResponse(document)

    async def docs(self, request: Request) -> Response:
        return FileResponse(PAGE / "docs.html")

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html")


class _Headers:
    """Gives every request an identity, its own if it brings a short one, and every answer safe headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = Request(scope).headers.get("x-request-id", "")
        if not re.fullmatch(r"[\w.:-]{1,80}", identity, re.ASCII):
            identity = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = identity

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**_SAFE, "x-request-id": identity}.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = HttpError.of(error)
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        refusal = HttpError(405, "another method is needed", field=place)
    else:
        problem = "there is nothing"
        refusal = HttpError(error.status_code, problem, field=place, remedy="images are at /v1/images/generations")
    return JSONResponse(refusal.body(), error.status_code, headers=error.headers)
