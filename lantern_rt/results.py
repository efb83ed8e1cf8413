"""What a pipeline hands out: finished images, and the state after each decode step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from . import __version__
from .bundle.files import Bundle
from .prompts import ImageRequest, Label
from .requests import Settings
from .runtime.decode import Step
from .runtime.noise import FORMAT
from .runtime.statistics import Statistics

Ints = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Result:
    """Finished images, prompt by prompt, and how they came about.

    images: each `info` holds what draws it again (prompt, seed, settings, bundle); so do PNG files that it is saved to,
    for `lantern-rt run --from FILE.png`. codes: int64 `[cells]` per image, in raster order. seeds and prompts: per
    image; a prompt is the text, the class id, or None where embeddings were given. stats: of the whole batch.
    settings: what was used, with the bundle's defaults filled in.
    """

    images: list[Image]
    codes: list[Ints]
    seeds: list[int]
    prompts: list[Label]
    stats: Statistics
    settings: Settings

    def __repr__(self) -> str:
        return (
            f"<Result: {len(self.images)} images of {self.images[0].width}x{self.images[0].height}, "
            f"{self.settings.method}, {self.stats.tokens_per_forward_pass:.2f} tokens per pass, "
            f"{self.stats.seconds:.2f} s>"
        )


@dataclass(frozen=True, repr=False)
class StreamStep(Step):
    """The state after one decode step; `image(i)` shows it.

    parts: what the step gave each image that took part, with trees and paths. done and total: codes so far, and of all
    images together. stats: with the last step only; its times include what the caller did between steps. new_codes: per
    image the codes this step added, empty for finished images. codes: per image all codes so far. cells: per image all
    cells, -1 for missing ones; `rows` draws beyond gaps. settings: what is used. draw: the
    picture of image i from its cells.
    """

    new_codes: list[Ints]
    codes: list[Ints]
    cells: list[Ints]
    settings: Settings
    draw: Callable[[int, Ints], Image]

    def __repr__(self) -> str:
        return f"<StreamStep: {self.done} of {self.total} codes, {self.settings.method}>"

    def image(self, i: int) -> Image:
        """Image i, counted from 0 over all prompts, as far as it is known; the rest is grey.

        The image decoder needs every code: missing ones are given the last known code, and what comes of
        them is painted over. Near the border the picture may still change. It takes a run of the image decoder, in
        the calling thread; `info` is empty until the image is whole.

        Raises:
            IndexError: there are fewer images.
            RequestError: the pipeline was closed.
        """
        return self.draw(i, self.cells[i])


def build_result(images: Sequence[ImageRequest], pictures: list[Image], last: StreamStep) -> Result:
    """The result of a request that ended with this step."""
    assert last.stats is not None
    seeds = [image.seed for image in images]
    labels = [image.label for image in images]
    return Result(pictures, last.codes, seeds, labels, last.stats, last.settings)


class StreamState:
    """Codes of a request's images as they come, `cells` of each.

    Attributes:
        counts: codes of each image so far, those beyond gaps not counted.
    """

    def __init__(self, images: int, cells: int) -> None:
        self.counts = [0] * images
        self._cells = [np.full(cells, -1, np.int64)] * images

    def add(self, step: Step, settings: Settings, draw: Callable[[int, Ints], Image]) -> StreamStep:
        """What the caller sees of a step."""
        before = [*self.counts]
        cells = [*self._cells]
        for part in step.parts:
            i = part.request
            own = cells[i] = cells[i].copy()  # earlier steps stay as they were
            self.counts[i] += len(part.codes)
            own[before[i] : self.counts[i]] = part.codes
            if part.placed is not None:
                own[part.placed.cells] = part.placed.codes
        self._cells = cells
        codes = [own[:count] for own, count in zip(cells, self.counts, strict=True)]
        new_codes = [own[count:] for own, count in zip(codes, before, strict=True)]
        return StreamStep(step.parts, step.done, step.total, step.stats, new_codes, codes, cells, settings, draw)


def recipe_fields(bundle: Bundle, settings: Settings, image: ImageRequest) -> dict[str, str]:
    """What draws an image again, as its `info` and PNG files hold it; of embeddings and edits only the hash."""
    kind = "prompt" if isinstance(image.label, str) else "class_id"
    subject = {kind: str(image.label)}
    if image.label is None:
        values = b"".join(value.tobytes() for value in image.inputs.values())
        subject = {"embedding": hashlib.sha256(values).hexdigest()}
    if image.negative is not None:
        subject["negative_prompt"] = str(image.negative.label)
    if image.edit is not None:
        subject["edit"] = image.edit.digest
    return {
        "Software": f"lantern-rt {__version__}",
        **subject,
        "seed": str(image.seed),
        "method": settings.method.method,
        "noise": FORMAT,
        "settings": dumps(settings.as_dict()),
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
    }
