"""Check sites that may send requests: written as browsers send them, or rejected when the server starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from refusals import error_of

from lantern_rt import RequestError
from lantern_rt.serve.app import make_app
from lantern_rt.serve.server import Server
from lantern_rt.serve.state import ServerLimits, ServerState


def send_request(app: Any, header: str, value: str) -> dict[str, Any]:
    """Return the status and the headers of the answer to a request with this header."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "GET", "path": "/livez", "query_string": b"", "root_path": ""}
    asyncio.run(app({**scope, "headers": [(header.encode(), value.encode())]}, receive, send))
    return {"status": messages[0]["status"], "headers": dict(messages[0]["headers"])}


def is_allowed(written: str, sent: str) -> bool:
    """Return whether an application with the origin `written` lets pages of the origin `sent` read its answers."""
    app = make_app(ServerState(ServerLimits()), allowed_origins=[written])
    return send_request(app, "origin", sent)["headers"].get(b"access-control-allow-origin") in (b"*", sent.encode())


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("https://ui.example", "https://ui.example"),
        ("https://ui.example/", "https://ui.example"),
        ("HTTPS://UI.Example", "https://ui.example"),
        ("https://ui.example:443", "https://ui.example"),
        ("https://ui.example:8443", "https://ui.example:8443"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://b\N{LATIN SMALL LETTER U WITH DIAERESIS}cher.example", "https://xn--bcher-kva.example"),
        ("capacitor://localhost", "capacitor://localhost"),
        ("*", "https://ui.example"),
    ],
)
def test_an_origin_is_compared_as_browsers_send_it(written: str, sent: str) -> None:
    assert is_allowed(written, sent)
    assert written == "*" or not is_allowed(written, "https://other.example")


@pytest.mark.parametrize(
    "written",
    [
        "",
        "ui.example",
        "ui.example:8080",
        "null",
        "https://",
        "https://ui.example/app",
        "https://ui.example//",
        "https://ui.example?x",
        "https://user@ui.example",
        "https://*.example",
        "https://a.example,https://b.example",
        "https://a.example https://b.example",
        "https://a.example;https://b.example",
        "https://ui.example:99999",
        "file:///home",
    ],
)
def test_what_no_browser_sends_is_rejected_before_a_port_is_opened(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.serve.server.open_listening_socket", lambda *_: pytest.fail("a port was opened"))
    error = error_of(RequestError, Server, {}, port=0, allowed_origins=[written])
    assert (error.field, error.found) == ("cors", repr(written))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("localhost.:8000", 200),
        ("images.localhost", 200),
        ("a.b.localhost:8080", 200),
        ("images.localhost.", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("notlocalhost", 403),
        ("localhost.evil.example", 403),
        ("localhost..", 403),
        ("evil.example", 403),
        (".", 403),
    ],
)
def test_on_loopback_a_host_is_an_address_or_a_name_of_loopback(host: str, status: int) -> None:
    assert (
        send_request(make_app(ServerState(ServerLimits()), allowed_hosts={"localhost"}), "host", host)["status"]
        == status
    )
