"""Test replicas on two nodes, both of them on this machine, started as users start them and called over HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from PIL import Image
from running_server import GENERATIONS, RunningServer, parse_events, wait_until

from lantern_rt import Pipeline

pytest.importorskip("ray.serve", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray warns

import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "serve_config.yaml"
PROMPTS = ["a red sphere on sand", "a green cube on snow", "a blue cone on grass"]
METHODS = ["ar", "sjd:window=4", "lantern++", None]
ONE_THREAD = {"threads": None, "pipeline": {"threads": 1}}  # a replica on each node
FAST_SCALING = {"upscale_delay_s": 0.5, "downscale_delay_s": 2, "metrics_interval_s": 0.3, "look_back_period_s": 1}
STEADY = {"max_images_per_pass": 4, "max_queued_images": 8, "autoscaling": {"min_replicas": 2, "max_replicas": 2}}
GROWING = {
    "max_images_per_pass": 1,
    "max_queued_images": 5,
    "queued": 4,
    "autoscaling": {"min_replicas": 1, "max_replicas": 2, **FAST_SCALING},
}


class Application(RunningServer):
    """An application that the cluster serves at a path, used like any other server."""

    def __init__(self, address: str, root: str) -> None:
        self.address = address
        self.root = root


class Served:
    """A cluster of two nodes that serves `steady`, with two replicas, and `growing`, with one or two."""

    def __init__(self, folder: Path) -> None:
        node: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20}
        self.cluster = Cluster(True, head_node_args={**node, "resources": {"head": 1}, "include_dashboard": False})
        self.other = self.cluster.add_node(**node)
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            port = free_socket.getsockname()[1]
        configuration = yaml.safe_load(CONFIGURATION.read_text())
        configuration |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        [usual] = configuration["applications"]
        ingress = {"name": "ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"head": 0.1}}}
        configuration["applications"] = [
            {
                **usual,
                "name": name,
                "route_prefix": f"/{name}",
                "args": {**usual["args"], **ONE_THREAD, **settings},
                "deployments": [ingress],
            }
            for name, settings in (("steady", STEADY), ("growing", GROWING))
        ]
        file = folder / "serve_config.json"
        file.write_text(json.dumps(configuration))
        serve = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", self.cluster.address]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (folder / "serve.log").open("wb") as log:
            self._running = subprocess.Popen([*serve, str(file)], stdout=log, stderr=log, env=environment)
        self.steady, self.growing = (Application(f"127.0.0.1:{port}", path) for path in ("/steady", "/growing"))
        wait_until(lambda: self.replicas("steady") == 2 and all(map(self._ready, (self.steady, self.growing))))

    def _ready(self, application: Application) -> bool:
        try:
            return application.request("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the replicas of `scenes` in an application."""
        title = f"ray::ServeReplica:{name}:scenes"
        return [process for process in psutil.Process().children(recursive=True) if _command(process).startswith(title)]

    def replicas(self, name: str) -> int:
        return len(self.processes(name))

    def log(self) -> str:
        """Return the logs of the ingresses."""
        logs = Path(self.cluster.head_node.get_session_dir_path()) / "logs"
        return "".join(file.read_text() for file in logs.glob("worker-*.err"))

    def stop(self) -> None:
        self._running.kill()
        self._running.wait()
        self.cluster.shutdown()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served_cluster = Served(tmp_path_factory.mktemp("ray"))
    yield served_cluster
    served_cluster.stop()


def decode_pixels(picture: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(picture))).tobytes()


def test_models_and_errors_are_those_of_one_server(cluster: Served) -> None:
    assert [model["id"] for model in cluster.steady.get("/v1/models")[1]["data"]] == ["scenes"]
    status, response = cluster.steady.post({"prompt": PROMPTS[0], "top_k": -1})
    assert (status, response["error"]["param"]) == (400, "top_k")
    assert cluster.steady.post({"prompt": PROMPTS[0], "model": "others"})[0] == 404
    assert cluster.steady.request("GET", "/")[0] == 200


