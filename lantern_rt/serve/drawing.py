"""From orders to pictures in files: what a server asks of a pipeline, in this process or in another one."""

from __future__ import annotations

import asyncio
import io
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from PIL.Image import Image

from ..asynchronous import AsyncPipeline
from ..bundle.manifest import Manifest
from ..output.images import png_bytes
from ..results import StreamStep
from ..runtime.scheduler import RequestStep
from ..service import Ticket

MOST_DECODED = 3  # partial pictures that are made at a time; further ones are left out
CODES_EVERY = 0.1  # seconds between two updates that tell codes


@dataclass(frozen=True)
class Order:
    """One request. options: as a call of a pipeline takes them.

    file: png, jpeg or webp. compression: 0 .. 100, None: usual. partial: pictures on the way. steps: whether every
    pass is told. deadline: seconds, None: as long as it takes. codes: whether new codes are told, for resuming. known:
    those of each image that a resumed order begins with.
    """

    options: dict[str, Any]
    file: str = "png"
    compression: int | None = None
    partial: int = 0
    steps: bool = False
    deadline: float | None = None
    codes: bool = False
    known: Sequence[Sequence[int]] = ()

    @property
    def watched(self) -> bool:
        """Whether anything is told before the end."""
        return self.steps or self.codes or self.partial > 0


@dataclass(frozen=True)
class Summary:
    """What an order took.

    input_tokens, output_tokens, target_passes: of all images together; a pass counts for every image in it. seconds:
    all of it; waited: before its first pass; picture_seconds: decoding and encoding pictures, also those on the way.
    realised_tvd: the mean over images.
    """

    model: str
    method: str
    choice: str | None
    seeds: list[int]
    input_tokens: int
    output_tokens: int
    target_passes: int
    tokens_per_forward_pass: float
    realised_tvd: float
    seconds: float
    waited: float
    picture_seconds: float

    def extension(self) -> dict[str, Any]:
        """What an answer says beyond OpenAI's fields."""
        names = ("model", "method", "choice", "seeds", "tokens_per_forward_pass", "target_passes", "seconds")
        per_token = self.realised_tvd * len(self.seeds) / self.output_tokens
        return {**{name: getattr(self, name) for name in names}, "realised_tvd_per_token": per_token}


@dataclass(frozen=True)
class Update:
    """News of an order; the first one says only that it was taken.

    done, total: codes. rows, columns: of an image's grid. codes: per image those since codes were last told. kinds: one
    letter per new code of the first image, see `kinds_of`; drafted: nodes drafted for it. partial: which picture on the
    way `pictures[0]` is. summary: with the last one, and all pictures.
    """

    done: int = 0
    total: int = 0
    rows: int = 0
    columns: int = 0
    codes: list[list[int]] = field(default_factory=list)
    kinds: str = ""
    drafted: int = 0
    method: str = ""
    pictures: list[bytes] = field(default_factory=list)
    partial: int | None = None
    summary: Summary | None = None


class Load(NamedTuple):
    """Images that share passes now, those that wait, and nodes of a pass for each."""

    running: int
    waiting: int
    nodes: int


class Drawer(Protocol):
    """Whatever draws orders for a server: one model. size: of a picture that asks for none, WIDTHxHEIGHT."""

    name: str
    size: str

    def describe(self) -> dict[str, Any]:
        """What clients are told of the model."""

    def load(self) -> Load:
        """What there is to do."""

    def draw(self, order: Order) -> AsyncGenerator[Update, None]:
        """Draw an order, update by update; close the generator to cancel."""


class LocalDrawer:
    """Draws with a pipeline of this process. Pictures are encoded by a thread of their own, one at a time."""

    def __init__(self, pipeline: AsyncPipeline) -> None:
        manifest = pipeline.pipeline.bundle.manifest
        self.pipeline, self.manifest, self.name = pipeline, manifest, manifest.name
        self.size = manifest.size().name
        self._files = ThreadPoolExecutor(1, "lantern-rt-files")

    async def close(self, drain: bool = True) -> None:
        """Close the pipeline, after what is being drawn (drain) or at once."""
        await self.pipeline.close(drain)
        self._files.shutdown()

    def describe(self) -> dict[str, Any]:
        """What clients are told of the model."""
        manifest, bundle = self.manifest, self.pipeline.pipeline.bundle
        methods = ["ar", "sjd", "rows", *(["eagle", "lantern", "lantern++"] if manifest.drafter else []), "auto"]
        examples = bundle.path("prompts").read_text("utf-8").splitlines()[:8] if "prompts" in manifest.files else []
        return {
            "size": self.size,
            "sizes": [size.name for size in manifest.sizes] or [self.size],
            "rows": manifest.grid_rows,
            "columns": manifest.grid_columns,
            "takes": manifest.condition.kind,
            "classes": manifest.condition.classes,
            "methods": methods,
            "sampling": manifest.sampling.model_dump(),
            "examples": examples,
        }

    def load(self) -> Load:
        """What there is to do."""
        service = self.pipeline.service
        running, nodes = service.drawing
        return Load(running, max(0, service.images - running), nodes)

    async def draw(self, order: Order) -> AsyncGenerator[Update, None]:
        """Draw an order, update by update. Raises: as `AsyncPipeline.generate`."""
        pictures, news, began = _Pictures(self, order), _News(self.manifest, order), time.perf_counter()
        options = {**order.options, "steps": order.watched, "known": order.known}
        async with aclosing(self.pipeline.updates(**options)) as updates:
            try:
                async for ticket, step in updates:
                    if step is None:
                        yield Update()
                        continue
                    if step.stats is None:
                        pictures.begin(step)
                    if (update := news.of(step)) is not None:
                        yield update
                    for index, data in pictures.finished():
                        yield Update(pictures=[data], partial=index)
                    last, request = step, ticket
                while pictures.under_way:
                    index, data = await pictures.next()
                    yield Update(pictures=[data], partial=index)
                files = [await pictures.file(last, i) for i in range(len(last.codes))]
                summary = self._summary(request, last, pictures.seconds, time.perf_counter() - began)
                yield Update(last.done, last.total, pictures=files, summary=summary)
            finally:
                pictures.cancel()

    def _summary(self, ticket: Ticket, last: StreamStep, painting: float, seconds: float) -> Summary:
        stats, images = last.stats, ticket.request.images
        assert stats is not None
        return Summary(
            model=self.name,
            method=str(last.settings.method),
            choice=last.settings.choice,
            seeds=[image.seed for image in images],
            input_tokens=sum(int(image.real[0].sum()) for image in images),
            output_tokens=last.total,
            target_passes=sum(one.target_passes for one in stats.per_image),
            tokens_per_forward_pass=stats.tokens_per_forward_pass,
            realised_tvd=stats.realised_tvd,
            seconds=seconds,
            waited=ticket.waited or 0.0,
            picture_seconds=painting,
        )

    async def picture(self, step: StreamStep, i: int, order: Order) -> bytes:
        """A file of image i of a step."""
        image, loop = await self.pipeline.image(step, i), asyncio.get_running_loop()
        return await loop.run_in_executor(self._files, encode, image, order.file, order.compression)


