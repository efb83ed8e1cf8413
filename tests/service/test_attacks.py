"""Test that a server under attack by hostile forms and unfinished bodies still answers valid requests."""

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

VALID_REQUEST = {"prompt": "a red cube on sand", "seed": 1, "method": "ar"}
MAX_FORM_BYTES = 8 << 20
IMAGE_FIELD_HEAD = format_form({"image": b"none"}).partition(b"none")[0]  # the form up to the value of the field


def encode_blank_image(mode: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4096, 4096)).save(buffer, "PNG")
    return buffer.getvalue()


def make_attack(name: str) -> tuple[int, bytes]:
    """Return the number of connections of an attack and the bytes to send on each connection."""
    if name == "form headers":
        header = IMAGE_FIELD_HEAD.rstrip() + b'; x="' + b";" * 150_000
        return 6, format_head(EDITS, FORM, len(header)) + header
    if name == "boundaries":
        body = (IMAGE_FIELD_HEAD + b"\r\n--xy" * (MAX_FORM_BYTES // 6))[:MAX_FORM_BYTES]
        return 6, format_head(EDITS, FORM, MAX_FORM_BYTES) + body
    if name == "unfinished bodies":
        return 150, format_head(EDITS, FORM, MAX_FORM_BYTES - 1) + IMAGE_FIELD_HEAD + bytes(MAX_FORM_BYTES - 100)
    # The mask selects no pixel, so that the server decodes two large images and then rejects the edit.
    body = format_form({"prompt": b"a red cube", "image": encode_blank_image("RGB"), "mask": encode_blank_image("L")})
    return 40, format_head(EDITS, FORM, len(body)) + body


@contextmanager
def open_clients(server: RunningServer, count: int, content: bytes) -> Iterator[None]:
    """Open connections from another client address and send `content` on each as fast as the server reads."""
    with ExitStack() as stack:
        unsent = {stack.enter_context(server.connect(address="127.0.0.9")): memoryview(content) for _ in range(count)}
        for connection in unsent:
            connection.setblocking(False)
        while unsent:
            _, ready, _ = select.select([], [*unsent], [], 30)
            for connection in ready:
                try:
                    unsent[connection] = unsent[connection][connection.send(unsent[connection]) :]
                except OSError:  # the server sent a response and closed the connection
                    unsent[connection] = unsent[connection][:0]
                if not unsent[connection]:
                    del unsent[connection]
        yield


def measure_memory(server: RunningServer) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text("utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def measure_request_seconds(server: RunningServer) -> float:
    start_time = time.perf_counter()
    assert server.post(VALID_REQUEST)[0] == 200
    return time.perf_counter() - start_time


@pytest.mark.slow
@pytest.mark.parametrize("name", ["form headers", "boundaries", "unfinished bodies", "edits"])
def test_the_server_completes_valid_requests_during_an_attack_and_then_stops(
    name: str, start_server: Callable[..., RunningServer]
) -> None:
    server = start_server("scenes", "--threads", 1, "--batch", 4, "--deadline", 30)
    baseline_seconds = statistics.median(measure_request_seconds(server) for _ in range(5))
    idle_memory = peak_memory = measure_memory(server)
    seconds_under_attack = []
    with open_clients(server, *make_attack(name)):
        for _ in range(5):
            seconds_under_attack.append(measure_request_seconds(server))
            peak_memory = max(peak_memory, measure_memory(server))
    stop_time = time.perf_counter()
    assert server.stop() == 0
    stop_seconds = time.perf_counter() - stop_time
    rounded_seconds = [round(seconds, 2) for seconds in seconds_under_attack]
    print(f"{name}: {baseline_seconds:.2f} s without attack, {rounded_seconds} s under attack, ", end="")
    print(f"{peak_memory - idle_memory:.0f} MiB more memory, stopped {stop_seconds:.1f} s after SIGTERM")
    assert peak_memory - idle_memory < 400
    assert stop_seconds < 30
    assert "Traceback" not in server.log
