"""What draws the images of a server: a pipeline of this process; replicas in other ones are in `ray.py`."""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from PIL.Image import Image

from ..asynchronous import AsyncPipeline
from ..methods import METHODS
from ..output.images import png_bytes
from ..results import StreamStep
from ..runtime.drafting import RequestStep
from ..runtime.engine import Bools
from .protocol import Completion, Event, Figures, ImagesRequest, image_event

ADMITTED: Event = {"type": "admitted"}  # a request has its place; clients are not sent this


class Load(NamedTuple):
    """Images that share passes now, and those that wait."""

    running: int
    waiting: int


class ImageBackend(Protocol):
    """Whatever draws images for a server: one model, of this name."""

    name: str

    @property
    def alive(self) -> bool:
        """Whether it can draw."""

    def describe(self) -> dict[str, Any]:
        """What `/v1/models` says of the model, ready for JSON."""

    def load(self) -> Load:
        """What there is to do now."""

    def generate(self, request: ImagesRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        """Draw a request within its deadline; close the generator to cancel. caller: who asks, by key or address.

        Yields: `ADMITTED`, then the events that the request wants, then a `Completion`.
        Raises: LanternError: as `AsyncPipeline.generate`.
        """


class LocalBackend:
    """Draws with a pipeline of this process."""

    def __init__(self, pipeline: AsyncPipeline) -> None:
        self.pipeline = pipeline
        self.manifest = pipeline.pipeline.bundle.manifest
        self.name = self.manifest.name

    @property
    def alive(self) -> bool:
        return self.pipeline.service.open

    def describe(self) -> dict[str, Any]:
        manifest = self.manifest
        methods = [name for name, kind in METHODS.items() if manifest.drafters or not kind.needs_drafter]
        size = manifest.size().name
        return {
            "size": size,
            "sizes": [one.name for one in manifest.sizes] or [size],
            "rows": manifest.grid_rows,
            "columns": manifest.grid_columns,
            "takes": manifest.condition.kind,
            "classes": manifest.condition.classes,
            "methods": methods,
            "qualities": [*manifest.presets],
            "sampling": manifest.sampling.model_dump(),
            "examples": self.pipeline.pipeline.bundle.examples[:8],
            "edits": "vq_encoder" in manifest.files,
        }

    def load(self) -> Load:
        service = self.pipeline.service
        running = service.running
        return Load(running, max(0, service.images - running))

    async def generate(self, request: ImagesRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        began = time.perf_counter()
        image_seconds = 0.0  # seconds
        partial = 0  # pictures on the way so far, spaced evenly by codes
        count = request.partial_images or 0
        every_step = bool(request.steps or count)
        within = math.inf if request.deadline is None else request.deadline
        updates = self.pipeline.updates(**request.options(), steps=every_step, caller=caller, deadline=within)
        async with aclosing(updates):
            ticket, _ = await anext(updates)
            yield ADMITTED
            edit = ticket.request.images[0].edit
            preserved = None if edit is None or edit.kept is None else edit.kept >= 0  # cells
            async for _, step in updates:
                assert step is not None
                last = step
                size = self.manifest.size(step.settings.size)
                if request.steps:
                    yield step_event(step, size.rows, size.columns, preserved)
                done, total = step.done, step.total
                if preserved is not None:
                    done, total = (int(own[~preserved].sum()) for own in (step.cells[0] >= 0, ~preserved))
                due = min(count, done * (count + 1) // total)
                if due > partial and step.stats is None:
                    partial, before = due, time.perf_counter()
                    event = image_event("partial_image", request, size.name, await self._encode(request, step, 0))
                    image_seconds += time.perf_counter() - before
                    yield event | {"partial_image_index": partial - 1}
            before = time.perf_counter()
            files = [await self._encode(request, last, i) for i in range(len(last.codes))]
            now = time.perf_counter()
            images = ticket.request.images
            num_preserved = 0 if preserved is None else int(preserved.sum()) * len(images)
            stats = last.stats
            assert stats is not None
            figures = Figures(
                model=self.name,
                method=str(last.settings.method),
                quality=last.settings.quality,
                exact=last.settings.method.exact,
                seeds=[image.seed for image in images],
                tokens_per_forward_pass=stats.tokens_per_forward_pass,
                target_passes=sum(one.target_passes for one in stats.per_image),
                realised_tvd_per_token=stats.realised_tvd * len(images) / (last.total - num_preserved),
                seconds=now - began,
                queue_seconds=ticket.waited or 0.0,
                picture_seconds=image_seconds + now - before,
            )
            tokens = sum(int(image.real[0].sum()) for image in images)
            yield Completion(files, size.name, tokens, last.total - num_preserved, figures, num_preserved)

    async def _encode(self, request: ImagesRequest, step: StreamStep, i: int) -> bytes:
        image = await self.pipeline.image(step, i)
        return await asyncio.to_thread(encode_image, image, request.format, request.output_compression)


def step_event(step: StreamStep, rows: int, columns: int, preserved: Bools | None = None) -> Event:
    """What a pass gave the first image, on a grid of rows and columns; preserved: cells of which it keeps codes.

    `kinds` has a letter for each new code, `done` counts codes with those of this pass: a client that places them by it
    is right also where a picture begins anew.
    """
    part = step.parts[0]
    kinds = token_kinds(part)
    if preserved is not None:
        own = preserved[len(step.codes[0]) - len(kinds) : len(step.codes[0])]
        kinds = "".join("k" if kept else kind for kind, kept in zip(kinds, own, strict=True))
    return {
        "type": "lantern.step",
        "done": step.done,
        "total": step.total,
        "rows": rows,
        "columns": columns,
        "kinds": kinds,
        "drafted": 0 if part.tree is None else part.tree.nodes - 1,
        "method": str(step.settings.method),
    }


def token_kinds(part: RequestStep) -> str:
    """How each code of a pass came to be, one letter a code.

    `d`: drafted and accepted; `r`: drafted, and accepted by relaxation alone; `x`: redrawn by the target, which refused
    what was drafted there; `n`: drawn by the target where nothing was drafted, or kept.
    """
    tree, acceptance = part.tree, part.acceptance
    if tree is None or acceptance is None:
        return "n" * len(part.codes)
    letters = ["r" if node in acceptance.relaxed else "d" for node in acceptance.path[1:]]
    if acceptance.bonus is not None:
        letters.append("x" if tree.structure.children[acceptance.path[-1]] else "n")
    return "".join(letters).ljust(len(part.codes), "n")


def encode_image(image: Image, file: str, compression: int | None) -> bytes:
    """A picture as a file.

    Args:
        image: whose `info` a PNG file holds, to draw it again.
        file: png, jpeg or webp.
        compression: quality of jpeg and webp, 0 .. 100.
    """
    if file == "png":
        return png_bytes(image, image.info)
    buffer = io.BytesIO()
    image.save(buffer, file.upper(), quality=90 if compression is None else compression)
    return buffer.getvalue()
