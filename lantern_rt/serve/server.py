"""Runs the application with uvicorn: models are loaded behind an open port, signals drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..asynchronous import AsyncPipeline
from ..checks import brief, short
from ..errors import RequestError
from .app import make_app
from .drawing import Drawer, LocalDrawer
from .front import Front, Limits

_LOG = logging.getLogger(__name__)
Load = Callable[[], Coroutine[Any, Any, AsyncPipeline]]


class Server:
    """One server process, in the main thread. models: load its pipelines, one after the other.

    port: 0 takes a free one. drain: seconds that stopping may take.
    Raises: RequestError: the port cannot be had.
    """

    def __init__(
        self,
        models: Sequence[Load],
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        origins: Sequence[str] = (),
        drain: float = 300.0,
    ) -> None:
        self.front = Front(limits or Limits())
        self.failure: Exception | None = None
        self._models, self._drain, self._pipelines = models, drain, list[LocalDrawer]()
        self._socket = listen(host, port)
        self.address = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            make_app(self.front, self._lifespan, origins),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = _Uvicorn(config, self)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve until a signal ends it. Raises: LanternError, or what else it was, where a model cannot be loaded."""
        self._uvicorn.run([self._socket])
        if self.failure is not None:
            raise self.failure

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            self.front.drawers = {}
            for drawer in self._pipelines:
                await drawer.close(drain=False)

    async def _load(self) -> None:
        drawers: dict[str, Drawer] = {}
        try:
            for load in self._models:
                pipeline = await load()
                drawer = LocalDrawer(pipeline)
                self._pipelines.append(drawer)
                await asyncio.get_running_loop().run_in_executor(None, pipeline.pipeline.warm_up)
                drawers[drawer.name] = drawer
        except Exception as error:  # also for want of memory: a server that loads for ever helps nobody
            self.failure = error
            self._uvicorn.should_exit = True
            return
        self.front.drawers = drawers
        _LOG.info("ready: %s", ", ".join(drawers))

    async def stop(self) -> None:
        """Take no more requests, finish those that are there, as far as there is time, then end."""
        self.front.draining = True
        _LOG.info("draining: %d requests", len(self.front.active))
        deadline = asyncio.get_running_loop().time() + self._drain
        while self.front.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self._uvicorn.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises: RequestError: the address is not this host's, or in use."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise RequestError(
            f"port: cannot listen at {short(host)}, {port} ({brief(error)}); give another one"
        ) from error


class _Uvicorn(uvicorn.Server):
    """uvicorn, but signals drain first; a second Ctrl-C ends at once."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._stopping: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._stopping is None:
            asyncio.get_running_loop().call_soon_threadsafe(self._stop)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _stop(self) -> None:
        self._stopping = self._stopping or asyncio.get_running_loop().create_task(self._server.stop())
