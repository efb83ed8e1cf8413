"""Server with several replicas on Ray Serve: `serve run lantern_rt.serve.ray:app`.

The ingress is the web application of `lantern-rt serve`, and forwards requests to replicas, which are processes with a
pipeline. An image depends only on bundle, seed and settings, so another replica can repeat the request of a dead one.
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
from .backend import ADMITTED, BackendLoad, ImageBackend, LocalBackend
from .log import LogFormatter
from .protocol import Completion, Event, GenerationRequest
from .state import ServerLimits, ServerState

_LOG = logging.getLogger(__name__)
MAX_REPLICAS_LOST = 5  # per request, so that a request that kills its replicas ends
RETRY_SECONDS = 1.0  # pause before a request that lost its replica is sent again, while all other replicas are full
GRACE_SECONDS = 5.0  # time after a request's deadline until its replica gives up; the ingress enforces the deadline


class DeploymentSettings(BaseModel):
    """Arguments of `app` in Ray's configuration file; docs/scale-out.md describes them."""

    model_config = ConfigDict(extra="forbid")

    bundles: dict[str, dict[str, Any]] | list[str] | str = "scenes"
    names: list[str] = []
    threads: int | None = Field(default=None, ge=1)
    pipeline: dict[str, Any] = {}
    max_images_per_pass: int = Field(default=8, ge=1)
    max_queued_images: int = Field(default=8, ge=0)
    max_queued_requests: int = Field(default=64, ge=0)
    autoscaling: dict[str, Any] = {}
    deadline: float = Field(default=600.0, gt=0, lt=1e9)
    api_key_file: Path | None = None
    methods: list[str] = []
    max_n: int = Field(default=10, ge=1, le=10)
    aliases: dict[str, str] = {}
    mapped_sizes: dict[str, str] = {}
    cors: list[str] = []


