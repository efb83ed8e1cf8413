"""Test the origins of option `--cors`."""

from __future__ import annotations

import pytest
from refusals import catch_error
from starlette.testclient import TestClient

from lantern_rt import RequestError
from lantern_rt.serve.app import make_app
from lantern_rt.serve.server import Server
from lantern_rt.serve.state import ServerLimits, ServerState


def is_allowed(option_origin: str, header_origin: str) -> bool:
    """Return whether pages of `header_origin` may read a server with this option `--cors`."""
    client = TestClient(make_app(ServerState(ServerLimits()), allowed_origins=[option_origin]))
    response = client.get("/livez", headers={"origin": header_origin})
    return response.headers.get("access-control-allow-origin") in ("*", header_origin)


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


INVALID_ORIGINS = ["", "ui.example", "ui.example:8080", "null", "file:///home", "https://", "https://ui.example/app"]
INVALID_ORIGINS += [f"https://{rest}" for rest in ("ui.example//", "ui.example?x", "user@ui.example", "*.example")]
INVALID_ORIGINS += [f"https://a.example{separator}https://b.example" for separator in ", ;"]


@pytest.mark.parametrize("option_origin", [*INVALID_ORIGINS, "https://ui.example:99999"])
def test_an_invalid_origin_is_rejected_before_the_port_is_opened(
    option_origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern_rt.serve.server.open_listening_socket", lambda *_: pytest.fail("a port was opened"))
    error = catch_error(RequestError, Server, {}, port=0, allowed_origins=[option_origin])
    assert (error.field, error.found) == ("cors", repr(option_origin))
