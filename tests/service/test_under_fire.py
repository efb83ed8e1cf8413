"""Test concurrent valid, invalid, late and cancelled requests: all images are right, and no memory leaks."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from running_server import GENERATIONS, RunningServer, parse_events, wait_until

from lantern_rt import Pipeline

METHODS = ("ar", "sjd", "eagle", "lantern", "lantern++", None, "sjd:window=3", "eagle:tree=mc-25", "rows")
PROMPTS = ("red cube", "green sphere on sand")
SEEDS = range(4)
INVALID_BODIES = (
    b"{",
    b'{"prompt": "magic"}',
    b'{"prompt": "red cube", "n": 0}',
    b'{"prompt": "red cube", "size": "9x9"}',
    b"x" * (1 << 17),
)


STATUSES = {"image": (200, 429), "stream": (200, 429), "invalid": (400, 413), "late": (200, 429, 504)}


class RandomClients:
    """Concurrent clients that send random requests and compare the pixels of the responses with `expected`."""

    def __init__(self, server: RunningServer, expected: dict[tuple[str, str, int], bytes], seed: int) -> None:
        self.server = server
        self.expected = expected
        self.rng = random.Random(seed)
        self.outcomes = Counter[str]()
        host, port = server.address.split(":")
        self.host = host
        self.port = int(port)
        self.num_images = 0

    async def send_random_request(self) -> None:
        """Send one request of a random kind: images, stream, early disconnect, invalid body, or short deadline."""
        kind = self.rng.choices(("image", "stream", "disconnect", "invalid", "late"), (6, 3, 3, 1, 1))[0]
        method = self.rng.choice(METHODS)
        prompt = self.rng.choice(PROMPTS)
        seed = self.rng.choice(SEEDS)
        body_fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "method": method}
        if kind == "image":
            body_fields["n"] = self.rng.choice((1, 1, 2))
        elif kind == "stream":
            body_fields |= {"stream": True, "partial_images": self.rng.choice((0, 1, 3))}
            body_fields["steps"] = self.rng.random() < 0.5
        elif kind == "disconnect":
            body_fields |= {"n": 3} if self.rng.random() < 0.5 else {"stream": True, "steps": True}
        elif kind == "late":
            body_fields |= {"n": 4, "deadline": self.rng.random() * 0.05 + 1e-6}
        body = self.rng.choice(INVALID_BODIES) if kind == "invalid" else json.dumps(body_fields).encode()
        client_address = f"127.0.0.{self.rng.randrange(2, 6)}", 0  # several connections share an address
        reader, writer = await asyncio.open_connection(self.host, self.port, local_addr=client_address)
        # HTTP/1.0, so that the response is not sent in chunks
        head = f"POST {GENERATIONS} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            if kind == "disconnect":
                await asyncio.wait_for(reader.read(1), self.rng.random() * 0.05)
                self.outcomes["disconnected"] += 1
                return
            response = await asyncio.wait_for(reader.read(-1), 60)
        except TimeoutError:
            assert kind == "disconnect"
            self.outcomes["disconnected"] += 1
            return
        except ConnectionError:  # the server does not read the rest of a body that is too long
            assert kind == "invalid"
            self.outcomes["400"] += 1
            return
        finally:
            writer.close()
        head_text, _, content = response.partition(b"\r\n\r\n")
        status = int(head_text.split()[1])
        self.outcomes[str(400 if status == 413 else status)] += 1
        assert status in STATUSES[kind]
        last_event = parse_events(content)[-1][1] if status == 200 and kind == "stream" else {}
        if "error" in last_event:  # requests of other clients took precedence in the queue
            assert last_event["error"]["code"] == "busy"
        elif last_event:
            self.check_images(last_event, method, prompt, seed, 1)
        elif status == 200:
            self.check_images(json.loads(content), method, prompt, seed, body_fields["n"])

    def check_images(self, response: dict[str, Any], method: str, prompt: str, seed: int, count: int) -> None:
        files = [image_data["b64_json"] for image_data in response.get("data", [response])]
        assert len(files) == count
        for i, file in enumerate(files):
            with Image.open(io.BytesIO(base64.b64decode(file))) as image:
                assert np.asarray(image).tobytes() == self.expected[method, prompt, seed + i]
        self.num_images += count

    async def send_requests(self, num_requests: int, concurrency: int) -> None:
        """Send `num_requests` random requests, `concurrency` of them at a time."""
        remaining_requests = iter(range(num_requests))

        async def run_client() -> None:
            for _ in remaining_requests:
                await self.send_random_request()

        await asyncio.gather(*(run_client() for _ in range(concurrency)))


@pytest.mark.parametrize("num_requests", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_concurrent_random_requests_get_the_right_images_without_memory_growth(
    num_requests: int, start_server: Callable[..., RunningServer], tiny_folder: Path, tiny_pipe: Pipeline
) -> None:
    expected = {
        (method, prompt, seed): np.asarray(tiny_pipe(prompt, seed=seed, method=method).images[0]).tobytes()
        for method in METHODS
        for prompt in PROMPTS
        for seed in range(len(SEEDS) + 4)
    }
    server = start_server(tiny_folder, "--threads", 1, "--batch", 6, "--waiting", 12)
    process = psutil.Process(server.process.pid)
    clients = RandomClients(server, expected, seed=num_requests)
    asyncio.run(clients.send_requests(num_requests // 4, 16))
    wait_until_idle(server)
    memory_before = measure_memory(process.pid)
    images_before = clients.num_images
    asyncio.run(clients.send_requests(num_requests - num_requests // 4, 16))
    wait_until_idle(server)
    memory_growth = measure_memory(process.pid) - memory_before
    assert {"200", "400", "disconnected"} <= set(clients.outcomes), clients.outcomes
    assert sum(clients.outcomes.values()) == num_requests
    num_images = clients.num_images - images_before
    print(f"{dict(clients.outcomes)}, {memory_growth:.1f} MiB more after {num_images} further images")
    assert memory_growth <= (2 * num_images / 1000 if num_requests >= 4000 else 16)  # MiB
    assert process.num_fds() < 64
    assert "Traceback" not in server.log
    assert server.stop() == 0


def measure_memory(process_id: int) -> float:
    """Return the memory of a process in MiB, including swapped memory and excluding mapped files."""
    text = Path(f"/proc/{process_id}/status").read_text("utf-8")
    return sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE))) / 1024


def wait_until_idle(server: RunningServer) -> None:
    for state in ("waiting", "running"):
        wait_until(lambda state=state: server.read_metric(f"lantern_images_{state}", model="tiny") == 0)
