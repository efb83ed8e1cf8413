"""Silent connections: they end, make room for others, and are no flood in the log."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_server import GENERATIONS, RunningServer

from lantern_rt.serve import connections


def connect(server: RunningServer, text: bytes = b"") -> socket.socket:
    host, _, port = server.address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=30)
    made.sendall(text)
    return made


@pytest.mark.slow
def test_more_silent_connections_than_files_leave_room_for_others(
    start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        server = start(tiny_folder, "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    size = len(server.log)
    body = f"POST {GENERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n"
    silent = [connect(server, (b"", b"GET /livez HT", body.encode())[i % 3]) for i in range(300)]
    assert server.get("/livez")[0] == server.get("/readyz")[0] == 200
    assert server.post({"prompt": "red cube"})[0] == 200
    assert silent[0].recv(1) == b"", "the longest silent one was closed"
    warnings = server.log[size:].count("connections")
    assert (warnings, server.log.count("Traceback")) == (1, 0), server.log[:3000]
    for one in silent:
        one.close()
    assert server.stop() == 0


@pytest.mark.parametrize("text", ["", "GET /livez HTTP/1.1\r\nhost"])
def test_headers_that_do_not_come_are_given_up(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import uvicorn

    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def read() -> tuple[bytes, bytes]:
        config = uvicorn.Config(app, http=connections.Connection, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: connections.Connection(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        first = await reader.readuntil(b"\r\n\r\n")
        if text:
            writer.write(text.encode())
        else:
            writer.close()
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        rest = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return first, rest

    first, rest = asyncio.run(read())
    assert (first[:12], rest) == (b"HTTP/1.1 200", b"")
