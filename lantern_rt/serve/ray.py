"""Many replicas behind one address, on Ray Serve: `serve run lantern_rt.serve.ray:app`.

A replica holds a pipeline. The ingress is the application of `lantern-rt serve`; its requests go to replicas. An image
depends on bundle, seed and settings alone, so a request whose replica dies is drawn again by another one.
"""

# Without `from __future__ import annotations`: Ray reads the annotation of `app`'s argument.
import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from ..asynchronous import AsyncPipeline
from ..errors import BusyError, EngineError, LanternError, RequestError
from ..pipeline import Pipeline
from .app import make_app
from .backend import ADMITTED, ImageBackend, Load, LocalBackend
from .protocol import Completion, Event, ImagesRequest
from .state import Limits, ServerState

_LOG = logging.getLogger(__name__)
MAX_REPLICAS_LOST = 5  # by one request: one that kills them all must not go on for ever
RETRY_SECONDS = 1.0  # after which a request whose replica died asks again where there is no room
GRACE_SECONDS = 5.0  # seconds that a replica goes on after a request's deadline, which is the ingress' to keep


class Settings(BaseModel):
    """What `app` takes. Everything else is Ray's own: `deployments` of its configuration file.

    Args:
        bundles: folders, or names of embedded ones; one deployment each, of the folder's name; a mapping gives options
            of its own to each.
        threads: of a replica, and processors that Ray reserves for it; left out, a node has one replica of a bundle,
            which takes every core.
        pipeline: what `Pipeline.from_bundle` takes besides.
        together: images of a replica that share passes.
        waiting: images that may wait there.
        queued: requests that may wait at an ingress until a replica has room.
        autoscaling: of each bundle, fields of Ray's `AutoscalingConfig`.
        deadline: seconds of a request, and those that a replica has to end in.
        api_key_file, methods, max_n, aliases: as for `lantern-rt serve`; an alias is a key, its model the value.
        cors: sites whose pages may ask.
    """

    model_config = ConfigDict(extra="forbid")

    bundles: dict[str, dict[str, Any]] | list[str] | str = "scenes"
    threads: int | None = Field(default=None, ge=1)
    pipeline: dict[str, Any] = {}
    together: int = Field(default=8, ge=1)
    waiting: int = Field(default=8, ge=0)
    queued: int = Field(default=64, ge=0)
    autoscaling: dict[str, Any] = {}
    deadline: float = Field(default=600.0, gt=0, lt=1e9)
    api_key_file: Path | None = None
    methods: list[str] = []
    max_n: int = Field(default=10, ge=1, le=10)
    aliases: dict[str, str] = {}
    cors: list[str] = []


def app(settings: Settings) -> serve.Application:
    """The application for `serve run lantern_rt.serve.ray:app` and configuration files.

    Raises:
        RequestError: bundles that cannot have deployments of their own.
    """
    bundles = {settings.bundles: {}} if isinstance(settings.bundles, str) else settings.bundles
    names = [Path(bundle).name for bundle in bundles]
    if not names or len({*names, "ingress"}) <= len(names):
        found = ", ".join(names) or "none"
        expected = "one or more, each of another name, none named ingress"
        raise RequestError(field="bundles", found=found, expected=expected)
    scaling = {"max_replicas": 4, "target_ongoing_requests": settings.together, **settings.autoscaling}
    replica = serve.deployment(
        max_ongoing_requests=settings.together + settings.waiting,
        max_queued_requests=settings.queued,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": settings.threads or 1},
        max_replicas_per_node=1 if settings.threads is None else 100,
        graceful_shutdown_timeout_s=settings.deadline + GRACE_SECONDS,
    )(Replica)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.deadline + GRACE_SECONDS,
    )(serve.ingress()(Ingress))
    usual = {"threads": settings.threads, **settings.pipeline}
    replicas = []
    for name, bundle in zip(names, bundles, strict=True):
        options = usual | (bundles[bundle] if isinstance(bundles, dict) else {})
        replicas.append(replica.options(name=name).bind(bundle, settings.together, settings.waiting, options))
    return ingress.bind(settings, replicas)


