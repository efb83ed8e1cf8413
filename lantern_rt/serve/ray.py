"""Many replicas behind one address, on Ray Serve: `serve run lantern_rt.serve.ray:app`.

A replica holds a pipeline. The ingress is the application of `lantern-rt serve`; its orders go to replicas. An image
depends on bundle, seed and settings alone, so an order whose replica dies goes on at another one, from its codes.
"""

# Without `from __future__ import annotations`: Ray reads the annotation of `app`'s argument.
import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from ..asynchronous import AsyncPipeline
from ..engines.ort.providers import DEFAULT_PROVIDER
from ..errors import BusyError, EngineError, LanternError, RequestError
from ..pipeline import Pipeline
from .app import make_app
from .drawing import Drawer, Load, LocalDrawer, Order, Update
from .front import Front, Limits, read_keys

_LOG = logging.getLogger(__name__)
LIVES = 5  # replicas that an order is given to: one that kills them all must not go on for ever
AGAIN = 1.0  # seconds after which an order whose replica died asks again where there is no room
GRACE = 5.0  # seconds that a replica goes on after an order's deadline, which is the ingress' to keep


class Settings(BaseModel):
    """What `app` takes. Everything else is Ray's own: `deployments` of its configuration file.

    bundles: folders, or names of embedded ones; one deployment each, of the folder's name; a mapping gives options of
    its own to each. pipeline: what `Pipeline.from_bundle` takes besides. threads: of a replica, and processors that Ray
    reserves for it; left out, a node has one replica of a bundle, which takes every core. together: images of a replica
    that share passes. waiting: images that may wait there. queued: requests that may wait at an ingress until a replica
    has room. autoscaling: of each bundle, fields of Ray's `AutoscalingConfig`. deadline: seconds of a request, and
    those that a replica has to end in.
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
    log_prompts: bool = False
    cors: list[str] = []


def app(settings: Settings) -> serve.Application:
    """The application for `serve run lantern_rt.serve.ray:app` and configuration files."""
    bundles = {settings.bundles: {}} if isinstance(settings.bundles, str) else settings.bundles
    names = [Path(bundle).name for bundle in bundles]
    if not names or len({*names, "ingress"}) <= len(names):
        found = ", ".join(names) or "none"
        raise RequestError(f"bundles: found {found}, expected one or more, each of another name, none named ingress")
    scaling = {"max_replicas": 4, "target_ongoing_requests": settings.together, **settings.autoscaling}
    replica = serve.deployment(
        max_ongoing_requests=settings.together + settings.waiting,
        max_queued_requests=settings.queued,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": settings.threads or 1},
        max_replicas_per_node=1 if settings.threads is None else 100,
        graceful_shutdown_timeout_s=settings.deadline + GRACE,
    )(Replica)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.deadline + GRACE,
    )(serve.ingress()(Ingress))
    # Of all replicas alike, whatever their hosts were tuned to: an image may go on in another one.
    usual = {"threads": settings.threads, "picture_threads": 1, "provider": DEFAULT_PROVIDER, **settings.pipeline}
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
        self._drawer = LocalDrawer(AsyncPipeline(pipeline, together, waiting))

    def about(self) -> tuple[str, str, dict[str, Any]]:
        """The model's name, the size of its pictures, and what clients are told."""
        return self._drawer.name, self._drawer.size, self._drawer.describe()

    async def draw(self, order: Order) -> AsyncGenerator[Update | LanternError, None]:
        """Draw an order; an error of the user's is the last of its updates, so that it arrives as what it is."""
        deadline = None if order.deadline is None else order.deadline + GRACE
        try:
            async with asyncio.timeout(deadline), aclosing(self._drawer.draw(order)) as updates:
                async for update in updates:
                    yield update
        except LanternError as error:
            yield error

    def check_health(self) -> None:
        """Raises: EngineError: the replica is to be replaced."""
        if not self._drawer.pipeline.service.open:
            raise EngineError("service: found it ended, expected it to run; see the log")


