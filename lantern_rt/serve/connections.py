"""Connections: how many there may be, and how long one may be silent."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # until a request's headers are there
_LOG = logging.getLogger(__name__)


try:
    from resource import RLIMIT_NOFILE, getrlimit

    _MAX_FILES = getrlimit(RLIMIT_NOFILE)[0]
except ImportError:  # a system without such limits
    _MAX_FILES = 1 << 13
MAX_CONNECTIONS = max(8, min(4096, _MAX_FILES // 2))
BACKLOG = max(8, min(2048, _MAX_FILES // 8))  # are taken before one of them can be closed again


class Connection(H11Protocol):
    """One connection. Where there are too many, the one that was silent longest makes room: health checks get in."""

    warned = False  # that there were too many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        self._check_headers()
        if len(self.connections) > MAX_CONNECTIONS:
            if not Connection.warned:
                _LOG.warning("more than %d connections: silent ones are closed", MAX_CONNECTIONS)
            Connection.warned = True
            there = (one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing())
            silent = [one for one in there if one._idle or one.cycle.more_body]
            min(silent, key=lambda one: one._silent_since).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._idle and not self.conn.trailing_data[0]:
            self._silent_since = self.loop.time()  # headers begin
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check_headers(self) -> None:
        """Give up if they do not come; between requests, as long as nothing comes, uvicorn's own time-out counts."""
        self._timer = self.loop.call_later(HEADER_SECONDS / 4, self._check_headers)
        due = self._idle and (self.cycle is None or self.conn.trailing_data[0])
        if due and self._silent_since + HEADER_SECONDS < self.loop.time():
            self.transport.abort()
