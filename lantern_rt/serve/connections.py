"""Limits on the number of HTTP connections, on their idle time, and on the chunks of bodies."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # timeout for the headers of a request
# Bodies in many small chunks are rejected. Parsing a chunk takes as much time as parsing thousands of bytes, and the
# server may read tens of thousands of chunks at once.
MAX_CHUNKS = 1000  # number of chunks that a body of any size may have
CHUNK_BYTES = 64  # minimum mean size of the chunks, in bodies of more chunks
_LOG = logging.getLogger(__name__)


try:
    from resource import RLIMIT_NOFILE, getrlimit

    _MAX_FILES = getrlimit(RLIMIT_NOFILE)[0]
except ImportError:  # Windows does not limit open files
    _MAX_FILES = 1 << 13
MAX_CONNECTIONS = max(8, min(4096, _MAX_FILES // 2))
BACKLOG = max(8, min(2048, _MAX_FILES // 8))  # connections accepted before the first of them can be closed


class _ChunkLimitedParser(h11.Connection):
    """HTTP parser that rejects bodies in many small chunks, because parsing many chunks takes long."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MAX_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("chunks are too small")
        return event


class LimitedConnection(H11Protocol):
    """HTTP connection of a server with a maximum number of connections.

    If there are more connections, the connection that was idle longest is closed. So health checks can still connect.
    """

    has_warned = False  # whether the log mentions the limit

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _ChunkLimitedParser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._check_header_timeout()
        if len(self.connections) > MAX_CONNECTIONS:
            if not LimitedConnection.has_warned:
                _LOG.warning("more than %d connections: closing idle connections", MAX_CONNECTIONS)
            LimitedConnection.has_warned = True
            idle = [
                connection
                for connection in self.connections
                if isinstance(connection, LimitedConnection)
                and not connection.transport.is_closing()
                and (connection._is_idle or connection.cycle.more_body)
            ]
            min(idle, key=lambda connection: connection._idle_since).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_idle and not self.conn.trailing_data[0]:
            self._idle_since = self.loop.time()  # the first bytes of a request
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the response has begun
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_header_timeout(self) -> None:
        """Close the connection if the headers of a request do not arrive in time, and repeat this check regularly.

        Uvicorn itself has a timeout only between requests.
        """
        self._timer = self.loop.call_later(HEADER_SECONDS / 4, self._check_header_timeout)
        awaits_headers = self._is_idle and (self.cycle is None or self.conn.trailing_data[0])
        if awaits_headers and self._idle_since + HEADER_SECONDS < self.loop.time():
            self.transport.abort()
