"""Requests of many callers, drawn together: one thread runs the decoder, requests come and go between its passes.

An image is bit for bit what `Pipeline` gives alone. What draws requests of method `auto` follows the load: there is a
race for every number of images that share passes, among settings that draw the same pictures.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from .auto.memory import images_together
from .auto.race import Race
from .auto.store import TuningKey
from .errors import BusyError, LanternError, RequestError
from .inputs import whole
from .methods import Ar, Auto, Eagle, Options
from .pipeline import Pipeline
from .requests import Request, Settings, resolve_settings
from .results import Progress, StreamStep
from .runtime import state
from .runtime.decode import Step
from .runtime.grid import Raster
from .runtime.scheduler import RequestStep, Scheduler
from .runtime.statistics import Clock, summarise

_LOG = logging.getLogger(__name__)
MOST_NODES = 65  # of a request in a pass: all that share it are padded to the widest
MOST_FAILURES = 3  # passes that failed one after the other
_RETURNING = 60.0  # seconds over which refused requests are spread
_NEWEST = 0.2  # weight of the last image in the mean time that one takes

Listener = Callable[[StreamStep | BaseException], None]


class Ticket:
    """One request in a service. All of it belongs to the service's thread but `request` and `cancel`.

    Attributes:
        waited: seconds before its first pass began, None until then.
        places: images that count for the room there is, none once it has ended or was cancelled.
    """

    def __init__(self, service: Service, request: Request, listener: Listener, steps: bool) -> None:
        self._service = service
        self.request = request
        self.listener = listener
        self.steps = steps
        self.came = time.perf_counter()
        self.waited: float | None = None
        self.places = 0
        self.automatic = isinstance(request.settings.method, Auto)  # drawn by what suits the load
        self.choice: str | None = None  # what `auto` chose, in words
        self.samples: list[state.Request] = []
        self.raster = service.raster(request.settings)
        self.progress = Progress(len(request.images), self.raster.codes)
        self.clocks = Clock(), Clock()  # as they stood when it began
        self.ended = False

    def cancel(self) -> None:
        """Have the service forget the request within a pass, after which its listener hears nothing more.

        Its places are free at once.
        """
        self._service.forget(self)


class Service:
    """Draws requests of many threads with one pipeline, which stays the caller's to close.

    Args:
        pipeline: that draws.
        together: images that share passes at most, by default as many as the pipeline decodes together.
        waiting: images that may wait for them.

    Attributes:
        seconds_per_image: between one image and the next, lately; 0 before the first.
    """

    def __init__(self, pipeline: Pipeline, together: int | None = None, waiting: int = 256) -> None:
        self.pipeline = pipeline
        self.seconds_per_image = 0.0
        manifest = pipeline.bundle.manifest
        self._engines = engines = pipeline.engines
        self._chooser = pipeline.chooser
        strict = resolve_settings(manifest, {"method": "auto"})
        model = pipeline.model(engines, [Eagle() if manifest.drafter else Ar()])
        self.model = replace(model, neighbors=pipeline.bundle.neighbors if manifest.neighbors else None)
        usual = min(images_together(manifest, strict, engines.most_rows), max(1, engines.most_rows // 2))
        self.together = whole("together", together, usual, 1, 4096)
        self.waiting = whole("waiting", waiting, 256, 0, 1 << 20)
        self._rows = min(2 * self.together, engines.most_rows)
        self._scheduler = Scheduler(self.model, self._rows, self.together)
        self._races: dict[TuningKey, tuple[int, Settings, Race]] = {}
        self._tickets: dict[int, Ticket] = {}  # by the index of a sample
        self._count = 0  # samples so far
        self._changed = threading.Condition()
        self._arriving: deque[Ticket] = deque()
        self._leaving: deque[Ticket] = deque()
        self._images = 0  # accepted and not ended
        self._next_return = 0.0  # when the next request that is refused is to come again
        self._since = time.perf_counter()  # when there was nothing to do, or an image was done
        self._closing = self._draining = False
        self._failures = 0  # passes since the last image that was done
        self._thread = threading.Thread(target=self._run, name="lantern-rt-service", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def open(self) -> bool:
        """Whether it takes requests and draws them; several passes that fail one after the other say that it cannot."""
        return not self._closing and self._failures < MOST_FAILURES

    @property
    def images(self) -> int:
        """Images that are being drawn or wait."""
        return self._images

    @property
    def running(self) -> int:
        """Images that share passes now."""
        return len(self._scheduler.active)

    def submit(
        self,
        listener: Listener,
        prompts: str | Sequence[str] | None = None,
        *,
        steps: bool = True,
        **options: Unpack[Options],
    ) -> Ticket:
        """Have a request drawn; takes what a call of the pipeline takes, and checks it at once.

        Args:
            listener: called in the service's thread with every `StreamStep`, the last one with `stats`, or with that
                alone (`steps` False); or with the error that ended the request. It must return quickly.
            prompts: as for a call of the pipeline, as are the options.
            steps: whether the listener wants every step.

        Returns:
            What cancels the request.

        Raises:
            RequestError: as a call of the pipeline does; or the service was closed.
            BusyError: too many wait.
        """
        _ = self.pipeline.engines  # refused in a forked process, where nobody would draw
        request = self.pipeline.check(prompts, **options)
        self.pipeline.check_room(request)
        images = len(request.images)
        ticket = Ticket(self, request, listener, steps)
        nodes = state.method_nodes(request.settings.method)
        max_nodes = min(MOST_NODES, self._engines.most_nodes)
        if nodes > max_nodes:
            expected = f"at most {max_nodes} where passes are shared"
            raise RequestError(field="method", found=f"{nodes} nodes in a pass", expected=expected)
        room = self.together + self.waiting
        if images > room:
            raise RequestError(field="num_images", found=f"{images} images", expected=f"at most {room} in one request")
        if 1 + request.settings.sampling.guided > self._rows:
            raise RequestError("guidance takes two rows, these engines have one", field="cfg_scale", remedy="give 1")
        with self._changed:
            if self._closing:
                raise RequestError("closed", field="service", remedy="make another")
            excess = self._images + images - room
            if self._images and excess > 0:
                raise BusyError(f"found {self._images} images before this one", self._wait(excess, images))
            self._images += images
            ticket.places = images
            self._arriving.append(ticket)
            self._changed.notify()
        return ticket

    def _wait(self, excess: int, images: int) -> int:
        """Seconds after which a request that was refused may find room, each after the one refused before it.

        Beyond a minute they begin anew, as not all come back. The lock is held.
        """
        now = time.perf_counter()
        room = now + excess * self.seconds_per_image
        self._next_return = max(self._next_return, room)
        if self._next_return > room + _RETURNING:
            self._next_return = room
        seconds = self._next_return - now
        self._next_return += images * self.seconds_per_image
        return max(1, math.ceil(seconds))

    def raster(self, settings: Settings) -> Raster:
        """How the codes of a request's images stand in their sequence."""
        size = self.pipeline.bundle.manifest.size(settings.size)
        return replace(self.model.raster, codes=size.codes, columns=size.columns)

    def forget(self, ticket: Ticket) -> None:
        """Cancel a request; nothing happens if it has ended."""
        with self._changed:
            self._free(ticket)
            self._leaving.append(ticket)
            self._changed.notify()

    def _free(self, ticket: Ticket) -> None:
        """Let others have the places of a request. The lock is held."""
        self._images -= ticket.places
        ticket.places = 0

    def close(self, drain: bool = True) -> None:
        """Take no more requests, finish those that are there (drain) or fail them, and stop the thread."""
        with self._changed:
            self._closing, self._draining = True, drain
            self._changed.notify()
        self._thread.join()

    # ---------------------------------------------------------------- the service's thread

    def _run(self) -> None:
        going = True
        try:
            while going:
                try:
                    going = self._listen()
                    self._step()
                except Exception as error:  # whatever it is: callers must hear of it, and later ones be served
                    self._fail(error)
        finally:
            with self._changed:
                self._closing = True
            self._fail(RequestError("closed before the request was done", field="service", remedy="make another"))
            for images, settings, race in self._races.values():
                self._chooser.keep(images, settings, race)

    def _listen(self) -> bool:
        """Wait for something to do, take in who comes and goes; False when it is time to end."""
        with self._changed:
            while not (self._arriving or self._leaving or self._scheduler.busy or self._closing):
                self._changed.wait()
                self._since = time.perf_counter()
            if self._closing and not (self._draining and (self._arriving or self._scheduler.busy)):
                return False
        while (ticket := self._next(self._leaving)) is not None:
            self._end(ticket)
        while (ticket := self._next(self._arriving)) is not None:
            if not ticket.ended:
                self._begin(ticket)
        return True

    def _next(self, tickets: deque[Ticket]) -> Ticket | None:
        with self._changed:
            return tickets.popleft() if tickets else None

    def _begin(self, ticket: Ticket) -> None:
        """Give a request's images to the scheduler; a request that cannot be prepared hears why."""
        settings = ticket.request.settings
        try:
            methods = self._chooser.methods(settings) if ticket.automatic else [settings.method]
            prompts = list(self.pipeline.prefixes(self._engines, ticket.request.images))
        except Exception as error:
            self._end(ticket, error)
            return
        ticket.clocks = self._scheduler.target_clock.copy(), self._scheduler.drafter_clock.copy()
        for prompt, image in zip(prompts, ticket.request.images, strict=True):
            rows = prompt.rows(settings.sampling)
            sample = state.Request(self._count, ticket.raster, rows, settings.sampling, methods, image.seed)
            self._tickets[self._count] = ticket
            self._count += 1
            ticket.samples.append(sample)
            self._scheduler.submit(sample)

    def _step(self) -> None:
        """One pass, by what suits the load, and what it gave to those whose request it was."""
        races = self._use_races()
        prefill, began = self._scheduler.joining, time.perf_counter()
        try:
            parts = self._scheduler.step()
        except Exception as error:
            if not prefill:
                raise
            self._refuse(error)
            return
        seconds = time.perf_counter() - began
        if len(races) == 1 and parts and not prefill and all(self._tickets[part.request].automatic for part in parts):
            races[0].record_pass(sum(len(part.codes) for part in parts) / len(parts), seconds)
        steps: dict[Ticket, list[RequestStep]] = {}
        for part in parts:
            steps.setdefault(self._tickets[part.request], []).append(part)
        for ticket, own in steps.items():
            ticket.waited = began - ticket.came if ticket.waited is None else ticket.waited
            self._tell(ticket, own)

    def _use_races(self) -> list[Race]:
        """Have requests of method `auto` drawn by what their races say; the races that were asked.

        Passes are timed where all requests that share them are of one race; elsewhere its leader draws.
        """
        tickets = [ticket for ticket in dict.fromkeys(self._tickets.values()) if ticket.automatic]
        shared = len(self._scheduler.active) + len(self._scheduler.waiting)
        images = min(self.together, 1 << max(0, shared - 1).bit_length())  # the next power of two is near enough
        keys = {ticket: self._chooser.key(images, ticket.request.settings) for ticket in tickets}
        for ticket, key in keys.items():
            settings = ticket.request.settings
            if key not in self._races:
                self._races[key] = images, settings, self._chooser.race(images, settings)
            race = self._races[key][2]
            alone = len({*keys.values()}) == 1 and len(tickets) == len({*self._tickets.values()})
            method = race.method if alone or race.decided else race.leader
            if ticket.samples[0].method != method or ticket.choice is None:
                ticket.choice = self._chooser.describe(settings, race)
                for sample in ticket.samples:
                    sample.use(method)
        return [self._races[key][2] for key in dict.fromkeys(keys.values())]

    def _refuse(self, error: Exception) -> None:
        """End the requests that were to join, for whom there was no memory, say; the others are as they were."""
        there, tickets = {*self._scheduler.active, *self._scheduler.waiting}, {*self._tickets.values()}
        lost = [one for one in tickets if any(own.missing and own not in there for own in one.samples)]
        if not lost or not isinstance(error, LanternError):
            raise error
        for ticket in lost:
            self._end(ticket, copy(error).with_traceback(None))

    def _tell(self, ticket: Ticket, parts: list[RequestStep]) -> None:
        """Tell a request's listener what a pass gave its images."""
        settings = ticket.request.settings
        samples = ticket.samples
        if ticket.automatic:
            settings = replace(settings, method=samples[0].method, choice=ticket.choice)
        codes = ticket.raster.codes
        total = codes * len(samples)
        missing = sum(sample.missing for sample in samples)
        stats = None
        if not missing:
            clocks = self._scheduler.target_clock, self._scheduler.drafter_clock
            target, drafter = (clock.since(before) for clock, before in zip(clocks, ticket.clocks, strict=True))
            records = [sample.statistics for sample in samples]
            stats = summarise(settings.method.method, codes, target, drafter, records)
        own = [part._replace(request=part.request - samples[0].index) for part in parts]
        draw = partial(self.pipeline.draw, ticket.request.images, settings)
        step = ticket.progress.add(Step(own, total - missing, total, stats), settings, draw)
        if stats is not None:
            self._count_time(len(samples))
            self._end(ticket, step)
        elif ticket.steps:
            self._hear(ticket, step)

    def _count_time(self, images: int) -> None:
        """Have images that are done count for the mean time that one takes."""
        self._failures = 0
        now = time.perf_counter()
        each = (now - self._since) / images
        self._since = now
        self.seconds_per_image += _NEWEST * (each - self.seconds_per_image) if self.seconds_per_image else each

    def _end(self, ticket: Ticket, last: StreamStep | BaseException | None = None) -> None:
        """Forget a request, and tell its listener how it ended, unless it left by itself."""
        if not ticket.ended:
            self._forget(ticket, last)
            self._scheduler.cancel(ticket.samples)

    def _forget(self, ticket: Ticket, last: StreamStep | BaseException | None) -> None:
        ticket.ended = True
        for sample in ticket.samples:
            self._tickets.pop(sample.index, None)
        with self._changed:
            self._free(ticket)
        if last is not None:
            self._hear(ticket, last)

    def _hear(self, ticket: Ticket, news: StreamStep | BaseException) -> None:
        """Call a listener; one that fails ends its own request only."""
        try:
            ticket.listener(news)
        except Exception:
            _LOG.exception("a listener failed")
            self._end(ticket)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and begin anew."""
        if not isinstance(error, LanternError):
            _LOG.error("a pass failed", exc_info=error)
        self._failures += 1
        self._scheduler = Scheduler(self.model, self._rows, self.together)
        ended = {*self._tickets.values()}
        while self._closing and (ticket := self._next(self._arriving)) is not None:
            ended.add(ticket)
        for ticket in ended:
            self._forget(ticket, copy(error).with_traceback(None))  # each raises its own
