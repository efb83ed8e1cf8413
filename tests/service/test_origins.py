"""Sites that may ask: written as browsers send them, or refused when the server starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from refusals import error_of

from lantern_rt import RequestError
from lantern_rt.serve.app import make_app
from lantern_rt.serve.server import Server
from lantern_rt.serve.state import Limits, ServerState


def allowed(written: str, sent: str) -> bool:
    """Whether an application with this origin lets pages of an origin read its answers."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "GET", "path": "/livez", "query_string": b"", "root_path": ""}
    app = make_app(ServerState(Limits()), origins=[written])
    asyncio.run(app({**scope, "headers": [(b"origin", sent.encode())]}, receive, send))  # type: ignore[arg-type]
    return dict(messages[0]["headers"]).get(b"access-control-allow-origin") in (b"*", sent.encode())


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
    assert allowed(written, sent)
    assert written == "*" or not allowed(written, "https://other.example")


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
def test_what_no_browser_sends_is_refused_before_a_port_is_opened(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.serve.server.listen", lambda *_: pytest.fail("a port was opened"))
    error = error_of(RequestError, Server, [], port=0, origins=[written])
    assert (error.field, error.found) == ("cors", repr(written))
