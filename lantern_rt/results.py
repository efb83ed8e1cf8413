"""What a pipeline hands out: finished images, and the state after each decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from .requests import Label, Request, Settings
from .runtime.decode import Step
from .runtime.statistics import Statistics

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Finished images, prompt by prompt, and how they came about.

    codes: int64 `[cells]` per image, in raster order. seeds and prompts: per image; a prompt is the text, the
    class id, or None where embeddings were given. stats: of the whole batch. settings: what was used, with
    the bundle's defaults filled in.
    """

    images: list[Image]
    codes: list[Ints]
    seeds: list[int]
    prompts: list[Label]
    stats: Statistics
    settings: Settings


@dataclass(frozen=True)
class StreamStep:
    """The state after one decode step.

    new_codes: per image the codes this step added, empty for finished images. codes: per image all codes so
    far. accepted: per image the drafted codes that this step accepted. step: the runtime's own record, with trees and
    paths. request: what is drawn, with the method that `auto` chose.
    """

    new_codes: list[Ints]
    codes: list[Ints]
    accepted: list[int]
    step: Step
    request: Request
    _draw: Callable[[Ints], Image]

    @property
    def done(self) -> int:
        """Codes so far, over all images."""
        return self.step.done

    @property
    def total(self) -> int:
        """Codes of all images together."""
        return self.step.total

    @property
    def stats(self) -> Statistics | None:
        """With the last step only; its times include what the caller did between steps."""
        return self.step.statistics

    @property
    def settings(self) -> Settings:
        """What is used, also where `auto` chose it."""
        return self.request.settings

    def image(self, i: int) -> Image:
        """Image i as far as it is known; the rest is grey.

        The image decoder needs every code: missing ones are given the last known code, and what comes of
        them is painted over. Near the border the picture may still change.
        """
        return self._draw(self.codes[i])

    def result(self) -> Result:
        """Everything that was drawn; of the last step only."""
        assert self.stats is not None
        images = self.request.images
        seeds, prompts = [image.seed for image in images], [image.label for image in images]
        return Result(
            [self.image(i) for i in range(len(images))], self.codes, seeds, prompts, self.stats, self.settings
        )
