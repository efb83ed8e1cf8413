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
from running_server import EDITS, FORM, RunningServer, form, head

PLAIN = {"prompt": "a red cube on sand", "seed": 1, "method": "ar"}
MEGABYTES = 8 << 20  # the most that a form may have
IMAGE = form({"image": b"none"}).partition(b"none")[0]


def flat(mode: str) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4096, 4096)).save(buffer, "PNG")
    return buffer.getvalue()


def attack(name: str) -> tuple[int, bytes]:
    """How many connections, and what is sent on each."""
    if name == "forms":
        header = IMAGE.rstrip() + b'; x="' + b";" * 150_000
        return 6, head(EDITS, FORM, len(header)) + header
    if name == "boundaries":
        return 6, head(EDITS, FORM, MEGABYTES) + (IMAGE + b"\r\n--xy" * (MEGABYTES // 6))[:MEGABYTES]
    if name == "bodies":
        return 150, head(EDITS, FORM, MEGABYTES - 1) + IMAGE + bytes(MEGABYTES - 100)
    body = form({"prompt": b"a red cube", "image": flat("RGB"), "mask": flat("L")})  # nothing is to be drawn
    return 40, head(EDITS, FORM, len(body)) + body


@contextmanager
def clients(server: RunningServer, count: int, sent: bytes) -> Iterator[None]:
    """So many connections of another address, on which these bytes are sent as fast as they are taken."""
    with ExitStack() as stack:
        rest = {stack.enter_context(server.connect(address="127.0.0.9")): memoryview(sent) for _ in range(count)}
        for connection in rest:
            connection.setblocking(False)
        while rest:
            _, ready, _ = select.select([], [*rest], [], 30)
            for connection in ready:
                try:
                    rest[connection] = rest[connection][connection.send(rest[connection]) :]
                except OSError:  # it was answered and closed
                    rest[connection] = rest[connection][:0]
                if not rest[connection]:
                    del rest[connection]
        yield


def memory(server: RunningServer) -> float:
    """Megabytes that the server holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text("utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def seconds(server: RunningServer) -> float:
    began = time.perf_counter()
    assert server.post(PLAIN)[0] == 200
    return time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forms", "boundaries", "bodies", "edits"])
def test_a_plain_request_is_drawn_beside_hostile_ones_and_the_server_ends(
    name: str, start: Callable[..., RunningServer]
) -> None:
    server = start("scenes", "--threads", 1, "--batch", 4, "--deadline", 30)
    alone = statistics.median(seconds(server) for _ in range(5))
    before = peak = memory(server)
    beside = []
    with clients(server, *attack(name)):
        for _ in range(5):
            beside.append(seconds(server))
            peak = max(peak, memory(server))
    began = time.perf_counter()
    assert server.stop() == 0
    ended = time.perf_counter() - began
    print(f"{name}: {alone:.2f} s alone, {[round(one, 2) for one in beside]} s beside, ", end="")
    print(f"{peak - before:.0f} MB more, ended {ended:.1f} s after SIGTERM")
    assert peak - before < 400
    assert ended < 30
    assert "Traceback" not in server.log