def test_a_client_that_leaves_frees_its_place_on_the_replica(cluster: Served) -> None:
    all_places = {"prompt": PROMPTS[0], "seed": 1, "method": "ar", "n": 6}
    with cluster.growing.open(all_places):
        wait_until(lambda: cluster.growing.metric("lantern_images_running", model="scenes") == 1)
    wait_until(lambda: cluster.growing.metric("lantern_aborted_total", model="scenes", reason="disconnected") == 1)
    wait_until(lambda: cluster.growing.post(all_places)[0] == 200)


def test_replicas_come_with_load_and_go_without_it(cluster: Served) -> None:
    wait_until(lambda: cluster.replicas("growing") == 1)
    stop_drawing = Event()

    def draw(seed: int) -> int:
        statuses = [0]
        while not stop_drawing.is_set():
            statuses.append(cluster.growing.post({"prompt": PROMPTS[0], "seed": seed, "method": "sjd"})[0])
        return max(statuses)

    with ThreadPoolExecutor(4) as pool:
        statuses = [pool.submit(draw, seed) for seed in range(4)]
        try:
            wait_until(lambda: cluster.replicas("growing") == 2)
        finally:
            stop_drawing.set()
    assert [status.result() for status in statuses] == [200] * 4
    wait_until(lambda: cluster.replicas("growing") == 1)
    assert cluster.growing.post({"prompt": PROMPTS[0], "seed": 1, "method": "sjd"})[0] == 200


def test_too_many_requests_are_told_when_to_come_again(cluster: Served) -> None:
    def draw(seed: int) -> tuple[int, dict[str, str], bytes]:
        request_body = {"prompt": PROMPTS[0], "seed": seed, "method": "sjd", "deadline": 10}
        headers = {"content-type": "application/json"}
        return cluster.growing.request("POST", GENERATIONS, json.dumps(request_body).encode(), headers)

    with ThreadPoolExecutor(30) as pool:
        responses = [*pool.map(draw, range(30))]
    rejections = [(headers, json.loads(body)) for status, headers, body in responses if status == 429]
    assert {status for status, _, _ in responses} <= {200, 429, 504}
    assert len(rejections) >= 10
    for headers, body in rejections:
        assert body["error"]["code"] == "busy"
        assert 1 <= int(headers["retry-after"]) < 600  # by how fast this host is


def test_when_a_node_dies_its_requests_are_drawn_elsewhere_and_give_the_same_images(
    cluster: Served, scenes_pipe: Pipeline
) -> None:
    requests = [{"prompt": PROMPTS[i % 3], "seed": i, "method": METHODS[i % 4]} for i in range(20)]
    expected = [
        scenes_pipe(request["prompt"], seed=request["seed"], method=request["method"] or "ar") for request in requests
    ]
    steps_begun = Event()
    step_count = count()
    lost_before = cluster.log().count("lost a replica")

    def draw(request: dict[str, Any]) -> dict[str, Any]:
        if request["seed"] % 2:
            status, response = cluster.steady.post(request)
            assert status == 200, response
            return response["data"][0]
        with cluster.steady.open({**request, "stream": True, "steps": True, "partial_images": 5}) as connection:
            response = connection.getresponse()
            body = b""
            while part := response.read1():
                body += part
                if next(step_count) > 60:
                    steps_begun.set()
        stream_events = parse_events(body)
        assert [data["done"] for kind, data in stream_events if kind == "lantern.step"][-1] == 256
        assert {data.get("partial_image_index") for _, data in stream_events} == {None, *range(5)}
        return stream_events[-1][1]

    with ThreadPoolExecutor(20) as pool:
        pending = [pool.submit(draw, request) for request in requests]
        assert steps_begun.wait(60)
        cluster.cluster.remove_node(cluster.other, allow_graceful=False)
        images = [request.result()["b64_json"] for request in pending]
    assert [decode_pixels(request) for request in images] == [result.images[0].tobytes() for result in expected]
    assert cluster.log().count("lost a replica") > lost_before
