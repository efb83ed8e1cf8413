"""Send requests of every kind at once, many of which go wrong: no image is lost or mixed up, and no memory leaks."""

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
WRONG = (
    b"{",
    b'{"prompt": "magic"}',
    b'{"prompt": "red cube", "n": 0}',
    b'{"prompt": "red cube", "size": "9x9"}',
    b"x" * (1 << 17),
)


class Crowd:
    """Clients of one server that send requests, wait, leave or send errors. outcomes: the count of each outcome."""

    def __init__(self, server: RunningServer, expected: dict[tuple[str, str, int], bytes], seed: int) -> None:
        self.server = server
        self.expected = expected
        self.rng = random.Random(seed)
        self.outcomes = Counter[str]()
        host, port = server.address.split(":")
        self.host = host
        self.port = int(port)
        self.images = 0

    async def visit(self) -> None:
        """Send one request of a random kind."""
        kind = self.rng.choices(("whole", "stream", "leave", "wrong", "late"), (6, 3, 3, 1, 1))[0]
        method = self.rng.choice(METHODS)
        prompt = self.rng.choice(PROMPTS)
        seed = self.rng.choice(SEEDS)
        body_fields: dict[str, Any] = {"prompt": prompt, "seed": seed, "method": method}
        if kind == "whole":
            body_fields["n"] = self.rng.choice((1, 1, 2))
        elif kind == "stream":
            body_fields |= {
                "stream": True,
                "partial_images": self.rng.choice((0, 1, 3)),
                "steps": self.rng.random() < 0.5,
            }
        elif kind == "leave":
            body_fields |= {"n": 3} if self.rng.random() < 0.5 else {"stream": True, "steps": True}
        elif kind == "late":
            body_fields |= {"n": 4, "deadline": self.rng.random() * 0.05 + 1e-6}
        body = self.rng.choice(WRONG) if kind == "wrong" else json.dumps(body_fields).encode()
        client_address = f"127.0.0.{self.rng.randrange(2, 6)}", 0  # several connections share an address
        reader, writer = await asyncio.open_connection(self.host, self.port, local_addr=client_address)
        head = f"POST {GENERATIONS} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"  # 1.0: no chunks
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            if kind == "leave":
                await asyncio.wait_for(reader.read(1), self.rng.random() * 0.05)
                self.outcomes["left"] += 1
                return
            response = await asyncio.wait_for(reader.read(-1), 60)
        except TimeoutError:
            assert kind == "leave"
            self.outcomes["left"] += 1
            return
        except ConnectionError:  # the server does not read the rest of a body that is too long
            assert kind == "wrong"
            self.outcomes["400"] += 1
            return
        finally:
            writer.close()
        head_text, _, content = response.partition(b"\r\n\r\n")
        status = int(head_text.split()[1])
        self.outcomes[str(400 if status == 413 else status)] += 1
        assert status in {"whole": (200, 429), "stream": (200, 429), "wrong": (400, 413), "late": (200, 429, 504)}[kind]
        last_event = parse_events(content)[-1][1] if status == 200 and kind == "stream" else {}
        if "error" in last_event:  # other callers had a right to the place it waited for
            assert last_event["error"]["code"] == "busy"
        elif last_event:
            self.check(last_event, method, prompt, seed, 1)
        elif status == 200:
            self.check(json.loads(content), method, prompt, seed, body_fields["n"])

    def check(self, response: dict[str, Any], method: str, prompt: str, seed: int, count: int) -> None:
        """Check that the images are those that the same request gives alone."""
        files = (
            [image_data["b64_json"] for image_data in response["data"]]
            if "data" in response
            else [response["b64_json"]]
        )
        assert len(files) == count
        for i, file in enumerate(files):
            with Image.open(io.BytesIO(base64.b64decode(file))) as image:
                assert np.asarray(image).tobytes() == self.expected[method, prompt, seed + i]
        self.images += count

    async def come(self, visits: int, concurrency: int) -> None:
        """Send `visits` requests, `concurrency` of them at a time."""
        remaining_visits = iter(range(visits))

        async def visit_in_turn() -> None:
            for _ in remaining_visits:
                await self.visit()

        await asyncio.gather(*(visit_in_turn() for _ in range(concurrency)))


@pytest.mark.parametrize("visits", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_image_is_lost_or_mixed_up_and_nothing_is_kept(
    visits: int, start: Callable[..., RunningServer], tiny_folder: Path, tiny_pipe: Pipeline
) -> None:
    expected = {
        (method, prompt, seed): np.asarray(tiny_pipe(prompt, seed=seed, method=method).images[0]).tobytes()
        for method in METHODS
        for prompt in PROMPTS
        for seed in range(len(SEEDS) + 4)
    }
    server = start(tiny_folder, "--threads", 1, "--batch", 6, "--waiting", 12)
    process = psutil.Process(server.process.pid)
    crowd = Crowd(server, expected, visits)
    asyncio.run(crowd.come(visits // 4, 16))
    wait_until_idle(server)
    memory_before = measure_memory(process.pid)
    images_before = crowd.images
    asyncio.run(crowd.come(visits - visits // 4, 16))
    wait_until_idle(server)
    memory_growth = measure_memory(process.pid) - memory_before
    assert {"200", "400", "left"} <= set(crowd.outcomes), crowd.outcomes
    assert sum(crowd.outcomes.values()) == visits
    print(f"{dict(crowd.outcomes)}, {memory_growth:.1f} MB more after {crowd.images - images_before} further images")
    assert memory_growth <= (2 * (crowd.images - images_before) / 1000 if visits >= 4000 else 16)
    assert process.num_fds() < 64
    assert "Traceback" not in server.log
    assert server.stop() == 0


def measure_memory(process: int) -> float:
    """Return the megabytes of memory of a process, without shared files."""
    text = Path(f"/proc/{process}/status").read_text("utf-8")
    return sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE))) / 1024


def wait_until_idle(server: RunningServer) -> None:
    """Wait until no image is being drawn and none waits."""
    wait_until(
        lambda: sum(server.metric(f"lantern_images_{state}", model="tiny") for state in ("running", "waiting")) == 0
    )
