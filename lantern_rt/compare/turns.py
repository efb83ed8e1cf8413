"""Methods in turns on the same prompts and seeds: the one loop behind bench, eval and the recipes.

Every turn runs all methods on the same request, one after another, each turn beginning with another one, so that a slow
moment of the host hits all of them alike. Likelihoods are computed outside the timed part.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from ..bundle.files import Bundle
from ..engines.contracts import Progress
from ..errors import RequestError
from ..inputs import read_plain_file, reading, whole
from ..pipeline import Pipeline
from ..prompts import bundle_tokenizer, text_requests
from ..requests import SAMPLING, Settings, check_request, resolve_settings
from ..results import Ints
from ..runtime.likelihood import Likelihood
from ..runtime.statistics import Statistics
from ..text.embeddings import read_embeddings

PLAIN = "ar"
MAX_PROMPTS = 100_000
CLASSES = 64  # class ids where no count is given, spread over all
_PROMPTS_LIMIT = 1 << 24  # bytes of a file


@dataclass(frozen=True)
class Prompts:
    """What images are drawn of.

    Args:
        kind: `prompts`, `class_ids` or `embeddings`, as a pipeline call names them.
        items: texts, ids, or pairs of embeddings `[tokens, dim]` and mask `[tokens]`.
    """

    kind: str
    items: Sequence[Any]

    @property
    def labels(self) -> list[str]:
        """Each as text."""
        if self.kind == "embeddings":
            return [f"embedding {i}" for i in range(len(self.items))]
        return [item if isinstance(item, str) else f"class {item}" for item in self.items]

    def request(self, index: int, images: int, first_seed: int = 10_000) -> dict[str, Any]:
        """Arguments of a pipeline call for batch `index` of an endless row: the prompts over and over, new seeds."""
        return self._arguments(range(index * images, (index + 1) * images), 1, first_seed)

    def requests(self, images: int, seeds: int, first_seed: int) -> Iterator[dict[str, Any]]:
        """Arguments of pipeline calls for all prompts with `seeds` images each, `images` at a time."""
        count = len(self.items) * seeds
        for start in range(0, count, images):
            yield self._arguments(range(start, min(start + images, count)), seeds, first_seed)

    def _arguments(self, numbers: range, seeds: int, first_seed: int) -> dict[str, Any]:
        """For images of these numbers; embeddings are stacked: `[images, tokens, dim]` and `[images, tokens]`."""
        chosen: Any = [self.items[number // seeds % len(self.items)] for number in numbers]
        if self.kind == "embeddings":
            chosen = tuple(map(np.stack, zip(*chosen, strict=True)))
        return {self.kind: chosen, "seed": [first_seed + number for number in numbers]}


def read_bundle_prompts(bundle: Bundle, path: Path | None = None, count: int | None = None) -> Prompts:
    """Read prompts, each checked to be one that a bundle can draw.

    Args:
        bundle: what it takes decides what is read.
        path: a text file, one prompt a line, by default the bundle's own; for text embeddings an .npz of them.
        count: the first so many at most; class ids are spread over all classes. By default all, of classes 64.

    Raises:
        RequestError: the bundle takes nothing of the kind, there are none, or one cannot be drawn: `file:line`.
    """
    manifest = bundle.manifest
    kind = manifest.condition.kind
    most = whole("count", count, CLASSES if kind == "class" else MAX_PROMPTS, 1, MAX_PROMPTS)
    if kind == "class":
        if path is not None:
            raise RequestError(f"bundle {manifest.name} takes class ids", field="prompts", remedy="leave --prompts out")
        classes = manifest.condition.classes or 1
        number = min(most, classes)
        return Prompts("class_ids", [i * classes // number for i in range(number)])
    if path is None and "prompts" in manifest.files:
        path = bundle.path("prompts")
    if path is None:
        remedy = "give --prompts FILE"
        if kind == "embeddings":
            remedy += " with an .npz of text embeddings, or export it with --text-encoder"
        raise RequestError(f"bundle {manifest.name} has no prompts of its own", field="prompts", remedy=remedy)
    if kind == "embeddings":
        rows, masks = read_embeddings(path)
        check_request(manifest, None, embeddings=(rows, masks))
        return Prompts("embeddings", list(zip(rows, masks, strict=True))[:most])
    prompts = read_prompts(path)[:most]
    tokenizer = bundle_tokenizer(bundle)
    assert tokenizer is not None
    for line, prompt in prompts:
        try:
            text_requests(manifest.condition, tokenizer, manifest.size(), [prompt])
        except RequestError as error:
            error.field = f"{path}:{line}"
            raise
    return Prompts("prompts", [prompt for _, prompt in prompts])


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """Lines of a text file that are not empty, with their numbers. Raises: RequestError: there are none."""
    with reading(path, "a text file of prompts", RequestError, "give one prompt a line, in UTF-8"):
        text = read_plain_file(path, _PROMPTS_LIMIT).decode()
    prompts = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise RequestError(field=f"prompts {path}", found="no prompt", expected="one a line")
    return prompts


@dataclass(frozen=True)
class MethodRun:
    """A method to run: its label, and the options of a request that carry it out, sampling included."""

    label: str
    options: Mapping[str, Any]


def parse_methods(
    labels: Sequence[str], sampling: Mapping[str, Any], bundle: Bundle, qualities: Sequence[str] = ()
) -> list[MethodRun]:
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
    methods = [MethodRun(name, {**sampling, option: name}) for name, option in zip(names, options, strict=True)]
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

    method: MethodRun
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


def run(pipeline: Pipeline, method: MethodRun, request: Mapping[str, Any], paint: bool = True) -> Run:
    """Run one method on one request."""
    began = time.perf_counter()
    (step,) = deque(pipeline.stream(**request, **method.options), maxlen=1)
    images = [step.image(i) for i in range(len(step.codes))] if paint else []
    seconds = time.perf_counter() - began
    assert step.stats is not None
    return Run(method, step.settings, step.codes, images, step.stats, seconds)


def scored(pipeline: Pipeline, one: Run, request: Mapping[str, Any]) -> Run:
    """The run with the likelihoods that the target gives its codes."""
    sampling = {name: getattr(one.settings.sampling, name) for name in SAMPLING}
    return replace(one, likelihoods=pipeline.likelihoods(one.codes, **request, **sampling, method=PLAIN))


def take_turns(
    pipeline: Pipeline,
    methods: Sequence[MethodRun],
    requests: Iterable[Mapping[str, Any]],
    paint: bool = True,
    score: bool = True,
    progress: Progress = lambda what, done, total: None,
    total: int = 0,
) -> Iterator[list[Run]]:
    """A turn per request: the runs of all methods, in the order of `methods`, whichever went first.

    Args:
        pipeline: that runs them.
        methods: to run.
        requests: arguments of pipeline calls.
        paint: whether to make the pictures.
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
            by_method[number] = run(pipeline, methods[number], request, paint)
            drawn += len(by_method[number].codes)
            progress("images", drawn, count * total)
        runs = [by_method[number] for number in range(count)]
        yield [scored(pipeline, one, request) for one in runs] if score else runs
