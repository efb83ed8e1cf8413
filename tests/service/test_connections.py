"""Test idle connections, incomplete requests and hostile request bodies: other clients are still served."""

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
MAX_FORM_BYTES = 8 << 20


@pytest.mark.slow
def test_idle_connections_beyond_the_open_file_limit_do_not_block_other_requests(
    start_server: Callable[..., RunningServer], tiny_folder: Path
) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    try:
        server = start_server(tiny_folder, "--threads", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, 4096), hard_limit))
    log_length = len(server.log)
    incomplete_requests = (b"", b"GET /livez HT", format_head(GENERATIONS, JSON, 99))
    idle_connections = [server.connect(incomplete_requests[i % 3]) for i in range(300)]
    assert server.get("/livez")[0] == server.get("/readyz")[0] == 200
    assert server.post({"prompt": "red cube"})[0] == 200
    assert idle_connections[0].recv(1) == b"", "the connection that was idle longest is closed"
    warnings = server.log[log_length:].count("closing idle connections")
    assert (warnings, server.log.count("Traceback")) == (1, 0), server.log[:3000]
    for connection in idle_connections:
        connection.close()
    assert server.stop() == 0


@pytest.mark.parametrize("text", ["", "GET /livez HTTP/1.1\r\nhost"])
def test_a_connection_without_complete_request_headers_is_closed_after_a_timeout(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        first_response = await reader.readuntil(b"\r\n\r\n")
        if text:
            writer.write(text.encode())
        else:
            writer.close()
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        remaining_bytes = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return first_response, remaining_bytes

    first_response, remaining_bytes = asyncio.run(request_twice())
    assert (first_response[:12], remaining_bytes) == (b"HTTP/1.1 200", b"")


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


def test_the_server_answers_health_checks_while_clients_send_tiny_chunks(tiny_server: RunningServer) -> None:
    request = CHUNKED_HEAD + encode_chunks(bytes(200_000), 1)
    stop_flood = threading.Event()

    def send_chunks_repeatedly() -> None:
        while not stop_flood.is_set():
            with suppress(OSError), tiny_server.connect(request) as connection:
                connection.recv(1)

    threads = [threading.Thread(target=send_chunks_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        seconds = []
        for _ in range(10):
            start_time = time.monotonic()
            assert tiny_server.get("/livez")[0] == 200
            seconds.append(time.monotonic() - start_time)
    finally:
        stop_flood.set()
        for thread in threads:
            thread.join()
    print(f"/livez: at most {max(seconds):.2f} s")


def test_a_client_that_sends_a_too_large_body_before_reading_gets_status_413(tiny_server: RunningServer) -> None:
    status, headers, _ = tiny_server.request("POST", EDITS, bytes(MAX_FORM_BYTES + 1), {"content-type": FORM})
    assert (status, headers["connection"]) == (413, "close")


def test_large_bodies_from_one_address_do_not_block_small_requests_or_other_addresses(
    tiny_server: RunningServer,
) -> None:
    large_head = format_head(EDITS, FORM, MAX_FORM_BYTES - 1)
    complete_form = format_form({"image": b"none", "prompt": b"red cube"})
    unfinished = [tiny_server.connect(large_head, "127.0.0.7") for _ in range(9)]
    rejected, _, _ = select.select(unfinished, [], [], 15)
    (response,) = [connection.recv(1 << 16) for connection in rejected]
    assert (response[:12], b"retry-after: 5" in response) == (b"HTTP/1.1 429", True)
    with tiny_server.connect(
        format_head(EDITS, FORM, len(complete_form)) + complete_form, "127.0.0.8"
    ) as other_connection:
        assert other_connection.recv(12) == b"HTTP/1.1 400"
    with tiny_server.connect(
        format_head(GENERATIONS, JSON, 22) + b'{"prompt": "red cube"}', "127.0.0.7"
    ) as json_connection:
        assert json_connection.recv(12) == b"HTTP/1.1 200"
    for connection in unfinished:
        connection.close()
