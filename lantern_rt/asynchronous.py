"""Pipeline for asyncio programs."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack
from weakref import WeakValueDictionary

from PIL.Image import Image

from .bundle.files import Bundle
from .errors import RequestError
from .options import Options
from .pipeline import Pipeline
from .results import Result, StreamStep, build_result
from .service import Service
from .service_request import ServiceRequest

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder

R = TypeVar("R")


class AsyncPipeline:
    """Image generator for asyncio tasks; the requests of all tasks share forward passes.

    Every image equals, bit for bit, the image that `Pipeline` generates. Other requests in the same forward passes do
    not change the image. To cancel a request, cancel its task or close its iterator. The place of a cancelled request
    is free after at most one forward pass.

    Args:
        pipeline: pipeline that generates the images. `AsyncPipeline.close` also closes this pipeline.
        max_images_per_pass: maximum number of images per forward pass, 1 .. 4096; None: a maximum that the memory and
            the engines allow.
        max_queued_images: maximum number of images in the queue, 0 .. 2**20.
    """

    def __init__(
        self, pipeline: Pipeline, max_images_per_pass: int | None = None, max_queued_images: int = 256
    ) -> None:
        self.pipeline = pipeline
        self.service = Service(pipeline, max_images_per_pass, max_queued_images)
        self._workers = ThreadPoolExecutor(1, "lantern-rt-images")  # decodes tokens to pixels
        self._checks = ThreadPoolExecutor(1, "lantern-rt-requests")  # checks requests without images
        self._edits = ThreadPoolExecutor(1, "lantern-rt-edits")  # checks edits, whose images take longer
        # (event loop, caller) -> lock, so that the edits of a caller are checked one at a time. A lock belongs to one
        # event loop. Weak values remove locks that no task uses.
        self._edit_locks = WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock]()
        self._calls = set[object]()  # calls, from all event loops, that may still decode images
        self._closed = False

    @classmethod
    async def from_bundle(
        cls,
        bundle: str | Path | Bundle = "scenes",
        threads: int | None = None,
        verify: bool = True,
        provider: str | Sequence[str] | None = None,
        engines: str | Path | EngineFolder | None = None,
        download: bool = False,
        *,
        max_images_per_pass: int | None = None,
        max_queued_images: int = 256,
    ) -> AsyncPipeline:
        """Open a bundle without blocking the event loop, with the arguments of `Pipeline.from_bundle` and the class."""

        def load_pipeline() -> AsyncPipeline:
            pipeline = Pipeline.from_bundle(bundle, threads, verify, provider, engines, download)
            try:
                return cls(pipeline, max_images_per_pass, max_queued_images)
            except BaseException:
                pipeline.close()
                raise

        loading = ThreadPoolExecutor(1, "lantern-rt-loading")
        try:
            return await _run_in_thread(loading, load_pipeline, AsyncPipeline._close_unused_pipeline)
        finally:
            loading.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain: bool = True) -> None:
        """Stop accepting requests and close the pipeline.

        Streams still yield the steps that they have received, but these steps cannot decode images.

        Args:
            drain: whether to finish the running and queued requests; False: these requests raise `RequestError`.
        """
        self._closed = True
        if os.getpid() == self.pipeline.process:  # threads and calls do not survive a fork
            loop = asyncio.get_running_loop()
            # shielded, so that the service stops even if this task is cancelled
            await asyncio.shield(loop.run_in_executor(None, self._stop_service, drain))
            while self._calls:  # polled, because calls may run in other event loops
                await asyncio.sleep(0.01)
            await loop.run_in_executor(None, self._workers.shutdown)
        self.pipeline.close()

    def _stop_service(self, drain: bool) -> None:
        for executor in (self._checks, self._edits):
            executor.shutdown()  # waits for requests that are being checked
        self.service.close(drain)

    def _close_unused_pipeline(self) -> None:
        self._stop_service(drain=False)
        self.pipeline.close()

    async def generate(self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Result:
        """Generate images. Takes the arguments of a call of `Pipeline`, and raises its errors, and:

        Raises:
            BusyError: the queue is full.
        """
        with self._track_call():
            async for request, step in self.stream_updates(prompts, wants_all_steps=False, **options):
                images = request.prepared_request.images
                last = step
            assert last is not None
            count = len(images) if self.pipeline.bundle.manifest.makes_images else 0
            decoded = [await self._decode_image(last, i) for i in range(count)]
            return build_result(images, decoded, last)

    async def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[StreamStep, None]:
        """Generate images and yield the state after each decoding step, as `Pipeline.stream` does.

        To cancel the request, close the iterator.

        Raises:
            BusyError: the queue is full.
        """
        async with aclosing(self.stream_updates(prompts, **options)) as updates:
            async for _, step in updates:
                if step is not None:
                    yield step

    @contextmanager
    def _track_call(self) -> Iterator[None]:
        self._check_open()
        call = object()
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    async def stream_updates(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        wants_all_steps: bool = True,
        caller: str = "",
        deadline: float = math.inf,
        **options: Unpack[Options],
    ) -> AsyncGenerator[tuple[ServiceRequest, StreamStep | None], None]:
        """Generate images, and yield the request with the state after each decoding step. Servers use this method.

        Args:
            wants_all_steps: whether to yield every step; False: the last step only.
            caller: name of the caller; callers share the service equally.
            deadline: time limit of the request in seconds.

        Yields:
            Pairs of the request and a step. The first pair comes when the service accepts the request, and has None in
            place of a step.

        Raises:
            BusyError: the queue is full, or the deadline cannot be met.
        """
        loop = asyncio.get_running_loop()
        updates = asyncio.Queue[StreamStep | BaseException]()

        def put_update(update: StreamStep | BaseException) -> None:
            # called in the service's thread; RuntimeError: the event loop was closed after it cancelled the request
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(updates.put_nowait, update)

        submit = partial(
            self.service.submit,
            put_update,
            prompts,
            wants_all_steps=wants_all_steps,
            caller=caller,
            deadline=deadline,
            **options,
        )
        self._check_open()
        is_edit = options.get("image") is not None
        request = await (
            self._submit_edit(caller, submit)
            if is_edit
            else _run_in_thread(self._checks, submit, ServiceRequest.cancel)
        )
        try:
            yield request, None
            stats = None
            while stats is None:
                step = await updates.get()
                if isinstance(step, BaseException):
                    raise step
                yield request, step
                stats = step.stats
        finally:
            request.cancel()  # no effect if the request has ended

    async def _submit_edit(self, caller: str, submit: Callable[[], ServiceRequest]) -> ServiceRequest:
        """Submit an edit to the service, after the previous edit of the same caller.

        The service decodes the image to check an edit, which takes long. After a check, the next edit of the caller
        waits for as long as the check took. Without this wait, one caller could keep the thread that checks edits busy.
        """
        loop = asyncio.get_running_loop()
        lock = self._edit_locks.setdefault((loop, caller), asyncio.Lock())
        await lock.acquire()
        began = loop.time()
        try:
            self._check_open()
            return await _run_in_thread(self._edits, submit, ServiceRequest.cancel)
        finally:
            loop.call_later(loop.time() - began, lock.release)  # the next edit of this caller waits for the lock

    async def image(self, step: StreamStep, i: int) -> Image:
        """Decode image i of a step of `stream`, as `step.image(i)` does, without blocking the event loop.

        Raises:
            IndexError: the request has fewer images.
            RequestError: the pipeline was closed.
        """
        with self._track_call():
            return await self._decode_image(step, i)

    async def _decode_image(self, step: StreamStep, i: int) -> Image:
        return await asyncio.get_running_loop().run_in_executor(self._workers, step.image, i)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("closed", field="pipeline", remedy="open another pipeline")
        _ = self.pipeline.engines  # raises in a forked process, which has none of the threads


async def _run_in_thread(
    executor: ThreadPoolExecutor, function: Callable[[], R], discard_result: Callable[[R], None]
) -> R:
    """Return the result of a function that runs in a thread.

    A thread cannot be interrupted. If the awaiting task is cancelled, the thread passes the late result to
    `discard_result`, before it runs another function.
    """
    future = executor.submit(function)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(partial(_discard_late_result, discard_result))
        raise
    finally:
        # The error of the future has a traceback, whose frames would keep images in memory.
        del future


def _discard_late_result(discard_result: Callable[[R], None], future: Future[R]) -> None:
    if not future.cancelled() and future.exception() is None:
        discard_result(future.result())
