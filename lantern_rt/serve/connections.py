"""Limits on the number of HTTP connections, on the time without progress, and on the chunks of bodies."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

STALL_SECONDS = 20.0  # time in which the headers of a request must arrive, and the client must read some of a response
FLUSH_SECONDS = 1.0  # time in which clients must read their responses when the server stops
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
MAX_CONNECTIONS = max(8, min(4096, _MAX_FILES // 3))  # a response may be an open file
BACKLOG = max(8, min(2048, _MAX_FILES // 8))  # connections accepted before the first of them can be closed


class _ChunkLimitedParser(h11.Connection):
    def next_event(self) -> Any:
        event = super().next_event()
        match event:
            case h11.Request():
                self._chunks = 0
                self._bytes = 0
            case h11.Data():
                self._chunks += event.chunk_start
                self._bytes += len(event.data)
                if self._chunks > MAX_CHUNKS + self._bytes // CHUNK_BYTES:
                    raise h11.RemoteProtocolError("chunks are too small")
        return event


class LimitedConnection(H11Protocol):
    """HTTP connection that is closed if its client neither sends a request nor reads the response.

    If there are too many connections, the one without progress for longest is closed, but none for which an image is
    being generated. So health checks can still connect.
    """

    has_warned = False  # whether the log mentions the limit

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _ChunkLimitedParser(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Otherwise the kernel holds megabytes for a slow reader, who then seems to make no progress for a minute.
        with suppress(AttributeError, OSError):  # not on every system
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1 << 16)
        self._waiting_since = self.loop.time()
        self._unsent_bytes = 0
        self._close_if_stalled()
        if len(self.connections) > MAX_CONNECTIONS:
            if not LimitedConnection.has_warned:
                _LOG.warning("more than %d connections: closing idle connections", MAX_CONNECTIONS)
            LimitedConnection.has_warned = True
            others = [
                connection
                for connection in self.connections - {self}
                if isinstance(connection, LimitedConnection) and connection._may_be_closed()
            ]
            min(others, key=lambda connection: connection._waiting_since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_idle and not self.conn.trailing_data[0]:
            self._waiting_since = self.loop.time()  # the first bytes of a request
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the response has begun
            self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        # Without this, uvicorn would cancel the tasks of slow readers, and log a traceback for each.
        self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _may_be_closed(self) -> bool:
        """Return whether no image is being generated for the client, or the client must first read something."""
        self._update_waiting_time()
        if self._unsent_bytes or self.transport.is_closing():
            return self._unsent_bytes > 0
        return self._is_idle or self.cycle.more_body or self.scope["method"] != "POST"

    def _update_waiting_time(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        has_read = unsent_bytes < self._unsent_bytes
        has_more_to_read = unsent_bytes > 0 and self._unsent_bytes == 0
        if has_read or has_more_to_read:
            self._waiting_since = self.loop.time()
        self._unsent_bytes = unsent_bytes

    def _close_if_stalled(self) -> None:
        self._timer = self.loop.call_later(STALL_SECONDS / 4, self._close_if_stalled)
        self._update_waiting_time()
        awaits_headers = self._is_idle and (self.cycle is None or self.conn.trailing_data[0])
        if (awaits_headers or self._unsent_bytes) and self._waiting_since + STALL_SECONDS < self.loop.time():
            self.transport.abort()
