"""Methods in turns on the same prompts and seeds: the one loop behind bench, eval and the recipes.

Every turn runs all methods on the same request, one after another, each turn beginning with another one, so that a slow
moment of the host hits all of them alike. Likelihoods are computed outside the timed part.
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
from ..pipeline import Pipeline
from ..requests import SAMPLING, Settings, resolve_settings
from ..results import Ints
from ..runtime.likelihood import Likelihood
from ..runtime.statistics import Statistics

PLAIN = "ar"


@dataclass(frozen=True)
class ComparedMethod:
    """A method to run: its label, and the options of a request that carry it out, sampling included."""

    label: str
    options: Mapping[str, Any]


def parse_methods(
    labels: Sequence[str], sampling: Mapping[str, Any], bundle: Bundle, qualities: Sequence[str] = ()
) -> list[ComparedMethod]:
    """Methods from strings such as `lantern++:lambda=3:tree=chain-4`, then qualities; `ar` is always the first.

    Args:
        labels: method strings.
        sampling: guidance, temperature and filters of all.
        bundle: that runs them.
        qualities: names of presets.

    Raises:
        RequestError: a method string is wrong, or is there twice.
    """
    names = [*(label.strip() for label in labels), *qualities]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(field="method", found=f"{twice!r} twice", expected="different ones")
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    options = ["quality" if name in qualities else "method" for name in names]
    methods = [ComparedMethod(name, {**sampling, option: name}) for name, option in zip(names, options, strict=True)]
    for method in methods:
        resolve_settings(bundle.manifest, method.options)
    return methods


@dataclass(frozen=True)
class Run:
    """One call of one method.

    Args:
        method: that ran.
        settings: that it had.
        codes: `[cells]` of each image.
        images: the pictures; none where they were not painted.
        statistics: of the decode.
        seconds: of the whole call, pictures included if they were painted.
        likelihoods: of each image's codes, once they are computed.
    """

    method: ComparedMethod
    settings: Settings
    codes: list[Ints]
    images: list[Image]
    statistics: Statistics
    seconds: float
    likelihoods: list[Likelihood] = field(default_factory=list)

    @property
    def tvd_per_token(self) -> float:
        """Mean total variation given away per token."""
        return self.statistics.realised_tvd / len(self.codes[0])


def run(pipeline: Pipeline, method: ComparedMethod, request: Mapping[str, Any], make_images: bool = True) -> Run:
    """Run one method on one request."""
    began = time.perf_counter()
    (step,) = deque(pipeline.stream(**request, **method.options), maxlen=1)
    images = [step.image(i) for i in range(len(step.codes))] if make_images else []
    seconds = time.perf_counter() - began
    assert step.stats is not None
    return Run(method, step.settings, step.codes, images, step.stats, seconds)


def add_likelihoods(pipeline: Pipeline, one: Run, request: Mapping[str, Any]) -> Run:
    """The run with the likelihoods that the target gives its codes."""
    sampling = {name: getattr(one.settings.sampling, name) for name in SAMPLING}
    return replace(one, likelihoods=pipeline.likelihoods(one.codes, **request, **sampling, method=PLAIN))


def run_in_turns(
    pipeline: Pipeline,
    methods: Sequence[ComparedMethod],
    requests: Iterable[Mapping[str, Any]],
    make_images: bool = True,
    score: bool = True,
    progress: Progress = lambda what, done, total: None,
    total: int = 0,
) -> Iterator[list[Run]]:
    """A turn per request: the runs of all methods, in the order of `methods`, whichever went first.

    Args:
        pipeline: that runs them.
        methods: to run.
        requests: arguments of pipeline calls.
        make_images: whether to make the pictures.
        score: whether to compute likelihoods, after the turn.
        progress: progress callback.
        total: images of a method, for that.
    """
    count = len(methods)
    drawn = 0
    progress("images", drawn, count * total)
    for turn, request in enumerate(requests):
        by_method: dict[int, Run] = {}
        for i in range(count):
            number = (turn + i) % count
            by_method[number] = run(pipeline, methods[number], request, make_images)
            drawn += len(by_method[number].codes)
            progress("images", drawn, count * total)
        runs = [by_method[number] for number in range(count)]
        yield [add_likelihoods(pipeline, one, request) for one in runs] if score else runs
