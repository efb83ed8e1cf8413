"""Test idle connections, incomplete requests and hostile request bodies: other clients are still served."""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from running_server import EDITS, FORM, GENERATIONS, RunningServer, format_form, format_head

from lantern_rt.serve import connections

JSON = "application/json"
MAX_FORM_BYTES = 8 << 20


UNREAD_RESPONSES = b"GET /page/page.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests",
    [(b"", b"GET /livez HT", format_head(GENERATIONS, JSON, 99)), (UNREAD_RESPONSES,)],
    ids=["idle", "unread"],
)
def test_connections_at_the_limit_make_room_for_other_requests(
    requests: tuple[bytes, ...], start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    try:
        server = start_server(tiny_folder, "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 4096), hard_limit))
    log_length = len(server.log)
    clients = [server.connect(requests[i % len(requests)]) for i in range(300)]
    print(f"/livez: at most {measure_health_checks(server):.2f} s")
    assert server.get("/readyz")[0] == 200
    assert server.post({"prompt": "red cube"})[0] == 200
    clients[0].setblocking(False)
    with suppress(ConnectionError):  # closed with bytes that were not read
        while clients[0].recv(1 << 16):  # BlockingIOError: still open
            pass
    warnings = server.log[log_length:].count("closing idle connections")
    assert (warnings, server.log.count("Traceback")) == (1, 0), server.log[:3000]
    assert server.stop() == 0
    assert "Traceback" not in server.log
    for client in clients:
        client.close()


async def small_response(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[tuple[uvicorn.server.ServerState, tuple[str, int]]]:
    """Serve an application with `LimitedConnection`; yield uvicorn's state and the address."""
    config = uvicorn.Config(app, http=connections.LimitedConnection, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: connections.LimitedConnection(config, state, {}), "127.0.0.1", 0)
    try:
        yield state, server.sockets[0].getsockname()
    finally:
        server.close()


@pytest.mark.parametrize("text", ["", "GET /livez HTTP/1.1\r\nhost"])
def test_a_connection_without_complete_request_headers_is_closed_after_a_timeout(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.1)

    async def request_twice() -> tuple[bytes, bytes]:
        async with serve(small_response) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            first_response = await reader.readuntil(b"\r\n\r\n")
            if text:
                writer.write(text.encode())
            else:
                writer.close()
                reader, writer = await asyncio.open_connection(*address)
            remaining_bytes = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return first_response, remaining_bytes

    first_response, remaining_bytes = asyncio.run(request_twice())
    assert (first_response[:12], remaining_bytes) == (b"HTTP/1.1 200", b"")


@pytest.mark.parametrize("stops", [False, True], ids=["timeout", "shutdown"])
def test_a_response_that_is_not_read_ends(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FLUSH_SECONDS" if stops else "STALL_SECONDS", 0.1)
    ended = asyncio.Event()

    async def endless_response(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        while not disconnect.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def wait_for_disconnect(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def read_nothing() -> None:
        async with serve(endless_response) as (state, address):
            _, writer = await asyncio.open_connection(*address, limit=1)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while not any(connection.flow.write_paused for connection in state.connections):
                await asyncio.sleep(0.01)
            if stops:
                for connection in [*state.connections]:
                    connection.shutdown()
            await asyncio.wait_for(ended.wait(), 20)
            assert not state.connections
            writer.close()

    asyncio.run(read_nothing())


@pytest.mark.slow
def test_a_slow_reader_gets_the_whole_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 2.0)
    body = bytes(8 << 20)

    async def large_response(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})

    def read_slowly(address: tuple[str, int]) -> int:
        num_bytes = 0
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while data := connection.recv(1 << 17):
                num_bytes += len(data)
                time.sleep(0.25)
        return num_bytes

    async def serve_and_read() -> int:
        async with serve(large_response) as (_, address):
            return await asyncio.to_thread(read_slowly, address)

    assert asyncio.run(serve_and_read()) > len(body)


def test_a_connection_is_closed_if_the_server_does_not_read_the_whole_request_body(tiny_server: RunningServer) -> None:
    requests = (
        format_head("/nothing", JSON, 99),
        format_head(GENERATIONS, "text/plain", 99) + b"{",
        format_head(GENERATIONS, JSON, 1 << 30) + b"{",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n",
    )
    with ExitStack() as stack:
        for connection in [stack.enter_context(tiny_server.connect(text)) for text in requests]:
            response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
            assert response.startswith(b"HTTP/1.1 ")
            assert b"\r\nconnection: close\r\n" in response.lower()


@pytest.mark.parametrize("length", ["0", "4", "999"])
def test_a_request_with_two_body_lengths_is_rejected_and_later_bytes_are_not_a_request(
    tiny_server: RunningServer, length: str
) -> None:
    smuggled_request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    ambiguous_request = f"POST {GENERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\n".encode()
    ambiguous_request += f"content-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    ambiguous_request += b'16\r\n{"prompt": "red cube"}\r\n0\r\n\r\n'  # 16 is hexadecimal for 22 bytes
    with tiny_server.connect(ambiguous_request + smuggled_request) as connection:
        response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    assert response.startswith(b"HTTP/1.1 400")
    assert response.count(b"HTTP/1.1 ") == 1


CHUNKED_HEAD = format_head(GENERATIONS, JSON, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")


def encode_chunks(body: bytes, chunk_size: int) -> bytes:
    """Return the body in chunked transfer encoding, with chunks of `chunk_size` bytes and the final empty chunk."""
    chunks = [body[i : i + chunk_size] for i in range(0, len(body), chunk_size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize(("chunk_size", "num_spaces"), [(1, 600), (40, 60_000)])
def test_a_body_with_600_one_byte_chunks_or_1500_larger_chunks_is_accepted(
    tiny_server: RunningServer, chunk_size: int, num_spaces: int
) -> None:
    body = b'{"prompt": "red cube"%s}' % (b" " * num_spaces)
    last_request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with tiny_server.connect(2 * (CHUNKED_HEAD + encode_chunks(body, chunk_size)) + last_request) as connection:
        response = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    assert response.count(b"HTTP/1.1 200") == 3


def test_a_body_with_1100_one_byte_chunks_is_rejected(tiny_server: RunningServer) -> None:
    with tiny_server.connect(CHUNKED_HEAD + encode_chunks(b" " * 1100, 1)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert "Traceback" not in tiny_server.log


def test_body_chunks_sent_after_the_response_close_the_connection(tiny_server: RunningServer) -> None:
    head = CHUNKED_HEAD.replace(GENERATIONS.encode(), b"/nothing")
    with tiny_server.connect(head + encode_chunks(b"{", 1)[:-5]) as connection:  # without the final empty chunk
        assert connection.recv(12) == b"HTTP/1.1 404"
        with suppress(OSError):  # the server closed the connection
            for _ in range(100):
                connection.sendall(encode_chunks(bytes(1000), 1)[:-5])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert "Traceback" not in tiny_server.log


def measure_health_checks(server: RunningServer) -> float:
    """Return the longest response time of `/livez` within a second."""
    seconds = [0.0]
    end = time.monotonic() + 1
    while (start_time := time.monotonic()) < end:
        assert server.get("/livez")[0] == 200
        seconds.append(time.monotonic() - start_time)
    return max(seconds)


def make_json_request(path: str, body: bytes) -> bytes:
    return format_head(path, JSON, len(body)) + body


UNKNOWN_FIELDS = b"{%s}" % b",".join(b'"f%d":1' % i for i in range(700_000))
FLOODS = {
    "tiny chunks": CHUNKED_HEAD + encode_chunks(bytes(200_000), 1),
    "unknown fields": make_json_request("/v1/images/codes", UNKNOWN_FIELDS),
    "unknown fields of a batch": make_json_request("/generate", UNKNOWN_FIELDS[:600_000] + b'":1}'),
    "nested lists": make_json_request("/v1/images/codes", b'{"prompt": [%s]}' % b",".join([b"[]"] * 2_000_000)),
    "long method": make_json_request("/v1/images/codes", b'{"method": "%s"}' % (b"x" * 7_000_000)),
    "API documents": b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50,
}


@pytest.mark.parametrize("name", FLOODS)
def test_health_checks_and_requests_survive_a_flood(name: str, tiny_server: RunningServer) -> None:
    stop_flood = threading.Event()

    def flood() -> None:
        while not stop_flood.is_set():
            with suppress(OSError), tiny_server.connect(FLOODS[name], "127.0.0.9") as connection:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        seconds = measure_health_checks(tiny_server)
        assert tiny_server.post({"prompt": "red cube"})[0] == 200
    finally:
        stop_flood.set()
        for thread in threads:
            thread.join()
    print(f"{name}: /livez at most {seconds:.2f} s")
    assert seconds < 2
    assert "Traceback" not in tiny_server.log


def test_a_client_that_sends_a_too_large_body_before_reading_gets_status_413(tiny_server: RunningServer) -> None:
    status, headers, _ = tiny_server.request("POST", EDITS, bytes(MAX_FORM_BYTES + 1), {"content-type": FORM})
    assert (status, headers["connection"]) == (413, "close")


def test_announced_bodies_block_no_other_request(tiny_server: RunningServer) -> None:
    large_head = format_head(EDITS, FORM, MAX_FORM_BYTES - 1)
    complete_form = format_form({"image": b"none", "prompt": b"red cube"})
    unfinished = [tiny_server.connect(large_head + b"-", f"127.0.1.{i + 1}") for i in range(40)]
    for request, status in (
        (format_head(EDITS, FORM, len(complete_form)) + complete_form, b"400"),
        (make_json_request(GENERATIONS, b'{"prompt": "red cube"}'), b"200"),
    ):
        with tiny_server.connect(request, "127.0.0.8") as connection:
            assert connection.recv(12) == b"HTTP/1.1 " + status
    assert not select.select(unfinished, [], [], 0)[0], "the server still reads the bodies"
    for connection in unfinished:
        connection.close()
