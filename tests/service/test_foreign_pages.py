"""Check that pages of other sites can neither send requests nor read answers, whatever name they use for this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import EDITS, GENERATIONS, RunningServer
from starlette.testclient import TestClient

from lantern_rt.serve.app import make_app
from lantern_rt.serve.state import ServerLimits, ServerState

OWN = "http://localhost:8000"
UI = "https://ui.example"
ANSWERED = 503  # status of an allowed request, as no model is loaded


def make_client(allowed_origins: tuple[str, ...] = (), allowed_hosts: tuple[str, ...] = ("localhost",)) -> TestClient:
    return TestClient(
        make_app(ServerState(ServerLimits()), allowed_origins=allowed_origins, allowed_hosts=allowed_hosts),
        base_url=OWN,
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, ANSWERED),
        ({"origin": OWN}, ANSWERED),
        ({"origin": OWN, "sec-fetch-site": "same-origin"}, ANSWERED),
        ({"sec-fetch-site": "none"}, ANSWERED),
        ({"origin": UI, "sec-fetch-site": "same-origin"}, ANSWERED),  # from a proxy that changes the host
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", [GENERATIONS, EDITS])
def test_pages_of_other_sites_may_not_ask(path: str, headers: dict[str, str], status: int) -> None:
    response = make_client().post(path, content=b"--x--", headers={**headers, "content-type": "multipart/form-data"})
    assert response.status_code == status
    if status == 403:
        assert "--cors" in response.json()["error"]["message"]
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("origins", [(UI,), ("*",)])
def test_pages_of_listed_sites_may_ask(origins: tuple[str, ...]) -> None:
    headers = {"origin": UI, "sec-fetch-site": "cross-site"}
    response = make_client(origins).post(GENERATIONS, json={}, headers=headers)
    assert response.status_code == ANSWERED
    assert response.headers["access-control-allow-origin"] in ("*", UI)
    foreign = make_client((UI,)).post(GENERATIONS, json={}, headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("192.168.1.5", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
    ],
)
def test_names_of_other_sites_are_rejected_on_loopback(host: str, status: int) -> None:
    for path in ("/", "/v1/models", "/livez"):
        assert make_client().get(path, headers={"host": host}).status_code == status
    assert make_client(allowed_hosts=()).get("/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("options", "status"),
    [((), 403), (("--cors", "https://other.example"), 200), (("--host", "0.0.0.0"), 200)],
    ids=["loopback", "listed", "everywhere"],
)
def test_a_server_on_loopback_knows_the_names_that_it_was_told(
    options: tuple[str, ...], status: int, start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start(tiny_folder, "--threads", 1, *options, ready=False)
    assert server.request("GET", "/livez", headers={"host": "other.example"})[0] == status
    assert server.request("GET", "/livez", headers={"host": "localhost"})[0] == 200
    server.kill()


def test_a_running_server_rejects_foreign_forms(tiny: RunningServer) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x", "origin": "https://evil.example"}
    assert tiny.request("POST", EDITS, b"--x--", headers)[0] == 403
    assert tiny.request("GET", "/v1/models", headers={"host": "evil.example"})[0] == 403
    status, headers, _ = tiny.request("POST", EDITS, b"--x--", {**headers, "origin": tiny.url})
    assert (status, headers["content-type"]) == (400, "application/json")
