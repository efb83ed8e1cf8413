"""Test that web pages of other sites can neither send requests to the server nor read its responses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import EDITS, GENERATIONS, RunningServer
from starlette.testclient import TestClient

from lantern_rt.serve.app import make_app
from lantern_rt.serve.state import ServerLimits, ServerState

SERVER_ORIGIN = "http://localhost:8000"
UI_ORIGIN = "https://ui.example"
ACCEPTED = 503  # status of an accepted request, as no model is loaded


def make_client(allowed_origins: tuple[str, ...] = (), allowed_hosts: tuple[str, ...] = ("localhost",)) -> TestClient:
    app = make_app(ServerState(ServerLimits()), allowed_origins=allowed_origins, allowed_hosts=allowed_hosts)
    return TestClient(app, base_url=SERVER_ORIGIN)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, ACCEPTED),
        ({"origin": SERVER_ORIGIN}, ACCEPTED),
        ({"origin": SERVER_ORIGIN, "sec-fetch-site": "same-origin"}, ACCEPTED),
        ({"sec-fetch-site": "none"}, ACCEPTED),
        ({"origin": UI_ORIGIN, "sec-fetch-site": "same-origin"}, ACCEPTED),  # a proxy changed the host
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", [GENERATIONS, EDITS])
def test_a_request_is_accepted_unless_its_headers_name_another_site(
    path: str, headers: dict[str, str], status: int
) -> None:
    response = make_client().post(path, content=b"--x--", headers={**headers, "content-type": "multipart/form-data"})
    assert response.status_code == status
    if status == 403:
        assert "--cors" in response.json()["error"]["message"]
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("origins", [(UI_ORIGIN,), ("*",)])
def test_requests_from_pages_of_allowed_origins_are_accepted(origins: tuple[str, ...]) -> None:
    headers = {"origin": UI_ORIGIN, "sec-fetch-site": "cross-site"}
    response = make_client(origins).post(GENERATIONS, json={}, headers=headers)
    assert response.status_code == ACCEPTED
    assert response.headers["access-control-allow-origin"] in ("*", UI_ORIGIN)
    foreign_response = make_client((UI_ORIGIN,)).post(GENERATIONS, json={}, headers={"origin": "https://evil.example"})
    assert foreign_response.status_code == 403


LOCAL_HOSTS = ["localhost", "LocalHost:8000", "localhost.", "localhost.:8000", "images.localhost", "a.b.localhost:8080"]
LOCAL_HOSTS += ["images.localhost.", "127.0.0.1:8000", "192.168.1.5", "[::1]:8000"]
FOREIGN_HOSTS = ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", "localhost.."]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, *FOREIGN_HOSTS, ".", "[::1"])
def test_a_loopback_server_accepts_only_ip_addresses_and_allowed_names_as_host(host: str) -> None:
    for path in ("/", "/v1/models", "/livez"):
        assert make_client().get(path, headers={"host": host}).status_code == (200 if host in LOCAL_HOSTS else 403)
    assert make_client(allowed_hosts=()).get("/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("options", "status"),
    [((), 403), (("--cors", "https://other.example"), 200), (("--host", "0.0.0.0"), 200)],
    ids=["default options", "name in --cors", "--host 0.0.0.0"],
)
def test_options_cors_and_host_decide_which_host_names_are_accepted(
    options: tuple[str, ...], status: int, start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    server = start_server(tiny_folder, "--threads", 1, *options, ready=False)
    assert server.request("GET", "/livez", headers={"host": "other.example"})[0] == status
    assert server.request("GET", "/livez", headers={"host": "localhost"})[0] == 200
    server.kill()


def test_a_running_server_rejects_forms_from_pages_of_other_sites(tiny_server: RunningServer) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x", "origin": "https://evil.example"}
    assert tiny_server.request("POST", EDITS, b"--x--", headers)[0] == 403
    assert tiny_server.request("GET", "/v1/models", headers={"host": "evil.example"})[0] == 403
    status, headers, _ = tiny_server.request("POST", EDITS, b"--x--", {**headers, "origin": tiny_server.url})
    assert (status, headers["content-type"]) == (400, "application/json")