class Ingress:
    """The application of `lantern-rt serve`, whose orders go to replicas."""

    def __init__(self, settings: Settings, replicas: Sequence[DeploymentHandle[Replica]]) -> None:
        keys = [] if settings.api_key_file is None else read_keys(settings.api_key_file)
        self._front = Front(Limits(deadline=settings.deadline, keys=keys, log_prompts=settings.log_prompts))
        self._replicas, self._settings = replicas, settings
        log = logging.getLogger(__package__)  # a line of JSON for each request
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)

    def __serve_build_asgi_app__(self) -> Starlette:
        return make_app(self._front, self._lifespan, self._settings.cors)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Ray sends requests to an ingress once every bundle has a replica that can tell what it draws."""
        drawers: dict[str, Drawer] = {}
        for replicas in self._replicas:
            name, size, description = await replicas.about.remote()
            drawers[name] = RayDrawer(name, size, description, replicas)
        if len(drawers) < len(self._replicas):
            raise RequestError(f"bundles: found {len(self._replicas)}, expected each to have a model of another name")
        self._front.drawers = drawers
        yield


class RayDrawer:
    """Draws with replicas of one bundle."""

    def __init__(self, name: str, size: str, description: dict[str, Any], replicas: DeploymentHandle[Replica]) -> None:
        self.name, self.size, self._description = name, size, description
        self._replicas = replicas.options(stream=True)
        self._journals: set[Journal] = set()
        self._seconds = 1.0  # that the last order took once it was begun

    def describe(self) -> dict[str, Any]:
        """What clients are told of the model."""
        return self._description

    def load(self) -> Load:
        """What this ingress has given to replicas, and what waits here for one."""
        taken = [journal.waited is not None for journal in self._journals]
        return Load(sum(taken), len(taken) - sum(taken), 0)

    async def draw(self, order: Order) -> AsyncGenerator[Update, None]:
        """Draw an order, on another replica whenever one dies. Raises: BusyError: none has room."""
        journal, lives = Journal(order), LIVES
        self._journals.add(journal)
        try:
            while True:
                response: Any = self._replicas.draw.remote(journal.order())  # Ray's own type has no types
                try:
                    async for update in response:
                        if isinstance(update, LanternError):
                            raise update
                        if (news := journal.news(update)) is not None:
                            yield news
                    self._seconds = journal.seconds - (journal.waited or 0.0)
                    return
                except (BackPressureError, BusyError) as error:
                    if journal.waited is None:
                        raise self._busy(error) from error
                    await asyncio.sleep(AGAIN)  # it had a place, which died
                except RayError as error:  # not an error of the replica, but its end
                    lives -= 1
                    if journal.ended:
                        return
                    if isinstance(error, RayTaskError) or not lives:
                        raise
                    _LOG.warning("%s: lost a replica (%s); another one goes on", self.name, type(error).__name__)
                except (GeneratorExit, asyncio.CancelledError):
                    response.cancel()
                    raise
        finally:
            self._journals.discard(journal)

    def _busy(self, error: BackPressureError | BusyError) -> BusyError:
        seconds = error.seconds if isinstance(error, BusyError) else math.ceil(self._seconds)
        return BusyError(f"no replica has room; try again in about {seconds} s", seconds)


@dataclass(eq=False)
class Journal:
    """What an order's client was told, and what has the order go on elsewhere.

    known: codes of each image. method: the one that `auto` chose. done, partial: of the last update of their kind.
    waited: seconds until a replica took it, None until then. ended: whether the client has had all.
    """

    asked: Order
    known: list[list[int]] = field(default_factory=list)
    method: str | None = None
    done: int = 0
    partial: int = -1
    waited: float | None = None
    ended: bool = False
    _fresh: list[list[int]] = field(default_factory=list)  # codes that the present replica told
    _began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self._began

    def order(self) -> Order:
        """The order as the next replica takes it."""
        options, self._fresh = self.asked.options, []
        if self.method is not None and options.get("method", "auto").startswith("auto"):
            options = {**options, "method": self.method, "quality": None}
        return replace(self.asked, options=options, codes=True, known=self.known)

    def news(self, update: Update) -> Update | None:
        """What the client has not had of an update; None if it has had all of it."""
        self.method = update.method or self.method
        if update.codes:
            before = self._fresh or [[] for _ in update.codes]
            self._fresh = [[*old, *new] for old, new in zip(before, update.codes, strict=True)]
            self.known = max(self.known, self._fresh, key=lambda codes: sum(map(len, codes)))
        if update.summary is not None:
            self.ended, waited = True, update.summary.waited + (self.waited or 0.0)
            return replace(update, summary=replace(update.summary, waited=waited, seconds=self.seconds))
        if update.partial is not None:
            again, self.partial = update.partial <= self.partial, max(update.partial, self.partial)
            return None if again else update
        if update.total:
            new, self.done = update.done - self.done, max(update.done, self.done)
            return replace(update, kinds=update.kinds[-new:], codes=[]) if new > 0 and update.kinds else None
        again, self.waited = self.waited is not None, self.waited or self.seconds
        return None if again else update
