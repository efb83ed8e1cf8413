"""Test the Ray Serve deployment over HTTP, on a cluster of two nodes on this machine."""

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
from running_server import GENERATIONS, JSON, RunningServer, parse_events, wait_until

from lantern_rt import Pipeline

pytest.importorskip("ray.serve", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray warns

import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "serve_config.yaml"
PROMPTS = ["a red sphere on sand", "a green cube on snow", "a blue cone on grass"]
METHODS = ["ar", "sjd:window=4", "lantern++", None]
ONE_THREAD = {"threads": None, "pipeline": {"threads": 1}}  # `threads: None` allows one replica per node
FAST_SCALING = {"upscale_delay_s": 0.5, "downscale_delay_s": 2, "metrics_interval_s": 0.3, "look_back_period_s": 1}
STEADY = {"max_images_per_pass": 4, "max_queued_images": 8, "autoscaling": {"min_replicas": 2, "max_replicas": 2}}
GROWING = {
    "max_images_per_pass": 1,
    "max_queued_images": 5,
    "max_queued_requests": 4,
    "autoscaling": {"min_replicas": 1, "max_replicas": 2, **FAST_SCALING},
}


class Application(RunningServer):
    """A client of a Ray Serve application, with the methods of `RunningServer`."""

    def __init__(self, address: str, path_prefix: str) -> None:
        self.address = address
        self.path_prefix = path_prefix


class RayCluster:
    """A Ray cluster of two nodes; of its applications, `steady` has two replicas, and `growing` one or two."""

    def __init__(self, folder: Path) -> None:
        node: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 100 << 20}
        self.cluster = Cluster(True, head_node_args={**node, "resources": {"head": 1}, "include_dashboard": False})
        self.second_node = self.cluster.add_node(**node)
        with socket.create_server(("127.0.0.1", 0)) as free_socket:
            port = free_socket.getsockname()[1]
        configuration = yaml.safe_load(CONFIGURATION.read_text())
        configuration |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        [application] = configuration["applications"]
        ingress = {"name": "ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"head": 0.1}}}
        configuration["applications"] = [
            {
                **application,
                "name": name,
                "route_prefix": f"/{name}",
                "args": {**application["args"], **ONE_THREAD, **settings},
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
        applications = (self.steady, self.growing)
        wait_until(lambda: self.count_replicas("steady") == 2 and all(map(self._is_ready, applications)))

    def _is_ready(self, application: Application) -> bool:
        try:
            return application.request("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def count_replicas(self, name: str) -> int:
        title = f"ray::ServeReplica:{name}:scenes"
        processes = psutil.Process().children(recursive=True)
        return sum(_read_command_line(process).startswith(title) for process in processes)

    def read_log(self) -> str:
        """Return the error output of all Ray workers, which contains the log of the ingresses."""
        logs = Path(self.cluster.head_node.get_session_dir_path()) / "logs"
        return "".join(file.read_text() for file in logs.glob("worker-*.err"))

    def stop(self) -> None:
        self._running.kill()
        self._running.wait()
        self.cluster.shutdown()


def _read_command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    served_cluster = RayCluster(tmp_path_factory.mktemp("ray"))
    yield served_cluster
    served_cluster.stop()


def decode_pixels(encoded_image: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(encoded_image))).tobytes()


def test_a_cluster_returns_the_same_models_and_errors_as_a_single_server(cluster: RayCluster) -> None:
    assert [model["id"] for model in cluster.steady.get("/v1/models")[1]["data"]] == ["scenes"]
    status, response = cluster.steady.post({"prompt": PROMPTS[0], "top_k": -1})
    assert (status, response["error"]["param"]) == (400, "top_k")
    assert cluster.steady.post({"prompt": PROMPTS[0], "model": "others"})[0] == 404
    assert cluster.steady.request("GET", "/")[0] == 200


def test_the_images_of_a_disconnected_client_are_cancelled_on_the_replica(cluster: RayCluster) -> None:
    # Six images fill the replica: one in the batch and five in the queue.
    request_body = {"prompt": PROMPTS[0], "seed": 1, "method": "ar", "n": 6}
    with cluster.growing.open_request(request_body):
        wait_until(lambda: cluster.growing.read_metric("lantern_images_running", model="scenes") == 1)
    wait_until(lambda: cluster.growing.read_metric("lantern_aborted_total", model="scenes", reason="disconnected") == 1)
    wait_until(lambda: cluster.growing.post(request_body)[0] == 200)


def test_replicas_are_added_under_load_and_removed_when_idle(cluster: RayCluster) -> None:
    wait_until(lambda: cluster.count_replicas("growing") == 1)
    stop_load = Event()

    def request_repeatedly(seed: int) -> int:
        statuses = [0]
        while not stop_load.is_set():
            statuses.append(cluster.growing.post({"prompt": PROMPTS[0], "seed": seed, "method": "sjd"})[0])
        return max(statuses)

    with ThreadPoolExecutor(4) as pool:
        statuses = [pool.submit(request_repeatedly, seed) for seed in range(4)]
        try:
            wait_until(lambda: cluster.count_replicas("growing") == 2)
        finally:
            stop_load.set()
    assert [status.result() for status in statuses] == [200] * 4
    wait_until(lambda: cluster.count_replicas("growing") == 1)
    assert cluster.growing.post({"prompt": PROMPTS[0], "seed": 1, "method": "sjd"})[0] == 200


def test_requests_beyond_the_queue_get_status_429_with_a_retry_time(cluster: RayCluster) -> None:
    def request_image(seed: int) -> tuple[int, dict[str, str], bytes]:
        request_body = {"prompt": PROMPTS[0], "seed": seed, "method": "sjd", "deadline": 10}
        return cluster.growing.request("POST", GENERATIONS, json.dumps(request_body).encode(), JSON)

    with ThreadPoolExecutor(30) as pool:
        responses = [*pool.map(request_image, range(30))]
    rejections = [(headers, json.loads(body)) for status, headers, body in responses if status == 429]
    assert {status for status, _, _ in responses} <= {200, 429, 504}
    assert len(rejections) >= 10
    for headers, body in rejections:
        assert body["error"]["code"] == "busy"
        assert 1 <= int(headers["retry-after"]) < 600  # seconds, which depend on the speed of this host


def test_requests_of_a_removed_node_give_the_same_images_elsewhere(cluster: RayCluster, scenes_pipe: Pipeline) -> None:
    requests = [{"prompt": PROMPTS[i % 3], "seed": i, "method": METHODS[i % 4]} for i in range(20)]
    expected = [scenes_pipe(**request | {"method": request["method"] or "ar"}) for request in requests]
    streams_started = Event()
    chunk_count = count()
    lost_before = cluster.read_log().count("lost a replica")

    def request_image(request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, as a stream for even seeds; return the response data with the image."""
        if request["seed"] % 2:
            status, response = cluster.steady.post(request)
            assert status == 200, response
            return response["data"][0]
        with cluster.steady.open_request({**request, "stream": True, "steps": True, "partial_images": 5}) as connection:
            response = connection.getresponse()
            body = b""
            while chunk := response.read1():
                body += chunk
                if next(chunk_count) > 60:
                    streams_started.set()
        stream_events = parse_events(body)
        assert [data["done"] for kind, data in stream_events if kind == "lantern.step"][-1] == 256
        assert {data.get("partial_image_index") for _, data in stream_events} == {None, *range(5)}
        return stream_events[-1][1]

    with ThreadPoolExecutor(20) as pool:
        responses = [pool.submit(request_image, request) for request in requests]
        assert streams_started.wait(60)
        cluster.cluster.remove_node(cluster.second_node, allow_graceful=False)
        images = [response.result()["b64_json"] for response in responses]
    assert [decode_pixels(image) for image in images] == [result.images[0].tobytes() for result in expected]
    assert cluster.read_log().count("lost a replica") > lost_before
