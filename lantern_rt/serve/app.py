"""The server's routes, as a Starlette application."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .images import KINDS, ImagesEndpoint
from .middleware import Gate
from .protocol import EditRequest, Figures, HttpError, ImagesRequest
from .state import ServerState

PAGE = Path(str(files(__package__) / "page"))
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(
    state: ServerState, lifespan: Lifespan | None = None, origins: Sequence[str] = (), hosts: Collection[str] = ()
) -> Starlette:
    """The application.

    Args:
        state: that requests share.
        lifespan: fills `state.backends`, and closes them.
        origins: sites whose pages may ask (CORS).
        hosts: names of the server, see `Gate`.
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
    middleware = [Middleware(Gate, origins, hosts)]
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[*origins],
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends a dozen of its own
                expose_headers=["retry-after", "x-request-id"],
            )
        )
    handlers: dict[Any, Any] = {HTTPException: _no_route, HttpError: _refuse, Exception: _refuse}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


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