def app(settings: DeploymentSettings) -> serve.Application:
    """Create the application for `serve run lantern_rt.serve.ray:app` and configuration files."""
    bundles = {settings.bundles: {}} if isinstance(settings.bundles, str) else settings.bundles
    names = [Path(bundle).name for bundle in bundles]
    if not names or len({*names, "ingress"}) <= len(names):
        actual = ", ".join(names) or "none"
        expected = "bundles with different names, none named ingress"
        raise RequestError(field="bundles", found=actual, expected=expected)
    models = settings.names or [""] * len(names)
    if len(models) != len(names):
        raise RequestError(field="names", found=", ".join(models), expected="a name for each bundle")
    scaling = {"max_replicas": 4, "target_ongoing_requests": settings.max_images_per_pass, **settings.autoscaling}
    replica = serve.deployment(
        max_ongoing_requests=settings.max_images_per_pass + settings.max_queued_images,
        max_queued_requests=settings.max_queued_requests,
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
    defaults = {"threads": settings.threads, **settings.pipeline}
    replicas = []
    for name, model, bundle in zip(names, models, bundles, strict=True):
        options = defaults | (bundles[bundle] if isinstance(bundles, dict) else {})
        arguments = (bundle, settings.max_images_per_pass, settings.max_queued_images, options, model)
        replicas.append(replica.options(name=name).bind(*arguments))
    return ingress.bind(settings, replicas)


class Replica:
    def __init__(
        self,
        bundle: str,
        max_images_per_pass: int,
        max_queued_images: int,
        pipeline_options: dict[str, Any],
        model_name: str = "",
    ) -> None:
        pipeline = Pipeline.from_bundle(bundle, **pipeline_options)
        pipeline.warm_up()
        self._backend = LocalBackend(AsyncPipeline(pipeline, max_images_per_pass, max_queued_images), model_name)

    def describe(self) -> tuple[str, dict[str, Any]]:
        return self._backend.name, self._backend.describe()

    async def generate(
        self, request: GenerationRequest, caller: str = ""
    ) -> AsyncGenerator[Event | Completion | LanternError, None]:
        """Yield the events and the finished images of a request.

        A `LanternError` is not raised but yielded as the last item, because Ray would wrap a raised error.
        """
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
        """Raise `EngineError` if the replica has failed. Ray calls this method, and replaces a failed replica."""
        if not self._backend.pipeline.service.is_open:
            raise EngineError("stopped", field="service", expected="a running service", remedy="see the log")


class Ingress:
    """Web application of `lantern-rt serve` that forwards requests to replicas."""

    def __init__(self, settings: DeploymentSettings, replicas: Sequence[DeploymentHandle[Replica]]) -> None:
        names = {"deadline", "api_key_file", "methods", "max_n", "aliases", "mapped_sizes"}
        limits = settings.model_dump(include=names)
        self._state = ServerState(ServerLimits(**limits))
        self._replicas = replicas
        self._settings = settings
        log = logging.getLogger(__package__)
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormatter())
        log.addHandler(handler)
        log.setLevel(logging.INFO)

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_app(self._state, self._lifespan, self._settings.cors)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Create the backends. Ray sends no requests before."""
        backends: dict[str, ImageBackend] = {}
        for replicas in self._replicas:
            name, description = await replicas.describe.remote()
            if name in backends:
                raise RequestError(field="bundles", found=f"two models named {name}", expected="different names")
            backends[name] = RayBackend(name, description, replicas)
        self._state.backends = backends
        yield


class RayBackend:
    def __init__(self, name: str, description: dict[str, Any], replicas: DeploymentHandle[Replica]) -> None:
        self.name = name
        self.is_alive = True  # Ray replaces dead replicas
        self._description = description
        self._replicas = replicas.options(stream=True)
        self._running = 0
        self._waiting = 0
        self._duration = 1.0  # duration of the last request after a replica admitted it

    def describe(self) -> dict[str, Any]:
        return self._description

    def measure_load(self) -> BackendLoad:
        return BackendLoad(self._running, self._waiting)

    async def generate(self, request: GenerationRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        """Generate the images of a request. If a replica dies, another one repeats its events and images."""
        began = time.perf_counter()
        queue_seconds: float | None = None  # time until a replica admitted the request
        replicas_lost = 0
        self._waiting += 1
        try:
            while True:
                remaining = (request.deadline or math.inf) - (time.perf_counter() - began)
                timed_request = request.model_copy(update={"deadline": remaining})
                response: Any = self._replicas.generate.remote(timed_request, caller)  # Ray's type lacks methods
                try:
                    async for update in response:
                        match update:
                            case LanternError():
                                raise update
                            case Completion():
                                assert queue_seconds is not None
                                seconds = time.perf_counter() - began
                                self._duration = seconds - queue_seconds
                                stats = update.generation_stats
                                queue_seconds += stats.queue_seconds
                                stats = replace(stats, seconds=seconds, queue_seconds=queue_seconds)
                                yield replace(update, generation_stats=stats)
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
                        raise self._make_busy_error(error) from error
                    await asyncio.sleep(RETRY_SECONDS)  # its replica died, so the request waits for another
                except RayError as error:  # the replica died; its errors were yielded
                    replicas_lost += 1
                    if isinstance(error, RayTaskError) or replicas_lost == MAX_REPLICAS_LOST:
                        raise
                    _LOG.warning("%s: lost a replica (%s); another one starts again", self.name, type(error).__name__)
                except (GeneratorExit, asyncio.CancelledError):
                    response.cancel()
                    raise
        finally:
            if queue_seconds is None:
                self._waiting -= 1
            else:
                self._running -= 1

    def _make_busy_error(self, error: BackPressureError | BusyError) -> BusyError:
        retry_seconds = (
            error.retry_seconds if isinstance(error, BusyError) else math.ceil(self._duration * random.uniform(1, 3))
        )
        return BusyError("all replicas are full", retry_seconds)
