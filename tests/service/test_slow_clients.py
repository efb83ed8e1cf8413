"""Clients that are slow to send their request, or do not: they hold nothing up and are no errors of the server."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from running_server import GENERATIONS, RunningServer, until

from lantern_rt.serve.front import Front, Limits
from lantern_rt.serve.images import Images

HEAD = f"POST {GENERATIONS} HTTP/1.1\r\nhost: me\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"


def test_a_body_that_does_not_come_is_given_up() -> None:
    front = Front(Limits(body_seconds=0.05))
    front.drawers = {"none": Any}  # type: ignore[dict-item]
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": GENERATIONS, "headers": headers, "state": {"request_id": "1"}}
    asyncio.run(Images(front)(scope, receive, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["message"].startswith("body: not all of it was there after 0.05 s")
    assert not front.active


def test_a_client_that_leaves_within_its_request_is_no_error_of_the_server(tiny: RunningServer) -> None:
    host, _, port = tiny.address.rpartition(":")
    before = len(tiny.lines())
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(HEAD.encode() + b'{"prompt": ')
    until(lambda: len(tiny.lines()) > before)
    assert tiny.lines()[-1]["status"] == 499
    assert "Traceback" not in tiny.log


def test_metrics_tell_methods_apart_by_their_names_only(tiny: RunningServer) -> None:
    for window in range(3, 9):
        assert tiny.post({"prompt": "red cube", "method": f"sjd:window={window}"})[0] == 200
    until(lambda: tiny.metric("lantern_images_total", method="sjd", model="tiny") >= 6)
    assert "window" not in tiny.get("/metrics")[1]
