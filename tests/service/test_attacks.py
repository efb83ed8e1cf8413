"""Hostile clients beside a plain one: forms, unfinished bodies, refused edits. Most figures are only printed."""

from __future__ import annotations

import io
import select
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from PIL import Image
from running_server import EDITS, FORM, RunningServer, format_form, format_head

PLAIN = {"prompt": "a red cube on sand", "seed": 1, "method": "ar"}
MEGABYTES = 8 << 20  # the most that a form may have
IMAGE = format_form({"image": b"none"}).partition(b"none")[0]


def encode_blank_image(mode: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4096, 4096)).save(buffer, "PNG")
    return buffer.getvalue()


def make_attack(name: str) -> tuple[int, bytes]:
    """Return the number of connections and the bytes that are sent on each."""
    if name == "forms":
        header = IMAGE.rstrip() + b'; x="' + b";" * 150_000
        return 6, format_head(EDITS, FORM, len(header)) + header
    if name == "boundaries":
        return 6, format_head(EDITS, FORM, MEGABYTES) + (IMAGE + b"\r\n--xy" * (MEGABYTES // 6))[:MEGABYTES]
    if name == "bodies":
        return 150, format_head(EDITS, FORM, MEGABYTES - 1) + IMAGE + bytes(MEGABYTES - 100)
    body = format_form(
        {"prompt": b"a red cube", "image": encode_blank_image("RGB"), "mask": encode_blank_image("L")}
    )  # nothing is to be drawn
    return 40, format_head(EDITS, FORM, len(body)) + body


@contextmanager
def open_clients(server: RunningServer, count: int, content: bytes) -> Iterator[None]:
    """Open `count` connections from another address and send `content` on each as fast as the server reads it."""
    with ExitStack() as stack:
        unsent = {stack.enter_context(server.connect(address="127.0.0.9")): memoryview(content) for _ in range(count)}
        for connection in unsent:
            connection.setblocking(False)
        while unsent:
            _, ready, _ = select.select([], [*unsent], [], 30)
            for connection in ready:
                try:
                    unsent[connection] = unsent[connection][connection.send(unsent[connection]) :]
                except OSError:  # the server answered and closed the connection
                    unsent[connection] = unsent[connection][:0]
                if not unsent[connection]:
                    del unsent[connection]
        yield


def measure_memory(server: RunningServer) -> float:
    """Return the megabytes that the server holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text("utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def time_request(server: RunningServer) -> float:
    start_time = time.perf_counter()
    assert server.post(PLAIN)[0] == 200
    return time.perf_counter() - start_time


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forms", "boundaries", "bodies", "edits"])
def test_a_plain_request_is_drawn_beside_hostile_ones_and_the_server_ends(
    name: str, start: Callable[..., RunningServer]
) -> None:
    server = start("scenes", "--threads", 1, "--batch", 4, "--deadline", 30)
    baseline_seconds = statistics.median(time_request(server) for _ in range(5))
    idle_memory = peak_memory = measure_memory(server)
    seconds_under_attack = []
    with open_clients(server, *make_attack(name)):
        for _ in range(5):
            seconds_under_attack.append(time_request(server))
            peak_memory = max(peak_memory, measure_memory(server))
    stop_time = time.perf_counter()
    assert server.stop() == 0
    stop_seconds = time.perf_counter() - stop_time
    print(
        f"{name}: {baseline_seconds:.2f} s alone, {[round(seconds, 2) for seconds in seconds_under_attack]} s beside, ",
        end="",
    )
    print(f"{peak_memory - idle_memory:.0f} MB more, ended {stop_seconds:.1f} s after SIGTERM")
    assert peak_memory - idle_memory < 400
    assert stop_seconds < 30
    assert "Traceback" not in server.log
