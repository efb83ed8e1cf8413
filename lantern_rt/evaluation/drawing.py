"""Ways of drawing by name, and the same prompts and seeds drawn in each of them.

Does not know features, statistics or reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from ..bundle.manifest import Manifest
from ..errors import RequestError
from ..methods import parse_method
from ..pipeline import Pipeline
from ..requests import resolve_settings
from ..results import StreamStep
from ..runtime.likelihood import Likelihood

Show = Callable[[str, int, int], None]  # what is being done, how many pictures are done, of how many

PLAIN = "ar"


@dataclass(frozen=True)
class Way:
    """A method with its parameters; the label is what the user wrote."""

    label: str
    options: dict[str, Any]


def parse_ways(text: str, sampling: dict[str, Any], manifest: Manifest) -> list[Way]:
    """Ways from `ar,sjd,lantern++:lambda=3:tree=chain-4`, plain decoding first, asked for or not.

    sampling: guidance, temperature and filters, the same for all ways. RequestError says what a way gets wrong.
    """
    labels = [label.strip() for label in text.split(",")]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise RequestError(f"methods: found {twice[0]!r} twice, expected different ones")
    ways = [_parse_way(label, sampling) for label in (PLAIN, *(label for label in labels if label != PLAIN))]
    for way in ways:
        resolve_settings(manifest, way.options)
    return ways


def _parse_way(label: str, sampling: dict[str, Any]) -> Way:
    method, parameters = parse_method(label)
    return Way(label, {**sampling, "method": method, **parameters})


@dataclass(frozen=True)
class Subjects:
    """What is drawn: prompts or class ids, each with `seeds` seeds. All pictures have seeds of their own."""

    prompts: Sequence[str] | None
    class_ids: Sequence[int] | None
    seeds: int
    first_seed: int

    @property
    def labels(self) -> list[str]:
        """Every subject as text."""
        return list(self.prompts) if self.prompts is not None else [f"class {i}" for i in self.class_ids or ()]

    @property
    def pictures(self) -> int:
        """How many pictures one way draws."""
        return len(self.labels) * self.seeds

    def batches(self, images: int, offset: int) -> Iterator[dict[str, Any]]:
        """Arguments of pipeline calls for all pictures, subject by subject, about `images` at a time; `offset` is
        added to all seeds."""
        name = "prompts" if self.prompts is not None else "class_ids"
        listed: Sequence[Any] = self.prompts if self.prompts is not None else self.class_ids or ()
        together, several = max(1, images // self.seeds), min(self.seeds, images)
        for start in range(0, len(listed), together):
            chosen = listed[start : start + together]
            for seed in range(0, self.seeds, several):
                seeds = [self.first_seed + offset + (start + i) * self.seeds + seed for i in range(len(chosen))]
                yield {name: chosen, "seed": seeds, "num_images": min(several, self.seeds - seed)}


@dataclass(frozen=True)
class Picture:
    """One picture. codes_per_pass: per target pass, prefill included. tvd: total variation given away per code.
    likelihood: of the codes in the target's eyes; None where not asked for."""

    image: Image
    seed: int
    codes_per_pass: float
    tvd: float
    likelihood: Likelihood | None


@dataclass(frozen=True)
class Drawn:
    """All pictures of one way, subject by subject. seconds: decoding and painting, in all."""

    way: Way
    settings: dict[str, Any]
    choice: str | None
    pictures: list[Picture]
    seconds: float


def draw(pipeline: Pipeline, way: Way, subjects: Subjects, images: int, show: Show, other_seeds: bool = False) -> Drawn:
    """Draw every subject, `images` pictures at a time. other_seeds: with seeds that no way uses, and unscored."""
    pictures: list[Picture] = []
    seconds = 0.0
    for request in subjects.batches(images, subjects.pictures if other_seeds else 0):
        began = time.perf_counter()
        last, passes, tvd = _decode(pipeline, request, way.options)
        painted = [last.image(i) for i in range(len(last.codes))]
        seconds += time.perf_counter() - began
        seeds = [seed + i for seed in request["seed"] for i in range(request["num_images"])]
        scores: list[Likelihood | None] = [None] * len(seeds)
        if not other_seeds:
            scores = [*pipeline.likelihoods(last.codes, **request, **way.options)]
        for i, codes in enumerate(last.codes):
            given = tvd[i] / len(codes)
            pictures.append(Picture(painted[i], seeds[i], len(codes) / passes[i], given, scores[i]))
        show(f"{way.label}, other seeds" if other_seeds else way.label, len(pictures), subjects.pictures)
    return Drawn(way, last.settings.as_dict(), last.settings.choice, pictures, seconds)


def _decode(
    pipeline: Pipeline, request: dict[str, Any], options: dict[str, Any]
) -> tuple[StreamStep, list[int], list[float]]:
    """The last step; per picture target passes, and summed total variation."""
    passes: list[int] = []
    tvd: list[float] = []
    for step in pipeline.stream(**request, **options):
        if not passes:
            passes, tvd = [0] * len(step.codes), [0.0] * len(step.codes)
        for part in step.step.parts:
            passes[part.request] += 1
            if part.acceptance is not None:
                tvd[part.request] += part.acceptance.realised_tvd
    return step, passes, tvd
