"""What a pipeline hands out: finished images, and the state after each decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from .requests import Label, Settings
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
    paths. settings: what is used, also where `auto` chose it. draw: the picture of an image's first codes. done and
    total: codes so far, and of all images together. stats: with the last step only; its times include what the caller
    did between steps.
    """

    new_codes: list[Ints]
    codes: list[Ints]
    accepted: list[int]
    step: Step
    settings: Settings
    draw: Callable[[Ints], Image]
    done: int
    total: int
    stats: Statistics | None

    def image(self, i: int) -> Image:
        """Image i as far as it is known; the rest is grey.

        The image decoder needs every code: missing ones are given the last known code, and what comes of
        them is painted over. Near the border the picture may still change.
        """
        return self.draw(self.codes[i])
