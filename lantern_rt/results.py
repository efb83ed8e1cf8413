"""Results of a pipeline: finished images, and the state after each decode step."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from json import dumps

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from .bundle.files import Bundle
from .bundle.manifest import Size
from .output.formats import PNG, FinishedImage
from .requests import GenerationSettings
from .runtime.decode import DecodeStep
from .runtime.noise import FORMAT
from .runtime.statistics import Statistics
from .subjects.base import ImageRequest, Label
from .version import __version__

Ints = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Result:
    """Finished images, in the order of the prompts, with tokens, seeds and statistics.

    Attributes:
        images: Pillow images; empty if the bundle has no image decoder. The `info` of an image holds its recipe:
            prompt, seed, settings and bundle. A PNG file saved from the image also holds the recipe, and
            `lantern-rt run --from FILE.png` generates the image again.
        codes: tokens of each image in raster order, int64 `[cells]`. Some models first generate a smaller grid, whose
            tokens come first.
        seeds: seed of each image.
        prompts: prompt, class id or token ids of each image; None for embeddings.
        stats: statistics of the whole batch.
        settings: settings of the images, including the bundle's defaults.
    """

    images: list[Image]
    codes: list[Ints]
    seeds: list[int]
    prompts: list[Label]
    stats: Statistics
    settings: GenerationSettings

    def __repr__(self) -> str:
        contents = f"codes of {len(self.codes)} images"
        if self.images:
            contents = f"{len(self.images)} images of {self.images[0].width}x{self.images[0].height}"
        return (
            f"<Result: {contents}, "
            f"{self.settings.method}, {self.stats.tokens_per_forward_pass:.2f} tokens per pass, "
            f"{self.stats.seconds:.2f} s>"
        )

    def _repr_html_(self) -> str:
        """Show the images below a notebook's cell."""
        files = [b64encode(PNG.encode_image(image)).decode() for image in self.images]
        tags = "".join(f'<img src="data:image/png;base64,{file}" width="256"> ' for file in files)
        return f"{tags}<br>{escape(repr(self))}"


@dataclass(frozen=True, repr=False)
class StreamStep(DecodeStep):
    """State of a request after one decode step.

    Attributes:
        parts: result of the step for each image in its forward pass, with the draft tree and the accepted path.
        done: number of tokens generated so far, over all images.
        total: number of tokens of all images at the end.
        stats: statistics of the request; None before the last step. Times include the caller's work between steps.
        new_codes: tokens that this step appended to each image, int64; empty for finished images.
        codes: tokens of each image so far, in raster order, without gaps, int64.
        cells: token of each cell of each image, int64 `[cells]`; -1 in cells that are not generated yet. The method
            `rows` generates several grid rows at once, so cells after a gap may have tokens.
        settings: settings of the images, including the bundle's defaults.
        decode_image: function that takes the index and the cells of an image, and decodes the image.
    """

    new_codes: list[Ints]
    codes: list[Ints]
    cells: list[Ints]
    settings: GenerationSettings
    decode_image: Callable[[int, Ints], Image]

    def __repr__(self) -> str:
        return f"<StreamStep: {self.done} of {self.total} codes, {self.settings.method}>"

    def image(self, i: int) -> Image:
        """Decode the generated cells of image i; the remaining cells are grey.

        The image decoder runs in the calling thread. A pixel also depends on neighbouring cells, so pixels near cells
        without a token may still change in later steps.

        Args:
            i: index of the image, from 0, in the order of the prompts.

        Returns:
            The image. Once the image is complete, its `info` holds the recipe.

        Raises:
            IndexError: the request has fewer images.
            RequestError: the pipeline was closed.
        """
        return self.decode_image(i, self.cells[i])


def build_result(images: Sequence[ImageRequest], decoded_images: list[Image], last_step: StreamStep) -> Result:
    assert last_step.stats is not None
    seeds = [image.seed for image in images]
    labels = [image.subject.label for image in images]
    return Result(decoded_images, last_step.codes, seeds, labels, last_step.stats, last_step.settings)


def split_codes_by_grid(size: Size, codes: Ints) -> tuple[Ints, Ints]:
    """Split the codes of an image, `[cells]`, into the first grid, `[0, 0]` without one, and the grid of the image."""
    first = codes[: size.first_codes].reshape(size.first_grid or (0, 0))
    return first, codes[size.first_codes :].reshape(size.rows, size.columns)


def finish_image(
    bundle: Bundle, settings: GenerationSettings, image: ImageRequest, step: StreamStep, index: int
) -> FinishedImage:
    """Return image `index` of a request, which is complete after `step`, for a file."""
    first, grid = split_codes_by_grid(settings.image_size, step.codes[index])
    return FinishedImage(grid, first, build_recipe_fields(bundle, settings, image), partial(step.image, index))


class StreamStepBuilder:
    """Tokens generated so far for the images of a request.

    Attributes:
        counts: number of tokens of each image before its first cell without a token.
    """

    def __init__(self, num_images: int, num_cells: int) -> None:
        self.counts = [0] * num_images
        # One array for all images: `add_step` replaces an image's array instead of writing to it.
        self._cells = [np.full(num_cells, -1, np.int64)] * num_images

    def add_step(
        self, step: DecodeStep, settings: GenerationSettings, decode_image: Callable[[int, Ints], Image]
    ) -> StreamStep:
        before = [*self.counts]
        cells = [*self._cells]
        for part in step.parts:
            i = part.sequence
            tokens = cells[i] = cells[i].copy()  # the caller may still hold the arrays of earlier steps
            self.counts[i] += len(part.codes)
            tokens[before[i] : self.counts[i]] = part.codes
            if part.codes_with_cells is not None:  # `rows` generates cells out of raster order
                tokens[part.codes_with_cells.cells] = part.codes_with_cells.codes
        self._cells = cells
        codes = [tokens[:count] for tokens, count in zip(cells, self.counts, strict=True)]
        new_codes = [tokens[count:] for tokens, count in zip(codes, before, strict=True)]
        return StreamStep(
            step.parts, step.done, step.total, step.stats, new_codes, codes, cells, settings, decode_image
        )


def build_recipe_fields(bundle: Bundle, settings: GenerationSettings, image: ImageRequest) -> dict[str, str]:
    """Return the recipe of an image, with which it can be generated again, as texts for its `info` and PNG chunks.

    Embeddings and edits are recorded as SHA-256 hashes, because their data is too large for text fields.
    """
    return {
        "Software": f"lantern-rt {__version__}",
        **image.record,
        "seed": str(image.seed),
        "method": settings.method.method,
        "noise": FORMAT,
        "settings": dumps(settings.as_dict()),
        "bundle": bundle.manifest.name,
        "bundle_digest": bundle.digest,
    }
