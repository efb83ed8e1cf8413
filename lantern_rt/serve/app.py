"""Starlette application with the routes of the server."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import cached_property
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
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from ..inputs import format_value
from .codes import CodesRequest
from .images import ImagesEndpoint
from .log import RequestRecord
from .protocol import EditRequest, GenerationStats, HttpError, ImagesRequest
from .state import ServerState

LINGER_SECONDS = 3.0  # time in which the rest of an unread body is received, so that the client reads the response
PAGE_FOLDER = Path(str(files(__package__) / "page"))
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # browsers load a new version of the page at once
    "referrer-policy": "no-referrer",
}
_ENDPOINTS = {f"/v1/images/{kind}": kind for kind in ("generations", "edits", "variations", "codes")} | {
    "/generate": "generate"
}
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(
    state: ServerState,
    lifespan: Lifespan | None = None,
    allowed_origins: Sequence[str] = (),
    allowed_hosts: Collection[str] = (),
) -> Starlette:
    """Create the application. `lifespan` creates the backends at the start and closes them at the end.

    Pages of `allowed_origins`, such as `https://ui.example`, may send requests (CORS). Beside IP addresses, the header
    `Host` may have the names `allowed_hosts`, by default all.
    """
    allowed_origins = [normalize_origin(origin) for origin in allowed_origins]
    info = _InfoEndpoints(state)
    routes = [
        *(Route(path, ImagesEndpoint(state, kind), methods=["POST"]) for path, kind in _ENDPOINTS.items()),
        Route("/v1/models", info.list_models),
        Route("/v1/models/{name:path}", info.get_model),
        Route("/livez", info.get_liveness),
        *(Route(path, info.get_readiness) for path in ("/readyz", "/health", "/healthz", "/version")),
        Route("/metrics", info.get_metrics),
        Route("/openapi.json", info.get_openapi_document),
        Route("/docs", info.get_api_docs_page),
        Route("/", info.get_web_page),
        Mount("/page", StaticFiles(directory=PAGE_FOLDER)),
    ]
    middleware = [Middleware(_RequestGuardMiddleware, state, allowed_origins, allowed_hosts)]
    if allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends a dozen extra headers
                expose_headers=["retry-after", "x-request-id"],
            )
        )
    handlers: dict[Any, Any] = {
        HTTPException: _respond_to_routing_error,
        HttpError: _respond_to_error,
        Exception: _respond_to_error,
    }
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def normalize_origin(text: str) -> str:
    """Return an origin as browsers send it: in lower case, without default port and final slash."""
    with suppress(ValidationError):
        origin = str(AnyUrl(text)).removesuffix("/")
        if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*,;]+", origin):
            return origin
    if text == "*":
        return text
    raise RequestError(field="cors", found=format_value(text), expected="an origin such as https://ui.example, or *")


class _InfoEndpoints:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list_models(self, http_request: HttpRequest) -> Response:
        self._state.check_api_key(http_request)
        names = [*self._state.backends, *(self._state.server_limits.aliases if self._state.backends else ())]
        models = [self._describe_model(name) for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, http_request: HttpRequest) -> Response:
        self._state.check_api_key(http_request)
        self._state.check_accepting_requests()
        return JSONResponse(self._describe_model(http_request.path_params["name"]))

    def _describe_model(self, name: str) -> dict[str, Any]:
        backend = self._state.find_backend(name)
        server_limits = self._state.server_limits
        entry = {"object": "model", "created": self._state.started, "owned_by": "lantern-rt", "root": backend.name}
        facts = backend.describe()
        methods = [method for method in facts["methods"] if method in (server_limits.methods or facts["methods"])]
        return {"id": name, **entry, "lantern": {**facts, "methods": methods, "max_n": server_limits.max_n}}

    async def get_liveness(self, http_request: HttpRequest) -> Response:
        failed = self._state.status == "failed"
        return JSONResponse({"status": "failed" if failed else "live"}, 503 if failed else 200)

    async def get_readiness(self, http_request: HttpRequest) -> Response:
        status = self._state.status
        return JSONResponse({"status": status, **self._state.version_info}, 200 if status == "ready" else 503)

    async def get_metrics(self, http_request: HttpRequest) -> Response:
        return Response(
            self._state.metrics.format_prometheus_text(self._state.backends.values()),
            media_type="text/plain; version=0.0.4",
        )

    async def get_openapi_document(self, http_request: HttpRequest) -> Response:
        return Response(self._openapi_document, media_type="application/json")

    @cached_property
    def _openapi_document(self) -> bytes:
        document = json.loads((PAGE_FOLDER / "openapi.json").read_text("utf-8"))
        document["info"]["version"] = version("lantern-rt")
        schemas = {model.__name__: model.model_json_schema() for model in (ImagesRequest, EditRequest, CodesRequest)}
        document["components"]["schemas"] |= {**schemas, "Figures": TypeAdapter(GenerationStats).json_schema()}
        return json.dumps(document).encode()

    async def get_api_docs_page(self, http_request: HttpRequest) -> Response:
        return FileResponse(PAGE_FOLDER / "docs.html")

    async def get_web_page(self, http_request: HttpRequest) -> Response:
        return FileResponse(PAGE_FOLDER / "index.html")


class _RequestGuardMiddleware:
    """Middleware that rejects requests from pages of other sites, and adds request ids and security headers.

    It logs and counts requests for images, and rejected requests but health checks with status 503. If the response was
    sent before the whole body was read, it closes the connection, after a few seconds in which the client can read.
    """

    def __init__(
        self, app: ASGIApp, state: ServerState, allowed_origins: Sequence[str], allowed_hosts: Collection[str]
    ) -> None:
        self._app = app
        self._state = state
        self._allowed_origins = allowed_origins
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = headers.get("x-request-id", "")
        if not re.fullmatch(r"[\w.:-]{1,80}", identity, re.ASCII):
            identity = secrets.token_hex(8)
        client, _ = scope.get("client") or ("", 0)
        record = RequestRecord(identity, client, scope["path"])
        scope.setdefault("state", {})["record"] = record
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
                record.status = message["status"]
                added = {**_SECURITY_HEADERS, "x-request-id": identity} | ({"connection": "close"} if closing else {})
                for name, value in added.items():
                    MutableHeaders(scope=message).setdefault(name, value)
            elif closing:
                message = {**message, "more_body": True}
            await send(message)

        error = self._check_headers(scope["method"], headers)
        app = self._app if error is None else error.make_response()
        try:
            await app(scope, receive_body, send_with_headers)
        finally:
            makes_images = scope["method"] == "POST"
            if makes_images or (record.status >= 400 and record.status != 503):
                self._state.metrics.count_request(record)
                record.write_to_log()
        if closing:
            with suppress(TimeoutError, asyncio.CancelledError):  # the server is stopping
                async with asyncio.timeout(LINGER_SECONDS):
                    while unread:
                        await receive_body()
            await send({"type": "http.response.body"})

    def _check_headers(self, method: str, headers: Headers) -> HttpError | None:
        if "content-length" in headers and "transfer-encoding" in headers:  # proxies disagree about the end of the body
            return HttpError(400, "two lengths of the body", field="content-length", remedy="omit content-length")
        remedy = "allow a site with `lantern-rt serve --cors ORIGIN`"
        host = headers.get("host", "").lower()
        # DNS rebinding: another site can point its name to this server, and browsers then trust its pages as ours.
        if host and self._allowed_hosts and not self._is_own_host(host):
            return HttpError(
                403, field="host", found=format_value(host), expected="localhost or an address", remedy=remedy
            )
        origin = headers.get("origin", "").lower()
        same = origin in ("", f"http://{host}", f"https://{host}")
        site = headers.get("sec-fetch-site", "none" if same else "cross-site")  # programs do not send this header
        foreign = site not in ("same-origin", "none") and {origin, "*"}.isdisjoint(self._allowed_origins)
        if foreign and method not in ("GET", "HEAD", "OPTIONS"):
            return HttpError(
                403, field="origin", found=format_value(origin or site), expected="a page of this server", remedy=remedy
            )
        return None

    def _is_own_host(self, host: str) -> bool:
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._allowed_hosts or name.endswith(".localhost") or bool(ip_address(name))
        return False


async def _respond_to_error(http_request: HttpRequest, error: Exception) -> Response:
    return HttpError.from_exception(error).make_response()


async def _respond_to_routing_error(http_request: HttpRequest, error: HTTPException) -> Response:
    route = f"{http_request.method} {http_request.url.path}"
    if error.status_code == 405:
        http_error = HttpError(405, "the HTTP method is not allowed", field=route)
    else:
        remedy = "generate images at /v1/images/generations"
        http_error = HttpError(error.status_code, "no such path", field=route, remedy=remedy)
    return JSONResponse(http_error.body(), error.status_code, headers=error.headers)
