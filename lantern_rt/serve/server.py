"""Server process, which runs uvicorn. The port is open while models load; requests are finished before a stop."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from ..asynchronous import AsyncPipeline
from ..errors import RequestError
from ..inputs import format_error, format_value
from .app import make_app, normalize_origin
from .backend import LocalBackend
from .connections import BACKLOG, FLUSH_SECONDS, LimitedConnection
from .state import ServerLimits, ServerState

_LOG = logging.getLogger(__name__)
HANGUP = [item for item in signal.Signals if item.name == "SIGHUP"]  # Windows lacks SIGHUP


class Server:
    """Server that runs in the main thread of its process.

    Args:
        model_loaders: function that loads the pipeline of a model, by the name of the model; called in sequence.
        port: port to listen on; 0: a free port.
        server_limits: limits of requests. When the server stops, running requests have `deadline` seconds to finish.
    """

    def __init__(
        self,
        model_loaders: Mapping[str, Callable[[], Awaitable[AsyncPipeline]]],
        host: str = "127.0.0.1",
        port: int = 8000,
        server_limits: ServerLimits | None = None,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self.state = ServerState(server_limits or ServerLimits())
        self.failure: Exception | None = None
        self._model_loaders = model_loaders
        self._backends: list[LocalBackend] = []
        allowed_origins = [normalize_origin(origin) for origin in allowed_origins]
        self._socket = open_listening_socket(host, port)
        self.address = self._socket.getsockname()[:2]
        allowed_hosts: set[str] = set()
        if ip_address(self.address[0]).is_loopback:
            names = ["localhost", host.lower(), *(urlsplit(origin).hostname for origin in allowed_origins)]
            allowed_hosts = {name.removesuffix(".") for name in names if name}
        self._stopping: asyncio.Task[None] | None = None
        self._skip_waiting = False
        config = uvicorn.Config(
            make_app(self.state, self._lifespan, allowed_origins, allowed_hosts),
            http=LimitedConnection,
            backlog=BACKLOG,
            ws="none",
            loop="asyncio",
            workers=1,  # else uvicorn reads WEB_CONCURRENCY, which may be no number
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(FLUSH_SECONDS) + 2,  # until then, connections close themselves
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serve requests until a signal stops the server, or raise the error of a model that cannot be loaded."""
        _LOG.info("open %s for a page; images at /v1/images/generations; Ctrl-C stops", self.url)
        if not self.state.keys and not ip_address(self.address[0]).is_loopback:
            _LOG.warning("everyone who reaches this address may generate images: --api-key-file sets keys")
        self._uvicorn.run([self._socket])
        if self.failure is not None:
            raise self.failure

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # Uvicorn's handlers would close the port at once, before a load balancer sees the new status of `/readyz`.
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM, *HANGUP):
            signal.signal(
                signal_number,
                lambda signal_number, frame: loop.call_soon_threadsafe(self._handle_signal, signal_number),
            )
        if HANGUP:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANGUP)  # the program has blocked it since its start
        loading = asyncio.create_task(self._load_models())
        try:
            yield
        finally:
            for signal_number in HANGUP:
                signal.signal(signal_number, signal.SIG_IGN)  # until the process has ended
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self._close_backends()

    async def _load_models(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            for name, load in self._model_loaders.items():
                pipeline = await load()
                self._backends.append(LocalBackend(pipeline, name))
                await loop.run_in_executor(None, pipeline.pipeline.warm_up)
        except Exception as error:  # including MemoryError: without its models the server is useless
            self.failure = error
            self._uvicorn.should_exit = True
            return
        self.state.backends = {backend.name: backend for backend in self._backends}
        _LOG.info("ready: %s", ", ".join(self.state.backends), extra={"facts": self.state.version_info})

    def _handle_signal(self, signal_number: int) -> None:
        """Stop the server, or reload the API keys on SIGHUP. A second Ctrl-C stops without waiting for requests."""
        if signal_number in HANGUP:
            self._reload_api_keys()
        elif self._stopping is None:
            self._stopping = asyncio.create_task(self._drain_and_stop())
        elif signal_number == signal.SIGINT:
            self._skip_waiting = True

    def _reload_api_keys(self) -> None:
        if self.state.server_limits.api_key_file is None:
            _LOG.warning("no keys to reload: the server has no --api-key-file")
            return
        try:
            self.state.load_api_keys()
            _LOG.info("keys reloaded: %d", len(self.state.keys))
        except RequestError as error:
            _LOG.warning("keys were not reloaded: %s", error)

    async def _drain_and_stop(self) -> None:
        self.state.draining = True
        _LOG.info("draining: %d requests", self.state.active_requests)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.state.server_limits.deadline
        while self.state.active_requests and not self._skip_waiting and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await self._close_backends()
        self._uvicorn.should_exit = True

    async def _close_backends(self) -> None:
        for backend in self._backends:
            await backend.pipeline.close(drain=False)


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket, or raise RequestError; port 0 is a free port."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        problem = f"cannot listen on {format_value(host)}, port {port} ({format_error(error)})"
        raise RequestError(problem, field="port", remedy="give another port or --host") from error
