"""Service for many callers. One thread runs the forward passes; requests join and leave between forward passes."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from .errors import LanternError, RequestError
from .inputs import check_int
from .memory import compute_max_images, largest_settings
from .methods import MethodConfig
from .options import Options
from .pipeline import Pipeline
from .prepared import load_model
from .results import StreamStep
from .runtime import state
from .runtime.decode import DecodeStep
from .runtime.drafting import SequenceStep
from .service_request import Listener, ServiceRequest
from .shared_batches import BatchScheduler
from .sharing import ServiceCapacity

_LOG = logging.getLogger(__name__)
MAX_FAILURES = 3  # consecutive failed forward passes after which the service counts as broken


class Service:
    """Image generator that many threads share.

    Every image equals, bit for bit, the image that `Pipeline` generates without other requests. Each caller gets an
    equal number of images per forward pass, and an equal share of time. When there are several callers, relaxed methods
    run in separate forward passes, because their images depend on the draft tokens.

    Args:
        pipeline: pipeline that generates the images. Close the pipeline after the service.
        max_images_per_pass: maximum number of images per forward pass, 1 .. 4096; None: a maximum that the memory and
            the engines allow.
        max_queued_images: maximum number of images in the queue, 0 .. 2**20.
    """

    def __init__(self, pipeline: Pipeline, max_images_per_pass: int | None = None, max_queued_images: int = 256):
        self.pipeline = pipeline
        manifest = pipeline.bundle.manifest
        self._engines = engines = pipeline.engines
        self.model = load_model(pipeline.bundle, engines)
        fitting = compute_max_images(manifest, [], largest_settings(manifest), engines.max_rows, None)
        default = min(fitting, max(1, engines.max_rows // 2))
        max_images = check_int("max_images_per_pass", max_images_per_pass, default, 1, 4096)
        self.capacity = ServiceCapacity(max_images, check_int("max_queued_images", max_queued_images, 256, 0, 1 << 20))
        self._rows = min(2 * max_images, engines.max_rows)  # an image with guidance has two rows
        self._requests: dict[int, ServiceRequest] = {}  # index of a sequence -> request
        self._batches = BatchScheduler(self.model, max_images, self._rows, self._requests)
        self._sequence_indices = itertools.count()
        self._num_callers = 0  # number of callers with recent requests
        self._changed = threading.Condition()  # its lock protects the state that threads share: capacity, deques, flags
        # Other threads append to these deques, and the service's thread alone removes requests, which needs no lock.
        self._arriving: deque[ServiceRequest] = deque()  # requests that the thread has not queued yet
        self._cancelled: deque[ServiceRequest] = deque()  # requests that the thread has not removed yet
        self._last_pass = time.perf_counter()  # time at the end of the last forward pass, or of the last idle time
        self._closing = self._draining = False
        self._failures = 0  # number of failed passes since a request was last finished
        self._thread = threading.Thread(target=self._run_loop, name="lantern-rt-service", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the service accepts requests. It stops after `close`, and after several failed passes in a row."""
        return not self._closing and self._failures < MAX_FAILURES

    @property
    def num_images(self) -> int:
        """Number of images that are running or queued."""
        return self.capacity.num_images

    @property
    def num_running_images(self) -> int:
        """Number of images that share forward passes now."""
        return self._batches.num_active_images

    def submit(
        self,
        listener: Listener,
        prompts: str | Sequence[str] | None = None,
        *,
        wants_all_steps: bool = True,
        caller: str = "",
        deadline: float = math.inf,
        **options: Unpack[Options],
    ) -> ServiceRequest:
        """Check a request and put it into the queue. Takes the arguments of a call of `Pipeline`, and:

        Args:
            listener: function that the service's thread calls with every `StreamStep`, or with the error that ended the
                request. The last step has `stats`. The function must return quickly, because all requests wait for it.
            wants_all_steps: whether to call the listener with every step; False: with the last step only.
            caller: name of the caller; callers share the service equally.
            deadline: time limit of the request in seconds. The service rejects a request that would miss its deadline.

        Raises:
            RequestError: as a call, or the service was closed.
            BusyError: the queue is full, or the deadline is too short. If a queued request would miss its deadline
                later, the listener gets this error.
        """
        _ = self.pipeline.engines  # raises in a forked process, which has no service thread
        prepared = self.pipeline.prepare(self.pipeline.check(prompts, **options))
        # Images of other requests may join at any time, so the window adapts even if the request names a window.
        plan = replace(prepared.plan, adaptive_window=self._engines.on_cpu)
        request = ServiceRequest(self.cancel, replace(prepared, plan=plan), listener, wants_all_steps, caller, deadline)
        num_images = len(prepared.images)
        self.check_node_limit(prepared.settings.method)
        if num_images > self.capacity.total:
            expected = f"at most {self.capacity.total} in one request"
            raise RequestError(field="num_images", found=f"{num_images} images", expected=expected)
        if plan.num_rows > self._rows:
            problem = "guidance needs two batch rows per image, but the engines have only one"
            raise RequestError(problem, field="cfg_scale", remedy="give 1")
        with self._changed:
            if self._closing:
                raise RequestError("closed", field="service", remedy="open another service")
            self.capacity.check_capacity(caller, num_images, deadline)
            self.capacity.add_images(caller, num_images)
            request.reserved_images = num_images
            self._arriving.append(request)
            self._changed.notify()
        return request

    def check_node_limit(self, method: MethodConfig) -> None:
        self._batches.check_node_limit(method)

    def cancel(self, request: ServiceRequest) -> None:
        """Cancel a request. A request that has ended is ignored."""
        with self._changed:
            self.capacity.add_images(request.caller, -request.reserved_images)
            request.reserved_images = 0
            self._cancelled.append(request)
            self._changed.notify()

    def close(self, drain: bool = True) -> None:
        """Stop accepting requests, and wait for the service's thread to stop.

        Args:
            drain: whether to finish the running and queued requests; False: listeners of these requests get an error.
        """
        if os.getpid() != self.pipeline.process:
            return  # A forked process has no service thread, and its copy of the lock may be held for ever.
        with self._changed:
            self._closing = True
            self._draining = drain
            self._changed.notify()
        self._thread.join()

    def _run_loop(self) -> None:
        is_running = True
        try:
            while is_running:
                try:
                    is_running = self._process_requests()
                    self._run_forward_pass()
                except Exception as error:  # callers must receive any error, and the service must continue
                    self._fail_all_requests(error)
        finally:
            with self._changed:
                self._closing = True
            problem = "closed before the request was done"
            self._fail_all_requests(RequestError(problem, field="service", remedy="open another service"))

    def _process_requests(self) -> bool:
        """Wait for requests, process new and cancelled requests, and return whether the service continues."""
        with self._changed:
            while not (self._arriving or self._cancelled or self._requests or self._closing):
                self._changed.wait()
                self._last_pass = time.perf_counter()  # idle time must not count as time of a pass
            if self._closing and not (self._draining and (self._arriving or self._requests)):
                return False
        while self._cancelled:
            self._end_request(self._cancelled.popleft())
        while self._arriving:
            request = self._arriving.popleft()
            if not request.has_ended:  # a request may be cancelled before this thread queues it
                self._queue_images(request)
        self._reject_late_requests()
        return True

    def _queue_images(self, request: ServiceRequest) -> None:
        prepared_request = request.prepared_request
        try:
            prompts = list(prepared_request.prompts())
        except Exception as error:
            self._end_request(request, error)
            return
        request.timers = self._batches.timers[0].copy(), self._batches.timers[1].copy()
        for prompt, seed in zip(prompts, prepared_request.seeds, strict=True):
            sequence = state.ImageSequence(next(self._sequence_indices), prepared_request.plan, prompt, seed)
            self._requests[sequence.index] = request
            request.sequences.append(sequence)
            self._batches.waiting.append(sequence)

    def _reject_late_requests(self) -> None:
        """Reject queued requests that would miss their deadline, or exceed their caller's share of a full service.

        The latest requests of the callers with the most images are rejected first.
        """
        queued = dict.fromkeys(self._requests[sequence.index] for sequence in self._batches.waiting)
        waiting = [request for request in queued if request.is_waiting]
        rejected: dict[ServiceRequest, Exception] = {}
        with self._changed:
            self._num_callers = self.capacity.count_active_callers()
            excess = self.capacity.num_images - self.capacity.total
            images_by_caller = self.capacity.images_by_caller
            share = self.capacity.total / max(1, len(images_by_caller))
            waiting.sort(key=lambda request: (images_by_caller[request.caller], request.arrival_time), reverse=True)
            for request in waiting:
                end = request.arrival_time + request.deadline
                exceeds_share = excess > 0 and images_by_caller[request.caller] > share
                if exceeds_share or self.capacity.would_miss_deadline(request.reserved_images, end):
                    rejected[request] = self.capacity.make_busy_error(1, request.reserved_images)
                    excess -= request.reserved_images
        for request, error in rejected.items():  # without the lock, because listeners may call the service
            self._end_request(request, error)

    def _run_forward_pass(self) -> None:
        chosen = self._batches.choose_next_pass(self._num_callers, self.capacity.total)
        if chosen is None:
            return
        began = time.perf_counter()
        try:
            joining = chosen.joining_sequences
            parts = chosen.batch.add(joining) if joining else chosen.batch.step()
        except Exception as error:
            joining = [sequence for sequence in joining if sequence not in chosen.batch.active_sequences]
            if not joining or not isinstance(error, LanternError):
                raise
            # The sequences could not join, for example for lack of memory. The batch is unchanged and continues.
            for request in dict.fromkeys(self._requests[sequence.index] for sequence in joining):
                self._end_request(request, copy(error).with_traceback(None))
            return
        self._batches.record_pass_time(chosen, began)
        now = time.perf_counter()
        with self._changed:
            images = sum(
                len(part.codes) / self._requests[part.sequence].prepared_request.plan.layout.num_codes for part in parts
            )
            self.capacity.record_pass(now - self._last_pass, images)
        self._last_pass = now
        steps: dict[ServiceRequest, list[SequenceStep]] = {}
        for part in parts:
            steps.setdefault(self._requests[part.sequence], []).append(part)
        for request, request_parts in steps.items():
            if request.queue_seconds is None:
                request.queue_seconds = began - request.arrival_time
            self._send_step(request, request_parts)
        for sequence in chosen.batch.failed_sequences:
            if (failed_request := self._requests.get(sequence.index)) is not None and sequence.error is not None:
                self._end_request(failed_request, copy(sequence.error).with_traceback(None))

    def _send_step(self, request: ServiceRequest, sequence_steps: list[SequenceStep]) -> None:
        settings = request.prepared_request.settings
        sequences = request.sequences
        total = request.prepared_request.plan.layout.num_codes * len(sequences)
        done = total - sum(sequence.num_remaining_codes for sequence in sequences)
        stats = request.build_statistics(self._batches.timers) if done == total else None
        # The runtime numbers the sequences of all requests; a caller numbers the images of one request from 0.
        sequence_steps = [part._replace(sequence=part.sequence - sequences[0].index) for part in sequence_steps]
        decode_image = partial(self.pipeline.decode_image, request.prepared_request.images, settings)
        decode_step = DecodeStep(sequence_steps, done, total, stats)
        step = request.stream_state.add_step(decode_step, settings, decode_image)
        if stats is not None:
            self._failures = 0
            self._end_request(request, step)
        elif request.wants_all_steps:
            self._call_listener(request, step)

    def _end_request(self, request: ServiceRequest, last_update: StreamStep | BaseException | None = None) -> None:
        """Remove a request and its sequences, unless it has ended, and call its listener.

        Without `last_update`, the last step or an error, the request was cancelled, and the listener is not called.
        """
        if request.has_ended:
            return
        request.has_ended = True
        for sequence in request.sequences:
            self._requests.pop(sequence.index, None)
        with self._changed:
            self.capacity.add_images(request.caller, -request.reserved_images)
            request.reserved_images = 0
        if last_update is not None:
            self._call_listener(request, last_update)
        self._batches.remove(request.sequences)

    def _call_listener(self, request: ServiceRequest, update: StreamStep | BaseException) -> None:
        try:
            request.listener(update)
        except Exception:
            _LOG.exception("a listener failed")
            self._end_request(request)

    def _fail_all_requests(self, error: Exception) -> None:
        if not isinstance(error, LanternError):
            _LOG.error("a pass failed", exc_info=error)
        self._failures += 1
        self._batches.clear()
        ended = {*self._requests.values()}
        while self._closing and self._arriving:
            ended.add(self._arriving.popleft())
        for request in ended:
            self._end_request(request, copy(error).with_traceback(None))  # every caller raises a separate copy