class _News:
    """What is told of an order's steps."""

    def __init__(self, manifest: Manifest, order: Order) -> None:
        self._manifest, self._order = manifest, order
        self._codes: list[list[int]] = []
        self._told = time.perf_counter()

    def of(self, step: StreamStep) -> Update | None:
        """The update of a step, None if there is nothing to tell."""
        order, part, now = self._order, step.step.parts[0], time.perf_counter()
        codes: list[list[int]] = []
        if order.codes:
            before = self._codes or [[] for _ in step.codes]
            self._codes = [[*old, *new.tolist()] for old, new in zip(before, step.new_codes, strict=True)]
            if now - self._told >= CODES_EVERY:
                codes, self._codes, self._told = self._codes, [], now
        if not (order.steps or codes):
            return None
        size, kinds = self._manifest.size(step.settings.size), kinds_of(part) if order.steps else ""
        drafted = 0 if part.tree is None else part.tree.nodes - 1
        return Update(step.done, step.total, size.rows, size.columns, codes, kinds, drafted, str(step.settings.method))


class _Pictures:
    """Pictures of one order, made beside its decoding. seconds: that they took so far."""

    def __init__(self, drawer: LocalDrawer, order: Order) -> None:
        self._drawer, self._order, self.seconds, self._index = drawer, order, 0.0, 0
        self.under_way: deque[tuple[int, asyncio.Task[bytes]]] = deque()

    def begin(self, step: StreamStep) -> None:
        """Begin a picture if it is time for one: they are spaced evenly by codes. When many are under way, skip it."""
        count = self._order.partial
        due = min(count, step.done * (count + 1) // step.total)  # pictures that should have been begun by now
        if due > self._index and len(self.under_way) < MOST_DECODED:
            self.under_way.append((due - 1, asyncio.create_task(self.file(step, 0))))
        self._index = max(self._index, due)

    def finished(self) -> list[tuple[int, bytes]]:
        """Those that are there, in order."""
        found = []
        while self.under_way and self.under_way[0][1].done():
            index, task = self.under_way.popleft()
            found.append((index, task.result()))
        return found

    async def next(self) -> tuple[int, bytes]:
        """The next one, when it is there."""
        index, task = self.under_way.popleft()
        return index, await task

    async def file(self, step: StreamStep, i: int) -> bytes:
        """A file of image i of a step; what it takes is counted."""
        began = time.perf_counter()
        data = await self._drawer.picture(step, i, self._order)
        self.seconds += time.perf_counter() - began
        return data

    def cancel(self) -> None:
        """Nobody wants them any more."""
        for _, task in self.under_way:
            task.cancel()
            task.add_done_callback(lambda one: one.cancelled() or one.exception())  # nobody else asks


def kinds_of(part: RequestStep) -> str:
    """How each code of a pass came to be, one letter a code.

    `d`: drafted and accepted; `r`: drafted, and accepted by relaxation alone; `x`: redrawn by the target, which refused
    what was drafted there; `n`: drawn by the target where nothing was drafted.
    """
    tree, accepted = part.tree, part.acceptance
    if tree is None or accepted is None:
        return "n" * part.committed
    letters = ["r" if node in accepted.relaxed else "d" for node in accepted.path[1:]]
    letters.append("x" if tree.structure.children[accepted.path[-1]] else "n")
    return "".join(letters)[: part.committed]


def encode(image: Image, file: str, compression: int | None) -> bytes:
    """A picture as a file; PNG files hold what draws it again. compression: quality of jpeg and webp, 0 .. 100."""
    if file == "png":
        return png_bytes(image, image.info)
    buffer = io.BytesIO()
    image.save(buffer, file.upper(), quality=90 if compression is None else compression)
    return buffer.getvalue()