class Replica:
    """A bundle's pipeline in a process of its own."""

    def __init__(self, bundle: str, together: int, waiting: int, options: dict[str, Any]) -> None:
        pipeline = Pipeline.from_bundle(bundle, **options)
        pipeline.warm_up()
        self._backend = LocalBackend(AsyncPipeline(pipeline, together, waiting))

    def describe(self) -> tuple[str, dict[str, Any]]:
        return self._backend.name, self._backend.describe()

    async def generate(
        self, request: ImagesRequest, caller: str = ""
    ) -> AsyncGenerator[Event | Completion | LanternError, None]:
        """Draw a request; an error of the user's is the last thing that comes, so that it arrives as what it is."""
        assert request.deadline is not None
        try:
            async with (
                asyncio.timeout(request.deadline + GRACE_SECONDS),
                aclosing(self._backend.generate(request, caller)) as updates,
            ):
                async for update in updates:
                    yield update
        except LanternError as error:
            yield error

    def check_health(self) -> None:
        """Raises: EngineError: the replica is to be replaced."""
        if not self._backend.pipeline.service.open:
            raise EngineError("it ended", field="service", expected="it to run", remedy="see the log")


class Ingress:
    """The application of `lantern-rt serve`, whose requests go to replicas."""

    def __init__(self, settings: Settings, replicas: Sequence[DeploymentHandle[Replica]]) -> None:
        own = settings.model_dump(include={"deadline", "api_key_file", "methods", "max_n", "aliases"})
        self._state = ServerState(Limits(**own))
        self._replicas = replicas
        self._settings = settings
        log = logging.getLogger(__package__)  # a line of JSON for each request
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_app(self._state, self._lifespan, self._settings.cors)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Ray sends requests to an ingress once every bundle has a replica that can tell what it draws."""
        backends: dict[str, ImageBackend] = {}
        for replicas in self._replicas:
            name, description = await replicas.describe.remote()
            if name in backends:
                raise RequestError(field="bundles", found=f"two models named {name}", expected="another name each")
            backends[name] = RayBackend(name, description, replicas)
        self._state.backends = backends
        yield


class RayBackend:
    """Draws with replicas of one bundle."""

    def __init__(self, name: str, description: dict[str, Any], replicas: DeploymentHandle[Replica]) -> None:
        self.name = name
        self.alive = True  # Ray replaces replicas that are not
        self._description = description
        self._replicas = replicas.options(stream=True)
        self._running = 0
        self._waiting = 0
        self._seconds = 1.0  # that the last request took once a replica had accepted it

    def describe(self) -> dict[str, Any]:
        return self._description

    def load(self) -> Load:
        return Load(self._running, self._waiting)

    async def generate(self, request: ImagesRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        """Draw a request, and once more from its beginning by another replica whenever one dies.

        The seed makes it the same image; events come again.

        Raises:
            BusyError: no replica has room.
        """
        began = time.perf_counter()
        queue_seconds: float | None = None  # seconds until a replica accepted it
        replicas_lost = 0
        self._waiting += 1
        try:
            while True:
                left = (request.deadline or math.inf) - (time.perf_counter() - began)
                own = request.model_copy(update={"deadline": left})
                response: Any = self._replicas.generate.remote(own, caller)  # Ray's own type has no types
                try:
                    async for update in response:
                        if isinstance(update, LanternError):
                            raise update
                        if isinstance(update, Completion):
                            assert queue_seconds is not None
                            seconds = time.perf_counter() - began
                            self._seconds = seconds - queue_seconds
                            figures = replace(
                                update.figures,
                                seconds=seconds,
                                queue_seconds=update.figures.queue_seconds + queue_seconds,
                            )
                            yield replace(update, figures=figures)
                            return
                        if update != ADMITTED:
                            yield update
                        elif queue_seconds is None:
                            queue_seconds = time.perf_counter() - began
                            self._waiting -= 1
                            self._running += 1
                            yield update
                except (BackPressureError, BusyError) as error:
                    if queue_seconds is None or not replicas_lost:
                        raise self._busy_error(error) from error
                    await asyncio.sleep(RETRY_SECONDS)  # it had a place, which died
                except RayError as error:  # not an error of the replica, but its end
                    replicas_lost += 1
                    if isinstance(error, RayTaskError) or replicas_lost == MAX_REPLICAS_LOST:
                        raise
                    _LOG.warning("%s: lost a replica (%s); another one begins anew", self.name, type(error).__name__)
                except (GeneratorExit, asyncio.CancelledError):
                    response.cancel()
                    raise
        finally:
            if queue_seconds is None:
                self._waiting -= 1
            else:
                self._running -= 1

    def _busy_error(self, error: BackPressureError | BusyError) -> BusyError:
        seconds = error.seconds if isinstance(error, BusyError) else math.ceil(self._seconds * random.uniform(1, 3))
        return BusyError("no replica has room", seconds)
