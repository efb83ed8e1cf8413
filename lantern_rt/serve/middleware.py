"""What holds for every request: whose pages may send it, headers of its response, and the end of its connection."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..inputs import short
from .protocol import HttpError

LINGER_SECONDS = 2.0  # in which the rest of a body is dropped, for its client to read the response
_SAFE = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a new version's page is seen at once
    "referrer-policy": "no-referrer",
}


class Gate:
    """Refuse requests of other sites' pages, which CORS keeps from reading responses only, and complete responses.

    Every request gets an identity, its own if it brings a short one; every response gets safe headers. A response to a
    body that was not read closes the connection.

    Args:
        app: the application.
        origins: sites whose pages may ask.
        hosts: names of the server; empty where it may have any. Addresses always do: another site can give its own name
            the server's address, but not its page an address for a name.
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
                own = {**_SAFE, "x-request-id": identity} | ({"connection": "close"} if closing else {})
                for name, value in own.items():
                    MutableHeaders(scope=message).setdefault(name, value)
            elif closing:
                message = {**message, "more_body": True}
            await send(message)

        refusal = self._refusal(scope["method"], headers)
        app = self._app if refusal is None else JSONResponse(refusal.body(), refusal.status)
        await app(scope, receive_body, send_with_headers)
        if closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while unread:
                        await receive_body()
            await send({"type": "http.response.body"})

    def _refusal(self, method: str, headers: Headers) -> HttpError | None:
        remedy = "`lantern-rt serve --cors SITE` allows a site"
        host = headers.get("host", "").lower()
        if host and self._hosts and not self._is_own(host):
            return HttpError(403, field="host", found=short(host), expected="localhost or an address", remedy=remedy)
        origin = headers.get("origin", "").lower()
        own = origin in ("", f"http://{host}", f"https://{host}")
        site = headers.get("sec-fetch-site", "none" if own else "cross-site")  # programs and old browsers send none
        foreign = site not in ("same-origin", "none") and {origin, "*"}.isdisjoint(self._origins)
        if foreign and method not in ("GET", "HEAD", "OPTIONS"):
            return HttpError(403, field="origin", found=short(origin or site), expected="this site", remedy=remedy)
        return None

    def _is_own(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ip_address(name))
        return False
