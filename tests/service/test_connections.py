"""Check silent connections: they end, leave room for others, and do not flood the log."""

from __future__ import annotations

import resource
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running_server import EDITS, FORM, GENERATIONS, RunningServer, format_form, format_head

from lantern_rt.serve import connections

JSON = "application/json"
MEGABYTES = 8 << 20  # the most that a form may have


@pytest.mark.slow
def test_more_silent_connections_than_files_leave_room_for_others(
    start: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    try:
        server = start(tiny_folder, "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 4096), hard_limit))
    size = len(server.log)
    silent = [server.connect((b"", b"GET /livez HT", format_head(GENERATIONS, JSON, 99))[i % 3]) for i in range(300)]
    assert server.get("/livez")[0] == server.get("/readyz")[0] == 200
    assert server.post({"prompt": "red cube"})[0] == 200
    assert silent[0].recv(1) == b"", "the longest silent one was closed"
    warnings = server.log[size:].count("closing idle connections")
    assert (warnings, server.log.count("Traceback")) == (1, 0), server.log[:3000]
    for connection in silent:
        connection.close()
    assert server.stop() == 0


@pytest.mark.parametrize("text", ["", "GET /livez HTTP/1.1\r\nhost"])
def test_headers_that_do_not_come_are_given_up(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import uvicorn

    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def request_twice() -> tuple[bytes, bytes]:
        config = uvicorn.Config(app, http=connections.LimitedConnection, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: connections.LimitedConnection(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        first_answer = await reader.readuntil(b"\r\n\r\n")
        if text:
            writer.write(text.encode())
        else:
            writer.close()
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        remaining_bytes = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return first_answer, remaining_bytes

    first_answer, remaining_bytes = asyncio.run(request_twice())
    assert (first_answer[:12], remaining_bytes) == (b"HTTP/1.1 200", b"")


def test_a_body_that_nobody_reads_ends_its_connection(tiny: RunningServer) -> None:
    requests = (
        format_head("/nothing", JSON, 99),
        format_head(GENERATIONS, "text/plain", 99) + b"{",
        format_head(GENERATIONS, JSON, 1 << 30) + b"{",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n",
    )
    with ExitStack() as stack:
        for connection in [stack.enter_context(tiny.connect(text)) for text in requests]:
            response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
            assert response.startswith(b"HTTP/1.1 ")
            assert b"\r\nconnection: close\r\n" in response.lower()


@pytest.mark.parametrize("length", ["0", "4", "999"])
def test_a_request_with_two_lengths_is_rejected_and_what_follows_is_no_request(
    tiny: RunningServer, length: str
) -> None:
    hidden = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    sent = f"POST {GENERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n".encode()
    sent += f"content-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    sent += b'16\r\n{"prompt": "red cube"}\r\n0\r\n\r\n'
    with tiny.connect(sent + hidden) as connection:
        response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1 ") == 1


CHUNKED = format_head(GENERATIONS, JSON, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(("size", "padding"), [(1, 600), (40, 60_000)])
def test_a_body_may_have_a_thousand_small_chunks_or_many_larger_ones(
    tiny: RunningServer, size: int, padding: int
) -> None:
    body = b'{"prompt": "red cube"%s}' % (b" " * padding)
    last = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with tiny.connect(2 * (CHUNKED + chunks(body, size)) + last) as connection:
        response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    assert response.count(b"HTTP/1.1 200") == 3


def test_a_body_of_many_small_chunks_is_rejected(tiny: RunningServer) -> None:
    with tiny.connect(CHUNKED + chunks(b" " * 1100, 1)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert "Traceback" not in tiny.log


def test_chunks_behind_a_response_end_their_connection(tiny: RunningServer) -> None:
    with tiny.connect(CHUNKED.replace(GENERATIONS.encode(), b"/nothing") + chunks(b"{", 1)[:-5]) as connection:
        assert connection.recv(12) == b"HTTP/1.1 404"
        with suppress(OSError):  # it was closed
            for _ in range(100):
                connection.sendall(chunks(bytes(1000), 1)[:-5])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert "Traceback" not in tiny.log


def test_clients_that_send_tiny_chunks_leave_time_for_others(tiny: RunningServer) -> None:
    request = CHUNKED + chunks(bytes(200_000), 1)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with suppress(OSError), tiny.connect(request) as connection:
                connection.recv(1)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        seconds = []
        for _ in range(10):
            start_time = time.monotonic()
            assert tiny.get("/livez")[0] == 200
            seconds.append(time.monotonic() - start_time)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    print(f"/livez: at most {max(seconds):.2f} s")


def test_a_client_that_sends_first_and_reads_then_is_told_that_its_body_is_too_large(tiny: RunningServer) -> None:
    status, headers, _ = tiny.request("POST", EDITS, bytes(MEGABYTES + 1), {"content-type": FORM})
    assert (status, headers["connection"]) == (413, "close")


def test_bodies_of_one_address_leave_memory_for_its_plain_requests_and_for_others(tiny: RunningServer) -> None:
    large_head = format_head(EDITS, FORM, MEGABYTES - 1)
    complete_form = format_form({"image": b"none", "prompt": b"red cube"})
    unfinished = [tiny.connect(large_head, "127.0.0.7") for _ in range(9)]
    rejected, _, _ = select.select(unfinished, [], [], 15)
    (response,) = [connection.recv(1 << 16) for connection in rejected]
    assert (response[:12], b"retry-after: 5" in response) == (b"HTTP/1.1 429", True)
    with tiny.connect(format_head(EDITS, FORM, len(complete_form)) + complete_form, "127.0.0.8") as other_connection:
        assert other_connection.recv(12) == b"HTTP/1.1 400"
    with tiny.connect(format_head(GENERATIONS, JSON, 22) + b'{"prompt": "red cube"}', "127.0.0.7") as plain_connection:
        assert plain_connection.recv(12) == b"HTTP/1.1 200"
    for connection in unfinished:
        connection.close()
