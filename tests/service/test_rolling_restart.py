"""Behind nginx with the configuration of deploy/, restart servers one after the other: no request is lost."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import GENERATIONS, RunningServer, parse_events, wait_until

from lantern_rt.edits import BYTES_LIMIT

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")

CONFIGURATION = (Path(__file__).parents[2] / "deploy/nginx.conf").read_text("utf-8")
CALLERS = 50
ROUNDS = 2
PAUSE = 1.0  # seconds from the readiness of a server to the stop of the next, as the configuration asks for
# The configuration around a file of /etc/nginx/conf.d, with all files of nginx in a folder.
MAIN = """
daemon off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; scgi_temp_path {folder}/scgi; uwsgi_temp_path {folder}/uwsgi;
    include {folder}/site.conf;
}}
"""


class Site(RunningServer):
    """The servers behind nginx, used like any other server."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [free_socket.getsockname()[1] for free_socket in sockets]
    for free_socket in sockets:
        free_socket.close()
    return ports


def is_ready(site: Site) -> bool:
    try:
        return site.get("/readyz")[0] == 200
    except OSError:
        return False


@pytest.fixture
def servers(start: Callable[..., RunningServer], tiny_folder: Path) -> list[RunningServer]:
    return [start(tiny_folder, "--threads", 1, port=port) for port in free_ports(2)]


@pytest.fixture
def site(servers: list[RunningServer], tmp_path: Path) -> Iterator[Site]:
    (port,) = free_ports(1)
    text = CONFIGURATION.replace("listen 80;", f"listen 127.0.0.1:{port};")
    for number, server in zip((8001, 8002), servers, strict=True):
        text = text.replace(f"127.0.0.1:{number} ", f"{server.address} ")
    (tmp_path / "site.conf").write_text(text)
    (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path))
    user = ["-g", "user root;"] if tmp_path.owner() == "root" else []
    nginx = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", *user])
    wait_until(lambda: is_ready(Site(port)))
    yield Site(port)
    nginx.terminate()
    nginx.wait()


def request_stream(site: Site, seed: int) -> tuple[int, str]:
    """Return the status and the image of a streamed request."""
    content = {"prompt": "red cube", "seed": seed, "stream": True, "steps": True}
    status, _, body = site.request(
        "POST", GENERATIONS, json.dumps(content).encode(), {"content-type": "application/json"}
    )
    kind, last_event = parse_events(body)[-1]
    assert kind == "image_generation.completed"
    return status, last_event["b64_json"]


def request_image(site: Site, seed: int) -> tuple[int, str]:
    status, response = site.post({"prompt": "red cube", "seed": seed})
    return status, response["data"][0]["b64_json"] if status == 200 else json.dumps(response)


def test_rolling_restarts_lose_no_request(
    servers: list[RunningServer], site: Site, start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    expected = [request_image(site, seed) for seed in range(CALLERS)]
    answers_by_seed: list[list[Any]] = [[] for _ in range(CALLERS)]
    restarts_done = threading.Event()

    def call(seed: int) -> None:
        while not restarts_done.is_set():
            try:
                answers_by_seed[seed].append((request_stream if seed % 2 else request_image)(site, seed))
            except Exception as error:
                answers_by_seed[seed].append(error)

    threads = [threading.Thread(target=call, args=[seed]) for seed in range(CALLERS)]
    for thread in threads:
        thread.start()
    for _ in range(ROUNDS):
        for i, server in enumerate(servers):
            assert server.stop() == 0
            port = int(server.address.rpartition(":")[2])
            servers[i] = start(tiny_folder, "--threads", 1, port=port)
            time.sleep(PAUSE)
    restarts_done.set()
    for thread in threads:
        thread.join()
    assert all(answers_by_seed)
    assert [
        response
        for seed, responses in enumerate(answers_by_seed)
        for response in responses
        if response != expected[seed]
    ] == []


def test_nginx_takes_bodies_as_large_as_the_server_and_keeps_metrics_private(site: Site) -> None:
    (size,) = re.findall(r"client_max_body_size (\d+)m;", CONFIGURATION)
    assert int(size) << 20 == BYTES_LIMIT
    assert site.request("GET", "/metrics")[0] == 404
    assert site.get("/v1/models")[0] == 200
