"""Loop that runs decoding methods in turns on the same prompts and seeds, for `bench`, `eval` and the recipes.

A turn runs every method once, on the same request. Each turn starts with a different method, so that a slow moment of
the host affects all methods equally. Likelihoods are computed after the time was measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL.Image import Image

from ..bundle.files import Bundle
from ..engines.contracts import Progress
from ..errors import RequestError
from ..methods import SAMPLING
from ..pipeline import Pipeline
from ..requests import GenerationSettings, resolve_settings
from ..results import Ints
from ..runtime.likelihood import Likelihood
from ..runtime.statistics import Statistics

PLAIN = "ar"


@dataclass(frozen=True)
class ComparedMethod:
    """Decoding method to compare: its label in reports, and the options of a pipeline call that select it."""

    label: str
    options: Mapping[str, Any]


def parse_methods(
    labels: Sequence[str], sampling_options: Mapping[str, Any], bundle: Bundle, qualities: Sequence[str] = ()
) -> list[ComparedMethod]:
    """Return the methods to compare, which a bundle must support: `ar` first, then method strings and qualities."""
    names = [*(label.strip() for label in labels), *qualities]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RequestError(field="method", found=f"{repeated!r} twice", expected="each method once")
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    methods = [
        ComparedMethod(name, {**sampling_options, "quality" if name in qualities else "method": name}) for name in names
    ]
    for method in methods:
        resolve_settings(bundle.manifest, method.options)
    return methods


@dataclass(frozen=True)
class MethodRun:
    """Result of one pipeline call with one method."""

    method: ComparedMethod
    settings: GenerationSettings
    codes: list[Ints]  # [cells] of each image
    images: list[Image]  # empty if the bundle has no image decoder
    statistics: Statistics
    seconds: float  # of the call, with the decoding of images
    likelihoods: list[Likelihood] = field(default_factory=list)  # of each image; empty before `add_likelihoods`

    @property
    def tvd_per_token(self) -> float:
        """Total variation distance between the distribution of samples and the target's, mean per token."""
        return self.statistics.realised_tvd / len(self.codes[0])


def tokens_per_pass(runs: Sequence[MethodRun]) -> list[float]:
    """Return, for every image, the mean number of tokens per forward pass of the target, prefill included."""
    length = len(runs[0].codes[0])
    return [length / image.target_passes for run in runs for image in run.statistics.per_image]


def run_method(pipeline: Pipeline, method: ComparedMethod, request: Mapping[str, Any]) -> MethodRun:
    """Run one method on the prompts and seeds of a request, and measure the time of the pipeline call."""
    began = time.perf_counter()
    (step,) = deque(pipeline.stream(**request, **method.options), maxlen=1)
    images = [step.image(i) for i in range(len(step.codes))] if pipeline.bundle.manifest.makes_images else []
    seconds = time.perf_counter() - began
    assert step.stats is not None
    return MethodRun(method, step.settings, step.codes, images, step.stats, seconds)


def add_likelihoods(pipeline: Pipeline, run: MethodRun, request: Mapping[str, Any]) -> MethodRun:
    """Return a copy of the run of a request, with the likelihoods of its codes under the target model."""
    sampling = {name: getattr(run.settings.sampling, name) for name in SAMPLING}
    return replace(run, likelihoods=pipeline.likelihoods(run.codes, **request, **sampling, method=PLAIN))


def run_methods_in_turns(
    pipeline: Pipeline,
    methods: Sequence[ComparedMethod],
    requests: Iterable[Mapping[str, Any]],
    with_likelihoods: bool = True,
    progress: Progress = lambda description, done, total_images: None,
    total_images: int = 0,
) -> Iterator[list[MethodRun]]:
    """Run all methods on each request, and yield one run per method. `total_images`, of a method, is for `progress`."""
    count = len(methods)
    num_images = 0
    progress("images", num_images, count * total_images)
    for turn, request in enumerate(requests):
        run_of_method: dict[int, MethodRun] = {}
        for i in range(count):
            index = (turn + i) % count
            run_of_method[index] = run_method(pipeline, methods[index], request)
            num_images += len(run_of_method[index].codes)
            progress("images", num_images, count * total_images)
        runs = [run_of_method[index] for index in range(count)]
        yield [add_likelihoods(pipeline, unscored, request) for unscored in runs] if with_likelihoods else runs
