"""A pipeline for asyncio programs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack
from weakref import WeakValueDictionary

from PIL.Image import Image

from .bundle.files import Bundle
from .errors import RequestError
from .methods import Options
from .pipeline import Pipeline
from .results import Result, StreamStep, build_result
from .service import Service
from .service_request import ServiceRequest

if TYPE_CHECKING:
    from .engines.engine_folder import EngineFolder


class AsyncPipeline:
    """Generates images for many tasks of an event loop; their requests share passes, and come and go between them.

    An image is bit for bit what `Pipeline` gives, whatever else is drawn. A task that is cancelled, or stops iterating,
    frees its place within a pass. together, waiting: as for `Service`.
    """

    def __init__(self, pipeline: Pipeline, together: int | None = None, waiting: int = 256) -> None:
        self.pipeline = pipeline
        self.service = Service(pipeline, together, waiting)
        self._workers = ThreadPoolExecutor(1, "lantern-rt-images")  # decodes pictures
        self._checks = ThreadPoolExecutor(1, "lantern-rt-requests")  # checks requests, which wait for no picture
        self._edits = ThreadPoolExecutor(1, "lantern-rt-edits")  # checks edits, whose pictures are unpacked
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # by callers, whose edits are checked one by one
        self._callers = 0  # whose pictures are to be decoded
        self._closed = False

    @classmethod
    async def from_bundle(
        cls,
        bundle: str | Path | Bundle = "scenes",
        threads: int | None = None,
        verify: bool = True,
        provider: str | Sequence[str] | None = None,
        engines: str | Path | EngineFolder | None = None,
        *,
        together: int | None = None,
        waiting: int = 256,
    ) -> AsyncPipeline:
        """Open a bundle without holding up the event loop; takes what `Pipeline.from_bundle` and `Service` take."""

        def load() -> AsyncPipeline:
            pipeline = Pipeline.from_bundle(bundle, threads, verify, provider, engines)
            try:
                return cls(pipeline, together, waiting)
            except BaseException:
                pipeline.close()
                raise

        return await asyncio.get_running_loop().run_in_executor(None, load)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, drain: bool = True) -> None:
        """Take no more requests; finish those that are there (drain) or fail them, and close the pipeline.

        Streams still give the steps that they have, but no pictures.
        """
        self._closed = True
        loop = asyncio.get_running_loop()
        for executor in (self._checks, self._edits):
            await loop.run_in_executor(None, executor.shutdown)  # who came before is there
        await loop.run_in_executor(None, self.service.close, drain)
        while self._callers:
            await asyncio.sleep(0.01)
        await loop.run_in_executor(None, self._workers.shutdown)
        self.pipeline.close()

    async def generate(self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Result:
        """Generate images; takes and gives what a call of `Pipeline` does.

        Raises: RequestError, EngineError: as there. BusyError: too many wait already.
        """
        with self._calling():
            async for ticket, step in self.updates(prompts, steps=False, **options):
                images, last = ticket.checked.images, step
            assert last is not None
            pictures = [await self._picture(last, i) for i in range(len(images))]
            return build_result(images, pictures, last)

    async def stream(
        self, prompts: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[StreamStep, None]:
        """Generate step by step; takes and gives what `Pipeline.stream` does. Close the iterator to cancel.

        Raises: as `generate`, when the first step is asked for.
        """
        async with aclosing(self.updates(prompts, **options)) as updates:
            async for _, step in updates:
                if step is not None:
                    yield step

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._check_open()
        self._callers += 1
        try:
            yield
        finally:
            self._callers -= 1

    async def updates(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        steps: bool = True,
        caller: str = "",
        deadline: float = math.inf,
        **options: Unpack[Options],
    ) -> AsyncGenerator[tuple[ServiceRequest, StreamStep | None], None]:
        """A request's ticket and its steps; first the ticket alone, when the request is taken. For servers.

        Takes what `Service.submit` takes. Raises: as `generate`.
        """
        loop = asyncio.get_running_loop()
        news = asyncio.Queue[StreamStep | BaseException]()

        def hear(step: StreamStep | BaseException) -> None:
            loop.call_soon_threadsafe(news.put_nowait, step)

        submit = partial(self.service.submit, hear, prompts, steps=steps, caller=caller, deadline=deadline, **options)
        self._check_open()
        edit = options.get("image") is not None
        ticket = await (self._check_edit(caller, submit) if edit else _run(self._checks, submit))
        try:
            yield ticket, None
            stats = None
            while stats is None:
                step = await news.get()
                if isinstance(step, BaseException):
                    raise step
                yield ticket, step
                stats = step.stats
        finally:
            ticket.cancel()

    async def _check_edit(self, caller: str, submit: Callable[[], ServiceRequest]) -> ServiceRequest:
        """Check a request with a picture, which takes a while: callers take turns, and pause as long as each took."""
        turn = self._turns.setdefault(caller, asyncio.Lock())
        await turn.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            self._check_open()
            return await _run(self._edits, submit)
        finally:
            loop.call_later(loop.time() - began, turn.release)

    async def image(self, step: StreamStep, i: int) -> Image:
        """`step.image(i)`, decoded without holding up the event loop."""
        with self._calling():
            return await self._picture(step, i)

    async def _picture(self, step: StreamStep, i: int) -> Image:
        return await asyncio.get_running_loop().run_in_executor(self._workers, step.image, i)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("closed", field="pipeline", remedy="make another")


async def _run(executor: ThreadPoolExecutor, submit: Callable[[], ServiceRequest]) -> ServiceRequest:
    submitting = executor.submit(submit)
    try:
        return await asyncio.wrap_future(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_cancel_ticket)  # before the next request is checked
        raise
    finally:
        del submitting  # which holds an error, whose frames hold pictures


def _cancel_ticket(submitting: Future[ServiceRequest]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
