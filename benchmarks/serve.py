"""Measure `lantern-rt serve` under load, and compare the server with the pipeline without a server.

    python benchmarks/serve.py                    # the embedded model; about ten minutes
    python benchmarks/serve.py --seconds 10 --json serve.json

The program measures:

- offline: `Pipeline` with one image at a time (`ar`), and quality `strict` in batches of 1 to 16, including PNG files;
- closed loop: 1 to 16 HTTP clients, each of which sends the next request when the response arrives;
- open loop: requests at random times, at 0.5 to 3 times the images per second of the best offline batch. `refused` is
  the share of requests that were rejected with status 429. Latencies are of all other requests. `p99_bound` is the time
  to generate a full batch and a full queue at the measured images per second;
- deadlines: an open loop at twice the rate of saturation with a long queue. Each deadline is the time in which a
  saturated server generates 25 images. `late` is the share of accepted requests that missed their deadline;
- neighbours: four clients with different addresses, while a fifth client sends equal or more expensive requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lantern_rt import Pipeline
from lantern_rt.output.formats import PNG

BATCHES = (1, 2, 4, 8, 16)
CLIENTS = (1, 2, 4, 8, 16)
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
MAX_BATCH = 8
MAX_WAITING = 8
DEADLINE_IMAGES = 25  # a deadline is the time of so many images at saturation
# Options of the fifth client's requests. The client `like them` sends the same requests as its neighbours.
FIFTH_CLIENTS = {
    "like them": {},
    "wide": {"method": "sjd:window=63"},
    "relaxed": {"method": "lantern++"},
    "many": {"n": 10},
}


@dataclass
class RequestResults:
    """Results of HTTP requests.

    Attributes:
        latencies: seconds of each request that returned an image.
        num_refused: number of requests with status 429.
        num_late: number of requests with status 504.
    """

    latencies: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_late: int = 0

    def summarize(self, elapsed_seconds: float) -> dict[str, float]:
        """Return images per second, percentiles of the latency in seconds, and shares of refused and late requests."""
        sorted_seconds = sorted(self.latencies) or [float("nan")]
        percentiles = [
            sorted_seconds[min(len(sorted_seconds) - 1, int(share * len(sorted_seconds)))]
            for share in (0.5, 0.95, 0.99)
        ]
        return {
            "images_per_second": len(self.latencies) / elapsed_seconds,
            **dict(zip(("p50", "p95", "p99"), percentiles, strict=True)),
            "refused": self.num_refused / max(1, self.num_refused + self.num_late + len(self.latencies)),
            "late": self.num_late / max(1, self.num_late + len(self.latencies)),
        }


def measure_offline_rate(
    pipe: Pipeline, prompts: list[str], batch_size: int, seconds: float, method: str | None
) -> float:
    """Return the images per second of a pipeline that generates batches one after the other."""
    rates: list[float] = []
    first_start = time.perf_counter()
    while time.perf_counter() - first_start < seconds:
        start = time.perf_counter()
        batch_prompts = [prompts[(len(rates) * batch_size + i) % len(prompts)] for i in range(batch_size)]
        for image in pipe(batch_prompts, seed=[*range(batch_size)], method=method).images:
            PNG.encode_image(image)
        rates.append(batch_size / (time.perf_counter() - start))
    return statistics.harmonic_mean(rates)


@contextmanager
def run_server(*arguments: str) -> Iterator[tuple[str, int]]:
    """Run a server with these command-line arguments in this context; yield the host and the port."""
    command = [sys.executable, "-m", "lantern_rt", "serve", *arguments, "--port", "0"]
    with tempfile.NamedTemporaryFile("r") as log, subprocess.Popen(command, stderr=open(log.name, "w")) as process:
        try:
            text = ""
            while "ready" not in text:
                time.sleep(0.1)
                text += log.read()
            address = re.search(r"http://(\S+):(\d+)", text)
            assert address is not None
            yield address[1], int(address[2])
        finally:
            process.terminate()


async def request_image(
    address: tuple[str, int], prompt: str, seed: int, results: RequestResults, caller_id: int = 1, **options: object
) -> None:
    """Send a request from the address 127.0.0.`caller_id`, which is one caller, and add the outcome to the results."""
    start_time = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address, local_addr=(f"127.0.0.{caller_id}", 0))
    body = json.dumps({"prompt": prompt, "seed": seed, **options}).encode()
    head = "POST /v1/images/generations HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n".encode() + body)
    response = await reader.read(-1)
    writer.close()
    if response.startswith(b"HTTP/1.1 200"):
        results.latencies.append(time.perf_counter() - start_time)
    elif response.startswith(b"HTTP/1.1 429"):
        results.num_refused += 1
    elif response.startswith(b"HTTP/1.1 504"):
        results.num_late += 1
    else:
        raise SystemExit(response[:500].decode())


async def run_closed_loop(
    address: tuple[str, int], prompts: list[str], num_clients: int, seconds: float
) -> dict[str, float]:
    """Measure clients that each send the next request when the response arrives."""
    results = RequestResults()
    start_time = time.perf_counter()
    seeds = iter(range(1 << 30))

    async def run_client() -> None:
        while time.perf_counter() - start_time < seconds:
            await request_image(address, random.choice(prompts), next(seeds), results)

    await asyncio.gather(*(run_client() for _ in range(num_clients)))
    return results.summarize(time.perf_counter() - start_time)


async def measure_neighbours(
    address: tuple[str, int], seconds: float, fifth_client_options: dict[str, object]
) -> dict[str, float]:
    """Measure four clients with one request at a time, while a fifth sends one, or four at a time with options."""
    results = RequestResults()
    fifth_client_results = RequestResults()
    start_time = time.perf_counter()
    seeds = iter(range(1 << 30))

    async def run_client(caller_id: int, caller_results: RequestResults, **options: object) -> None:
        while time.perf_counter() - start_time < seconds:
            await request_image(address, "a red cube on sand", next(seeds), caller_results, caller_id, **options)

    fifth_client_tasks = [
        asyncio.create_task(run_client(6, fifth_client_results, **fifth_client_options))
        for _ in range(4 if fifth_client_options else 1)
    ]
    await asyncio.gather(*(run_client(caller, results) for caller in range(2, 6)))
    row = results.summarize(time.perf_counter() - start_time)
    for task in fifth_client_tasks:
        task.cancel()
    return row


async def run_open_loop(
    address: tuple[str, int], prompts: list[str], requests_per_second: float, seconds: float, **options: object
) -> dict[str, float]:
    """Measure requests that arrive at random times, independently of earlier responses."""
    results = RequestResults()
    start_time = time.perf_counter()
    rng = random.Random(0)
    requests = list[asyncio.Task[None]]()
    while time.perf_counter() - start_time < seconds:
        requests.append(
            asyncio.create_task(request_image(address, rng.choice(prompts), len(requests), results, **options))
        )
        await asyncio.sleep(rng.expovariate(requests_per_second))
    await asyncio.gather(*requests)
    return results.summarize(time.perf_counter() - start_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", default="scenes")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each measurement")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds = arguments.seconds
    rows: dict[str, dict[str, float]] = {}

    def report_row(name: str, row: dict[str, float]) -> None:
        rows[name] = row
        print(f"{name:32}" + "".join(f"  {key} {value:7.3f}" for key, value in row.items()), flush=True)

    pipe = Pipeline.from_bundle(arguments.bundle, threads=arguments.threads)
    prompts = pipe.bundle.path("prompts").read_text("utf-8").splitlines()
    best = 0.0
    for size, method in [(1, "ar"), *((size, None) for size in BATCHES)]:
        rate = measure_offline_rate(pipe, prompts, size, seconds, method)
        report_row(f"offline, {method or 'strict'}, batches of {size}", {"images_per_second": rate})
        best = max(best, rate)
    limits = ["--batch", str(MAX_BATCH), "--waiting", str(MAX_WAITING)]
    threads = [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    with run_server(arguments.bundle, *limits, *threads) as address:
        for clients in CLIENTS:
            asyncio.run(run_closed_loop(address, prompts, clients, seconds))
            report_row(f"clients: {clients}", asyncio.run(run_closed_loop(address, prompts, clients, seconds)))
        for load in LOADS:
            row = asyncio.run(run_open_loop(address, prompts, load * best, 2 * seconds))
            bound = (MAX_BATCH + MAX_WAITING) / row["images_per_second"]
            report_row(f"offered: {load:g} x {best:.2f} images/s", row | {"p99_bound": bound})
    with run_server(arguments.bundle, "--batch", str(MAX_BATCH), *threads) as address:
        for _ in range(2):
            saturation = asyncio.run(run_closed_loop(address, prompts, 2 * MAX_BATCH, seconds))
        report_row("saturation", saturation)
        rate = saturation["images_per_second"]
        row = asyncio.run(run_open_loop(address, prompts, 2 * rate, 2 * seconds, deadline=DEADLINE_IMAGES / rate))
        report_row("deadlines, 2 x saturation", row)
        for name, fifth_client_options in FIFTH_CLIENTS.items():
            report_row(
                f"neighbours of one that is {name}",
                asyncio.run(measure_neighbours(address, 2 * seconds, fifth_client_options)),
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
