"""Test the origins of option `--cors` and the host names that a loopback server accepts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from refusals import catch_error

from lantern_rt import RequestError
from lantern_rt.serve.app import make_app
from lantern_rt.serve.server import Server
from lantern_rt.serve.state import ServerLimits, ServerState


def send_request(app: Any, header: str, value: str) -> dict[str, Any]:
    """Send a GET request with one header to an ASGI application; return the status and the response headers."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "GET", "path": "/livez", "query_string": b"", "root_path": ""}
    asyncio.run(app({**scope, "headers": [(header.encode(), value.encode())]}, receive, send))
    return {"status": messages[0]["status"], "headers": dict(messages[0]["headers"])}


def is_allowed(option_origin: str, header_origin: str) -> bool:
    """Return whether pages of `header_origin` may read a server with this option `--cors`."""
    app = make_app(ServerState(ServerLimits()), allowed_origins=[option_origin])
    allowed_origin = send_request(app, "origin", header_origin)["headers"].get(b"access-control-allow-origin")
    return allowed_origin in (b"*", header_origin.encode())


@pytest.mark.parametrize(
    ("option_origin", "header_origin"),
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
def test_an_allowed_origin_matches_the_origin_header_of_browsers(option_origin: str, header_origin: str) -> None:
    assert is_allowed(option_origin, header_origin)
    assert option_origin == "*" or not is_allowed(option_origin, "https://other.example")


@pytest.mark.parametrize(
    "option_origin",
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
def test_an_invalid_origin_is_rejected_before_the_port_is_opened(
    option_origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.serve.server.open_listening_socket", lambda *_: pytest.fail("a port was opened"))
    error = catch_error(RequestError, Server, {}, port=0, allowed_origins=[option_origin])
    assert (error.field, error.found) == ("cors", repr(option_origin))


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
def test_a_loopback_server_accepts_only_ip_addresses_and_localhost_names_as_host(host: str, status: int) -> None:
    assert (
        send_request(make_app(ServerState(ServerLimits()), allowed_hosts={"localhost"}), "host", host)["status"]
        == status
    )
