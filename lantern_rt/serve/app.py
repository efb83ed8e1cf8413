"""The server's routes, as a Starlette application."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

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

from .drawing import Drawer
from .front import Front
from .images import Images
from .protocol import HttpError

PAGE = Path(str(files(__package__) / "page"))
_SAFE = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a new version's page is seen at once
    "referrer-policy": "no-referrer",
}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(front: Front, lifespan: Lifespan | None = None, origins: Sequence[str] = ()) -> Starlette:
    """The application. lifespan: fills `front.drawers`, and closes them. origins: of other sites' pages (CORS)."""
    pages = _Pages(front)
    routes = [
        Route("/v1/images/generations", Images(front), methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/livez", pages.live),
        Route("/readyz", pages.ready),
        Route("/health", pages.ready),
        Route("/metrics", pages.metrics),
        Route("/", pages.page),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    middleware = [Middleware(_Headers)]
    if origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["authorization", "content-type"]}
        shown: dict[str, Any] = {"allow_origins": [*origins], "expose_headers": ["retry-after", "x-request-id"]}
        middleware.append(Middleware(CORSMiddleware, **allowed, **shown))
    handlers: dict[Any, Any] = {HTTPException: _no_route, HttpError: _refuse, Exception: _refuse}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


class _Pages:
    """Everything but images."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def models(self, request: Request) -> Response:
        self._front.check_key(request)
        return JSONResponse({"object": "list", "data": [self._describe(one) for one in self._front.drawers.values()]})

    async def model(self, request: Request) -> Response:
        self._front.check_key(request)
        self._front.check_open()
        return JSONResponse(self._describe(self._front.drawer(request.path_params["name"])))

    def _describe(self, drawer: Drawer) -> dict[str, Any]:
        own = {"object": "model", "created": self._front.started, "owned_by": "lantern-rt"}
        return {"id": drawer.name, **own, "lantern": drawer.describe()}

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        status = self._front.status
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.metrics.text(self._front.drawers.values()), media_type="text/plain; version=0.0.4")

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
        given = Request(scope).headers.get("x-request-id", "")
        identity = given if re.fullmatch(r"[\w.:-]{1,80}", given, re.ASCII) else secrets.token_hex(8)
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
    found = f"{request.method} {request.url.path}"
    what = (
        "takes another method" if error.status_code == 405 else "there is nothing; images are at /v1/images/generations"
    )
    refusal = HttpError(error.status_code, f"{found}: {what}")
    return JSONResponse(refusal.body(), error.status_code, headers=error.headers)
