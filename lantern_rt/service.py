"""Requests of many callers, drawn together: one thread runs the decoder, requests come and go between its passes.

An image is bit for bit what `Pipeline` gives alone. Exact windows follow the load: they are narrower where images share
passes (`runtime/windows.py`), which draws the same images.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from .errors import LanternError, RequestError
from .inputs import check_int
from .memory import compute_max_images, largest_settings
from .methods import Options, RowParallel, Sjd
from .pipeline import Pipeline
from .results import StreamStep
from .runtime import state
from .runtime.batch import Batch
from .runtime.decode import Step, joining
from .runtime.drafting import SequenceStep
from .runtime.statistics import Clock, summarise
from .runtime_inputs import compute_prefixes, load_model
from .service_request import Listener, ServiceRequest
from .sharing import Room, Turns, fair_order

_LOG = logging.getLogger(__name__)
MAX_NODES = 65  # of a request in a pass: all that share it are padded to the widest
GROUPS = MAX_NODES.bit_length() + 1  # of requests that share passes, by nodes
FEW_NODES = 2  # of a request in a pass: what drafts more takes time from others that share it
MOST_FAILURES = 3  # passes that failed one after the other


class Service:
    """Draws requests of many threads with one pipeline, which stays the caller's to close.

    Callers share it evenly: in places, and in time, as relaxed methods, whose drafts decide the picture, have passes of
    their own.

    Args:
        pipeline: that draws.
        together: images that share passes at most, by default as many as the pipeline decodes together.
        waiting: images that may wait for them.
    """

    def __init__(self, pipeline: Pipeline, together: int | None = None, waiting: int = 256) -> None:
        self.pipeline = pipeline
        manifest = pipeline.bundle.manifest
        self._engines = engines = pipeline.engines
        self.model = load_model(pipeline.bundle, engines)
        fitting = compute_max_images(manifest, largest_settings(manifest), engines.max_rows)
        usual = min(fitting, max(1, engines.max_rows // 2))
        self._max_images = check_int("together", together, usual, 1, 4096)
        self.room = Room(self._max_images, check_int("waiting", waiting, 256, 0, 1 << 20))
        self._rows = min(2 * self._max_images, engines.max_rows)
        self._clocks = Clock(), Clock()
        self._batches = self._new_batches()
        self._turns = Turns()
        self._tickets: dict[int, ServiceRequest] = {}  # by the index of a sample
        self._waiting: list[state.ImageSequence] = []  # samples that have no place yet
        self._count = 0  # samples so far
        self._callers = 0  # of late
        self._changed = threading.Condition()
        self._arriving: deque[ServiceRequest] = deque()
        self._leaving: deque[ServiceRequest] = deque()
        self._since = time.perf_counter()  # when there was nothing to do, or a pass was done
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
        return self.room.images

    @property
    def running(self) -> int:
        """Images that share passes now."""
        return sum(len(one.active) for one in list(self._batches.values()))

    def submit(
        self,
        listener: Listener,
        prompts: str | Sequence[str] | None = None,
        *,
        steps: bool = True,
        caller: str = "",
        deadline: float = math.inf,
        **options: Unpack[Options],
    ) -> ServiceRequest:
        """Have a request drawn; takes what a call of the pipeline takes, and checks it at once.

        Args:
            listener: called in the service's thread with every `StreamStep`, the last one with `stats`, or with that
                alone (`steps` False); or with the error that ended the request. It must return quickly.
            prompts: as for a call of the pipeline, as are the options.
            steps: whether the listener wants every step.
            caller: among whom the service is shared evenly.
            deadline: seconds in which it has to be done; it is refused where that cannot be.

        Returns:
            What cancels the request.

        Raises:
            RequestError: as a call of the pipeline does; or the service was closed.
            BusyError: too many wait, or too many for the deadline; the listener also hears it, of a request that waits.
        """
        _ = self.pipeline.engines  # refused in a forked process, where nobody would draw
        request = self.pipeline.check(prompts, **options)
        request = replace(request, settings=self.pipeline.adapt_settings(request.settings))
        self.pipeline.check_image_memory(request)
        images = len(request.images)
        size = self.pipeline.bundle.manifest.size(request.settings.size)
        raster = replace(self.model.raster, codes=size.codes, columns=size.columns)
        ticket = ServiceRequest(self.forget, request, listener, steps, caller, deadline, raster)
        nodes = state.method_nodes(request.settings.method)
        max_nodes = min(MAX_NODES, self._engines.max_nodes)
        if nodes > max_nodes:
            expected = f"at most {max_nodes} where passes are shared"
            raise RequestError(field="method", found=f"{nodes} nodes in a pass", expected=expected)
        if images > self.room.total:
            expected = f"at most {self.room.total} in one request"
            raise RequestError(field="num_images", found=f"{images} images", expected=expected)
        if 1 + request.settings.sampling.guided > self._rows:
            raise RequestError("guidance takes two rows, these engines have one", field="cfg_scale", remedy="give 1")
        with self._changed:
            if self._closing:
                raise RequestError("closed", field="service", remedy="make another")
            self.room.check(caller, images, deadline)
            self.room.count(caller, images)
            ticket.places = images
            self._arriving.append(ticket)
            self._changed.notify()
        return ticket

    def forget(self, ticket: ServiceRequest) -> None:
        """Cancel a request; nothing happens if it has ended."""
        with self._changed:
            self.room.count(ticket.caller, -ticket.places)
            ticket.places = 0
            self._leaving.append(ticket)
            self._changed.notify()

    def close(self, drain: bool = True) -> None:
        """Take no more requests, finish those that are there (drain) or fail them, and stop the thread."""
        with self._changed:
            self._closing, self._draining = True, drain
            self._changed.notify()
        self._thread.join()

    # ---------------------------------------------------------------- the service's thread

    def _new_batches(self) -> dict[int, Batch]:
        """Return a batch for each group of callers that share passes, all with the same clocks."""
        return {group: Batch(self.model, clocks=self._clocks) for group in range(GROUPS)}

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

    def _listen(self) -> bool:
        """Wait for something to do, take in who comes and goes; False when it is time to end."""
        with self._changed:
            while not (self._arriving or self._leaving or self._tickets or self._closing):
                self._changed.wait()
                self._since = time.perf_counter()
            if self._closing and not (self._draining and (self._arriving or self._tickets)):
                return False
        while (ticket := self._next(self._leaving)) is not None:
            self._end(ticket)
        while (ticket := self._next(self._arriving)) is not None:
            if not ticket.ended:
                self._begin(ticket)
        self._shed()
        return True

    def _next(self, tickets: deque[ServiceRequest]) -> ServiceRequest | None:
        with self._changed:
            return tickets.popleft() if tickets else None

    def _begin(self, ticket: ServiceRequest) -> None:
        """Have a request's images wait for places; a request that cannot be prepared hears why."""
        settings = ticket.checked.settings
        try:
            prompts = list(compute_prefixes(self.pipeline.bundle, self._engines, ticket.checked.images))
        except Exception as error:
            self._end(ticket, error)
            return
        ticket.clocks = self._clocks[0].copy(), self._clocks[1].copy()
        for prompt, image in zip(prompts, ticket.checked.images, strict=True):
            rows = prompt.rows(settings.sampling)
            sample = state.ImageSequence(
                self._count,
                ticket.raster,
                rows,
                settings.sampling,
                settings.method,
                image.seed,
                prompt.preserved,
                adaptive=self._engines.on_cpu,
            )
            self._tickets[self._count] = ticket
            self._count += 1
            ticket.samples.append(sample)
            self._waiting.append(sample)

    def _shed(self) -> None:
        """Refuse who waits and cannot be done in time any more, then the last of who has too much of the room."""
        waiting = [one for one in dict.fromkeys(self._tickets[sample.index] for sample in self._waiting) if one.waits]
        refused: dict[ServiceRequest, Exception] = {}
        with self._changed:
            self._callers = self.room.callers()
            over, held = self.room.images - self.room.total, self.room.held
            share = self.room.total / max(1, len(held))
            for ticket in sorted(waiting, key=lambda one: (held[one.caller], one.came), reverse=True):
                end = ticket.came + ticket.deadline
                if self.room.is_late(ticket.places, end) or (over > 0 and held[ticket.caller] > share):
                    refused[ticket] = self.room.busy(1, ticket.places)
                    over -= ticket.places
        for ticket, error in refused.items():
            self._end(ticket, error)

    def _waiting_by_group(self) -> dict[int, list[state.ImageSequence]]:
        """Return who waits for a place, by group, in the order in which they are to have places."""
        active = [sample for batch in self._batches.values() for sample in batch.active]
        held = Counter(self._tickets[sample.index].caller for sample in active)
        share = max(1, self._max_images // self._callers) if self._callers > 1 else self.room.total
        order = fair_order([(self._tickets[one.index].caller, one) for one in self._waiting], held, share)
        groups = [self._group(sample) for sample in order]
        used = {group for group, batch in self._batches.items() if batch.active}
        if len(used.union(groups)) > 1:  # whose turn it is says nothing about places
            order = order[: self._max_images - len(active)]
        waiting: dict[int, list[state.ImageSequence]] = {}
        for sample, group in zip(order, groups, strict=False):
            waiting.setdefault(group, []).append(sample)
        return waiting

    def _group(self, sample: state.ImageSequence) -> int:
        """Whose passes an image shares: beside other callers, those of relaxed methods with about as many nodes."""
        method = sample.method
        if self._callers < 2 or (method.exact and (sample.nodes <= FEW_NODES or isinstance(method, Sjd))):
            return 0
        return (MAX_NODES if isinstance(method, RowParallel) else sample.nodes).bit_length()

    def _step(self) -> None:
        """One pass, and what it gave to those whose request it was."""
        waiting = self._waiting_by_group()
        free = self._max_images - sum(len(batch.active) for batch in self._batches.values())
        callers: dict[int, set[str]] = {}
        new: dict[int, list[state.ImageSequence]] = {}
        for group, batch in self._batches.items():
            queued = waiting.get(group, [])
            new[group] = joining(batch, queued, free + len(batch.active), self._rows)
            if batch.active or new[group]:
                callers[group] = {self._tickets[sample.index].caller for sample in (*batch.active, *queued)}
        if not callers:
            return
        group = self._turns.next(callers)
        began = time.perf_counter()
        try:
            parts = self._batches[group].join(new[group]) if new[group] else self._batches[group].step()
        except Exception as error:
            there = self._batches[group].active
            lost = dict.fromkeys(self._tickets[one.index] for one in new[group] if one not in there)
            if not lost or not isinstance(error, LanternError):
                raise
            for ticket in lost:  # for which there was no memory, say; the others are as they were
                self._end(ticket, copy(error).with_traceback(None))
            return
        now = time.perf_counter()
        self._turns.spend(group, now - began, callers)
        if new[group]:
            self._waiting = [sample for sample in self._waiting if not sample.codes]
        with self._changed:
            images = sum(len(part.codes) / self._tickets[part.sequence].raster.codes for part in parts)
            self.room.measure(now - self._since, images)
        self._since = now
        steps: dict[ServiceRequest, list[SequenceStep]] = {}
        for part in parts:
            steps.setdefault(self._tickets[part.sequence], []).append(part)
        for ticket, own in steps.items():
            ticket.waited = began - ticket.came if ticket.waited is None else ticket.waited
            self._tell(ticket, own)

    def _tell(self, ticket: ServiceRequest, parts: list[SequenceStep]) -> None:
        """Tell a request's listener what a pass gave its images."""
        settings = ticket.checked.settings
        samples = ticket.samples
        codes = ticket.raster.codes
        total = codes * len(samples)
        remaining = sum(sample.remaining for sample in samples)
        stats = None
        if not remaining:
            target, drafter = (now.since(then) for now, then in zip(self._clocks, ticket.clocks, strict=True))
            records = [sample.statistics for sample in samples]
            stats = summarise(settings.method.method, codes, target, drafter, records)
        own = [part._replace(sequence=part.sequence - samples[0].index) for part in parts]
        draw = partial(self.pipeline.decode_image, ticket.checked.images, settings)
        step = ticket.stream_state.add(Step(own, total - remaining, total, stats), settings, draw)
        if stats is not None:
            self._failures = 0
            self._end(ticket, step)
        elif ticket.steps:
            self._hear(ticket, step)

    def _end(self, ticket: ServiceRequest, last: StreamStep | BaseException | None = None) -> None:
        """Forget a request, and tell its listener how it ended, unless it left by itself."""
        if not ticket.ended:
            self._forget(ticket, last)
            self._waiting = [sample for sample in self._waiting if sample not in ticket.samples]
            for batch in self._batches.values():
                batch.leave(ticket.samples)

    def _forget(self, ticket: ServiceRequest, last: StreamStep | BaseException | None) -> None:
        ticket.ended = True
        for sample in ticket.samples:
            self._tickets.pop(sample.index, None)
        with self._changed:
            self.room.count(ticket.caller, -ticket.places)
            ticket.places = 0
        if last is not None:
            self._hear(ticket, last)

    def _hear(self, ticket: ServiceRequest, news: StreamStep | BaseException) -> None:
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
        self._batches = self._new_batches()
        self._waiting = []
        ended = {*self._tickets.values()}
        while self._closing and (ticket := self._next(self._arriving)) is not None:
            ended.add(ticket)
        for ticket in ended:
            self._forget(ticket, copy(error).with_traceback(None))  # each raises its own
