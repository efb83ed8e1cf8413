"""Test that no request is lost when two servers behind nginx, configured by deploy/nginx.conf, restart in turn."""

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
from running_server import RunningServer, wait_until

from lantern_rt.subjects.image_files import BYTES_LIMIT

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")

CONFIGURATION = (Path(__file__).parents[2] / "deploy/nginx.conf").read_text("utf-8")
NUM_CLIENTS = 50
NUM_ROUNDS = 2
PAUSE_SECONDS = 1.0  # pause between two restarts, as deploy/nginx.conf requires
# The main configuration, which includes the configuration of deploy/ and keeps all files of nginx in `folder`.
MAIN_CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; scgi_temp_path {folder}/scgi; uwsgi_temp_path {folder}/uwsgi;
    include {folder}/site.conf;
}}
"""


class NginxSite(RunningServer):
    """A client of nginx at a local port, with the methods of `RunningServer`."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"


def find_free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [free_socket.getsockname()[1] for free_socket in sockets]
    for free_socket in sockets:
        free_socket.close()
    return ports


def is_ready(site: NginxSite) -> bool:
    try:
        return site.get("/readyz")[0] == 200
    except OSError:
        return False


@pytest.fixture
def servers(start_server: Callable[..., RunningServer], tiny_folder: Path) -> list[RunningServer]:
    return [start_server(tiny_folder, "--threads", 1, port=port) for port in find_free_ports(2)]


@pytest.fixture
def site(servers: list[RunningServer], tmp_path: Path) -> Iterator[NginxSite]:
    (port,) = find_free_ports(1)
    text = CONFIGURATION.replace("listen 80;", f"listen 127.0.0.1:{port};")
    for number, server in zip((8001, 8002), servers, strict=True):
        text = text.replace(f"127.0.0.1:{number} ", f"{server.address} ")
    (tmp_path / "site.conf").write_text(text)
    (tmp_path / "nginx.conf").write_text(MAIN_CONFIGURATION.format(folder=tmp_path))
    user = ["-g", "user root;"] if tmp_path.owner() == "root" else []
    nginx = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf", *user])
    wait_until(lambda: is_ready(NginxSite(port)))
    yield NginxSite(port)
    nginx.terminate()
    nginx.wait()


def request_stream(site: NginxSite, seed: int) -> tuple[int, str]:
    kind, last_event = site.stream({"prompt": "red cube", "seed": seed})[-1]
    assert kind == "image_generation.completed"
    return 200, last_event["b64_json"]


def request_image(site: NginxSite, seed: int) -> tuple[int, str]:
    status, response = site.post({"prompt": "red cube", "seed": seed})
    return status, response["data"][0]["b64_json"] if status == 200 else json.dumps(response)


def test_rolling_restarts_lose_no_request(
    servers: list[RunningServer], site: NginxSite, start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    expected = [request_image(site, seed) for seed in range(NUM_CLIENTS)]
    responses_by_seed: list[list[Any]] = [[] for _ in range(NUM_CLIENTS)]
    restarts_done = threading.Event()

    def request_repeatedly(seed: int) -> None:
        while not restarts_done.is_set():
            try:
                responses_by_seed[seed].append((request_stream if seed % 2 else request_image)(site, seed))
            except Exception as error:
                responses_by_seed[seed].append(error)

    threads = [threading.Thread(target=request_repeatedly, args=[seed]) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for _ in range(NUM_ROUNDS):
        for i, server in enumerate(servers):
            assert server.stop() == 0
            port = int(server.address.rpartition(":")[2])
            servers[i] = start_server(tiny_folder, "--threads", 1, port=port)
            time.sleep(PAUSE_SECONDS)
    restarts_done.set()
    for thread in threads:
        thread.join()
    assert all(responses_by_seed)
    for responses, right_response in zip(responses_by_seed, expected, strict=True):
        assert [response for response in responses if response != right_response] == []


def test_nginx_has_the_body_limit_of_the_server_and_hides_the_metrics(site: NginxSite) -> None:
    (size,) = re.findall(r"client_max_body_size (\d+)m;", CONFIGURATION)
    assert int(size) << 20 == BYTES_LIMIT
    assert site.request("GET", "/metrics")[0] == 404
    assert site.get("/v1/models")[0] == 200
