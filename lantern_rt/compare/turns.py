"""These prompts, these methods, these seeds, in turns: the one loop behind bench, tune, eval and the recipes.

Every turn runs all methods on the same request, one after another, each turn beginning with another one, so that a slow
moment of the host hits all of them alike. Likelihoods are computed outside the timed part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from ..bundle.files import Bundle
from ..checks import whole
from ..errors import RequestError
from ..methods import parse_method
from ..pipeline import Pipeline
from ..requests import SAMPLING, Settings, check_request, resolve_settings
from ..results import Ints
from ..runtime.likelihood import Likelihood
from ..runtime.statistics import Statistics
from ..text.embeddings import read_embeddings
from ..user_files import read_plain_file, reading

PLAIN = "ar"
_PROMPTS_LIMIT = 1 << 24  # bytes of a file
CLASSES = 64  # class ids drawn where nothing is said, spread over all


@dataclass(frozen=True)
class Subjects:
    """What is drawn: `items` of `kind` `prompts`, `class_ids` or `embeddings`, these each with its mask."""

    kind: str
    items: Sequence[Any]

    @property
    def labels(self) -> list[str]:
        """Every subject as text."""
        if self.kind == "embeddings":
            return [f"embedding {i}" for i in range(len(self.items))]
        return [one if isinstance(one, str) else f"class {one}" for one in self.items]

    def request(self, index: int, images: int, first_seed: int = 10_000) -> dict[str, Any]:
        """Arguments of a pipeline call for batch `index` of an endless row: the subjects over and over, new seeds."""
        numbers = range(index * images, (index + 1) * images)
        chosen = [self.items[n % len(self.items)] for n in numbers]
        return {self.kind: self._given(chosen), "seed": [first_seed + n for n in numbers]}

    def requests(self, images: int, seeds: int, first_seed: int) -> Iterator[dict[str, Any]]:
        """Arguments of pipeline calls for all subjects with `seeds` images each, about `images` at a time."""
        together, several = max(1, images // seeds), min(seeds, images)
        for start in range(0, len(self.items), together):
            chosen = self.items[start : start + together]
            for seed in range(0, seeds, several):
                firsts = [first_seed + (start + i) * seeds + seed for i in range(len(chosen))]
                yield {self.kind: self._given(chosen), "seed": firsts, "num_images": min(several, seeds - seed)}

    def _given(self, chosen: Sequence[Any]) -> Any:
        """As a call takes it."""
        return tuple(map(np.stack, zip(*chosen, strict=True))) if self.kind == "embeddings" else chosen


def subjects_of(
    bundle: Bundle, prompts: Path | None, count: int | None = None, embeddings: Path | None = None
) -> Subjects:
    """Prompts of a file or of the bundle, embeddings of a file, or class ids; `count`: only so many, of classes spread.

    Raises: RequestError: the bundle takes nothing of the kind, or there are fewer.
    """
    manifest, condition = bundle.manifest, bundle.manifest.condition
    if condition.kind == "embeddings":
        if prompts is not None or embeddings is None:
            cure = "give --embeddings FILE.npz, or export it with --text-encoder to give prompts"
            raise RequestError(f"bundle {manifest.name} takes text embeddings; {cure}")
        rows, masks = read_embeddings(embeddings)
        check_request(manifest, None, embeddings=(rows, masks))
        number = whole("count", count, len(rows), 1, len(rows))
        return Subjects("embeddings", list(zip(rows, masks, strict=True))[:number])
    if embeddings is not None:
        takes = "class ids" if condition.kind == "class" else "prompts"
        raise RequestError(f"embeddings: bundle {manifest.name} takes {takes}; leave --embeddings out")
    if condition.kind == "class":
        if prompts is not None:
            raise RequestError(f"prompts: bundle {manifest.name} takes class ids; leave --prompts out")
        classes = condition.classes or 1
        number = whole("count", count, min(CLASSES, classes), 1, classes)
        return Subjects("class_ids", [i * classes // number for i in range(number)])
    path = prompts or (bundle.path("prompts") if "prompts" in manifest.files else None)
    if path is None:
        raise RequestError(f"bundle {manifest.name} has no prompts to draw; give --prompts FILE")
    listed = read_prompts(path)
    return Subjects("prompts", listed[: whole("count", count, len(listed), 1, len(listed))])


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises: RequestError: it cannot be read, or has none."""
    with reading(path, "a text file of prompts", RequestError, "give one prompt a line, in UTF-8"):
        text = read_plain_file(path, _PROMPTS_LIMIT).decode()
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise RequestError(f"prompts {path}: found no prompt, expected one a line")
    return prompts


@dataclass(frozen=True)
class Contender:
    """A method to run: its label, and the request options that carry it out, sampling included."""

    label: str
    options: Mapping[str, Any]


def parse_contenders(text: str, sampling: Mapping[str, Any], bundle: Bundle) -> list[Contender]:
    """Contenders from `ar,sjd,lantern++:lambda=3:tree=chain-4`, plain decoding first, asked for or not.

    sampling: guidance, temperature and filters of all.

    Raises: RequestError: a method string is wrong, or is there twice.
    """
    labels = [label.strip() for label in text.split(",")]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise RequestError(f"methods: found {twice[0]!r} twice, expected different ones")
    contenders = []
    for label in (PLAIN, *(label for label in labels if label != PLAIN)):
        method, given = parse_method(label)
        contenders.append(Contender(label, {**sampling, "method": method, **given}))
        resolve_settings(bundle.manifest, contenders[-1].options)
    return contenders


@dataclass(frozen=True)
class Run:
    """One call: seconds of the whole of it, images included if painted, and what it gave, image by image."""

    contender: Contender
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


def run(
    pipeline: Pipeline,
    contender: Contender,
    request: Mapping[str, Any],
    paint: bool = True,
    deadline: float = math.inf,
) -> Run:
    """Run one method on one request.

    Raises: TimeoutError: it was not done by `deadline`, of `time.monotonic`.
    """
    began = time.perf_counter()
    for step in pipeline.stream(**request, **contender.options):
        if step.stats is None and time.monotonic() > deadline:
            raise TimeoutError
    images = [step.image(i) for i in range(len(step.codes))] if paint else []
    seconds = time.perf_counter() - began
    assert step.stats is not None
    return Run(contender, step.settings, step.codes, images, step.stats, seconds)


def scored(pipeline: Pipeline, one: Run, request: Mapping[str, Any]) -> Run:
    """The run with the likelihoods of its codes in the target's eyes."""
    sampling = {name: getattr(one.settings.sampling, name) for name in SAMPLING}
    return replace(one, likelihoods=pipeline.likelihoods(one.codes, **request, **sampling, method=PLAIN))


def take_turns(
    pipeline: Pipeline,
    contenders: Sequence[Contender],
    requests: Iterable[Mapping[str, Any]],
    paint: bool = True,
    score: bool = True,
    deadline: float = math.inf,
) -> Iterator[list[Run]]:
    """A turn per request: the runs of all methods, in the contenders' order, whichever went first.

    The turn that is not done by `deadline`, of `time.monotonic`, is dropped, and is the last.
    """
    count = len(contenders)
    for turn, request in enumerate(requests):
        order = [(turn + i) % count for i in range(count)]
        try:
            found = {i: run(pipeline, contenders[i], request, paint, deadline) for i in order}
        except TimeoutError:
            return
        runs = [found[i] for i in range(count)]
        yield [scored(pipeline, one, request) for one in runs] if score else runs
