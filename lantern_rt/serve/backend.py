"""Backends of the server, which generate images: their interface, and the backend with a pipeline in this process."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import __version__
from ..asynchronous import AsyncPipeline
from ..bundle.manifest import Size
from ..errors import LanternError
from ..methods import METHODS, MethodConfig
from ..requests import resolve_settings
from ..results import StreamStep
from ..runtime.drafting import SequenceStep
from ..runtime.engine import Bools
from ..text.tokenizers import load_bundle_tokenizer
from .protocol import Completion, Event, GenerationRequest, GenerationStats

ADMITTED: Event = {"type": "admitted"}  # the request is queued; not sent to clients


class BackendLoad(NamedTuple):
    """Numbers of images that are being generated, and that are queued."""

    num_running: int
    num_queued: int


class ImageBackend(Protocol):
    """Model that generates images for the server. `ray` has the implementation with replicas in other processes."""

    name: str

    @property
    def is_alive(self) -> bool:
        """Whether the model can generate images."""

    def describe(self) -> dict[str, Any]:
        """Return the JSON object `lantern` of the model's entry in `/v1/models`."""

    def measure_load(self) -> BackendLoad: ...

    def generate(self, request: GenerationRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        """Generate the images of a request within its deadline. Closing the generator cancels the request.

        Args:
            request: request with all defaults set.
            caller: API key or address of the client. The backend divides its capacity fairly between clients.

        Yields:
            `ADMITTED` when the request is queued, then the events that the request asks for, then a `Completion`.

        Raises:
            LanternError: as `AsyncPipeline.generate`.
        """


class LocalBackend:
    """Backend with a pipeline in this process. Without a name, the model has the name of its bundle."""

    def __init__(self, pipeline: AsyncPipeline, name: str = "") -> None:
        self.pipeline = pipeline
        self.manifest = pipeline.pipeline.bundle.manifest
        self.name = name or self.manifest.name
        self._description = self._make_description()

    @property
    def is_alive(self) -> bool:
        return self.pipeline.service.is_open

    def describe(self) -> dict[str, Any]:
        return self._description

    def _make_description(self) -> dict[str, Any]:
        manifest = self.manifest
        tokenizer = load_bundle_tokenizer(self.pipeline.pipeline.bundle)
        size = manifest.size().name
        methods = {name: method for name in METHODS if (method := self._find_accepted_method(method=name))}
        return {
            "version": __version__,
            "bundle": manifest.name,
            "digest": self.pipeline.pipeline.bundle.digest,
            "format_version": manifest.format_version,
            "size": size,
            "sizes": [entry.name for entry in manifest.sizes] or [size],
            "rows": manifest.grid_rows,
            "columns": manifest.grid_columns,
            "takes": manifest.condition.kind,
            "classes": manifest.condition.classes,
            "methods": [*methods],
            "parameters": {name: str(method).partition(":")[2] for name, method in methods.items()},
            "qualities": [name for name in manifest.presets if self._find_accepted_method(quality=name)],
            "sampling": manifest.sampling.model_dump(),
            "examples": self.pipeline.pipeline.bundle.example_prompts[:8],
            "words": tokenizer.words if tokenizer else (),
            "edits": manifest.can_edit_images,
            "sources": manifest.source is not None,
            "images": manifest.makes_images,
        }

    def _find_accepted_method(self, **options: str) -> MethodConfig | None:
        """Return the method of a request with an option `method` or `quality`; None if it would be rejected."""
        try:
            method = self.pipeline.pipeline.adapt_settings_to_engines(resolve_settings(self.manifest, options)).method
            self.pipeline.service.check_node_limit(method)
        except LanternError:
            return None
        return method

    def measure_load(self) -> BackendLoad:
        service = self.pipeline.service
        num_running_images = service.num_running_images
        return BackendLoad(num_running_images, max(0, service.num_images - num_running_images))

    async def generate(self, request: GenerationRequest, caller: str = "") -> AsyncGenerator[Event | Completion, None]:
        began = time.perf_counter()
        request = request.adapt_to_bundle(self.pipeline.pipeline.bundle)
        num_partial_images = request.num_partial_images
        updates = self.pipeline.stream_updates(
            **request.make_pipeline_options(),
            wants_all_steps=bool(request.steps or num_partial_images),
            caller=caller,
            deadline=math.inf if request.deadline is None else request.deadline,
        )
        image_seconds = 0.0  # time to decode and encode partial images
        num_sent = 0  # partial images sent, spaced evenly by tokens
        async with aclosing(updates):
            queued, _ = await anext(updates)
            yield ADMITTED
            prepared = queued.prepared_request
            images = prepared.images
            size = prepared.settings.image_size
            codes = images[0].preserved_codes
            preserved = np.zeros(prepared.plan.layout.num_codes, np.bool_)  # cells that an edit preserves
            if codes is not None:
                preserved = codes >= 0
            async for _, step in updates:
                assert step is not None
                last = step
                if request.steps:
                    yield make_step_event(step, size, preserved)
                is_new = step.cells[0][~preserved] >= 0
                due = min(num_partial_images, int(is_new.sum()) * (num_partial_images + 1) // len(is_new))
                if due > num_sent and step.stats is None:
                    num_sent = due
                    before = time.perf_counter()
                    file_bytes = await request.encode_file(self.pipeline, prepared, step, 0)
                    image_event = request.make_image_event("partial_image", size, step.codes[0], file_bytes)
                    image_seconds += time.perf_counter() - before
                    yield image_event | {"partial_image_index": num_sent - 1}
            before = time.perf_counter()
            files = [await request.encode_file(self.pipeline, prepared, last, i) for i in range(len(images))]
            now = time.perf_counter()
            num_preserved = int(preserved.sum()) * len(images)
            new_tokens = last.total - num_preserved
            stats = last.stats
            assert stats is not None
            generation_stats = GenerationStats(
                model=self.name,
                method=str(last.settings.method),
                quality=last.settings.quality,
                exact=last.settings.method.exact,
                seeds=[image.seed for image in images],
                tokens_per_forward_pass=stats.tokens_per_forward_pass,
                target_passes=sum(image.target_passes for image in stats.per_image),
                realised_tvd_per_token=stats.realised_tvd * len(images) / new_tokens,
                seconds=now - began,
                queue_seconds=queued.queue_seconds or 0.0,
                picture_seconds=image_seconds + now - before,
            )
            prompt_tokens = sum(int(image.prefix.cond.is_real_token.sum()) for image in images)
            yield Completion(files, last.codes, size, prompt_tokens, new_tokens, generation_stats, num_preserved)


def make_step_event(step: StreamStep, size: Size, preserved: Bools) -> Event:
    """Create the stream event of one decoding step, for the first image of a request.

    The field `kinds` has one letter per new token: `k` if an edit preserves it, else that of `classify_new_tokens`.
    From `done`, the number of tokens after the step, a client knows the positions of the new tokens, even if another
    replica has started the image again.
    """
    part = step.parts[0]
    kinds = classify_new_tokens(part)
    num_codes = len(step.codes[0])
    is_preserved = preserved[num_codes - len(kinds) : num_codes]
    kinds = "".join("k" if kept else kind for kind, kept in zip(kinds, is_preserved, strict=True))
    return {
        "type": "lantern.step",
        "done": step.done,
        "total": step.total,
        "rows": size.rows,
        "columns": size.columns,
        "first_codes": size.first_codes,
        "kinds": kinds,
        "drafted": 0 if part.tree is None else part.tree.num_nodes - 1,
        "method": str(step.settings.method),
    }


def classify_new_tokens(sequence_step: SequenceStep) -> str:
    """Return the origin of each new token, as one letter per token.

    - `d`: draft token, accepted
    - `r`: draft token, accepted only because acceptance is relaxed
    - `x`: token that the target sampled after it rejected a draft token
    - `n`: token that the target sampled without a draft token, or token that an edit preserved
    """
    tree = sequence_step.tree
    acceptance = sequence_step.acceptance
    if tree is None or acceptance is None:
        return "n" * len(sequence_step.codes)
    letters = ["r" if node in acceptance.relaxed_nodes else "d" for node in acceptance.path[1:]]
    if acceptance.bonus_token is not None:
        letters.append("x" if tree.tree_structure.children[acceptance.path[-1]] else "n")
    return "".join(letters).ljust(len(sequence_step.codes), "n")
