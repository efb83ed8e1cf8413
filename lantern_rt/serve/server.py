"""Runs the application with uvicorn: models are loaded behind an open port, signals drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from ..asynchronous import AsyncPipeline
from ..errors import RequestError
from ..inputs import brief, short
from .app import make_app, read_origin
from .backend import LocalBackend
from .connections import BACKLOG, Connection
from .state import Limits, ServerState

_LOG = logging.getLogger(__name__)
SIGNALS = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # not all systems have all
FLUSH_SECONDS = 1  # that connections have to take their last bytes


class Server:
    """One server process, in the main thread.

    Args:
        models: each loads a pipeline; called one after the other.
        host: address to listen at.
        port: 0 takes a free one.
        limits: of requests; their deadline is also what a server that is stopped waits for them.
        origins: sites whose pages may ask.

    Raises:
        RequestError: the port cannot be had, or an origin is none.
    """

    def __init__(
        self,
        models: Sequence[Callable[[], Awaitable[AsyncPipeline]]],
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self.state = ServerState(limits or Limits())
        self.failure: Exception | None = None
        self._models = models
        self._backends: list[LocalBackend] = []
        origins = [read_origin(one) for one in origins]
        self._socket = listen(host, port)
        self.address = self._socket.getsockname()[:2]
        hosts: set[Any] = set()
        if ip_address(self.address[0]).is_loopback:
            hosts = {"localhost", host.lower(), *(urlsplit(origin).hostname for origin in origins)}
        self._stopping: asyncio.Task[None] | None = None
        self._skip_waiting = False
        config = uvicorn.Config(
            make_app(self.state, self._lifespan, origins, hosts),
            http=Connection,
            backlog=BACKLOG,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal ends it. Raises: LanternError, or what else it was, where a model cannot be loaded."""
        self._uvicorn.run([self._socket])
        if self.failure is not None:
            raise self.failure

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # In place of uvicorn's handlers, which close the port at once: a balancer must see `/readyz` turn first.
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(self._handle_signal, number))
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self._close()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            for load in self._models:
                pipeline = await load()
                self._backends.append(LocalBackend(pipeline))
                await loop.run_in_executor(None, pipeline.pipeline.warm_up)
        except Exception as error:  # also for want of memory: a server that loads for ever helps nobody
            self.failure = error
            self._uvicorn.should_exit = True
            return
        self.state.backends = {backend.name: backend for backend in self._backends}
        _LOG.info("ready: %s", ", ".join(self.state.backends))

    def _handle_signal(self, number: int) -> None:
        """Stop, where a second Ctrl-C does not wait for requests; SIGHUP has keys read again."""
        if signal.Signals(number).name == "SIGHUP":
            try:
                self.state.load_keys()
                _LOG.info("keys: %d", len(self.state.keys))
            except RequestError as error:
                _LOG.warning("keys are as they were: %s", error)
        elif self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        elif number == signal.SIGINT:
            self._skip_waiting = True

    async def _stop(self) -> None:
        """Take no more requests, finish those that are there, as far as there is time, and tell the others."""
        self.state.draining = True
        _LOG.info("draining: %d requests", self.state.active_requests)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.state.limits.deadline
        while self.state.active_requests and not self._skip_waiting and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await self._close()
        self._uvicorn.should_exit = True

    async def _close(self) -> None:
        for backend in self._backends:
            await backend.pipeline.close(drain=False)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises: RequestError: the address is not this host's, or in use."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        problem = f"cannot listen at {short(host)}, {port} ({brief(error)})"
        raise RequestError(problem, field="port", remedy="give another one") from error
