"""Options of pipeline calls, for type checkers; `requests.py` checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from .methods import CfgSchedule, MethodConfig, Quality

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray
    from PIL.Image import Image

Embeddings: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike]"
ImageSource: TypeAlias = "Image | NDArray[Any] | str | Path | bytes"


class GenerationOptions(TypedDict, total=False):
    """`Options` without image editing."""

    class_ids: int | Sequence[int] | None
    token_ids: Sequence[int] | Sequence[Sequence[int]] | None
    embeddings: Embeddings | None
    negative_prompt: str | None
    keep_rows: int | None
    seed: int | Sequence[int]
    num_images: int
    quality: Quality | None
    method: str | MethodConfig | None
    cfg_scale: float | None
    cfg_tokens: int | str | None
    cfg_schedule: CfgSchedule | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    size: str | None


class Options(GenerationOptions, total=False):
    """Options of a pipeline call besides the prompts. An option that is missing or None comes from the bundle.

    Attributes:
        class_ids: class ids from 0, one or several, for bundles that take them instead of prompts.
        token_ids: prompt as token ids, or several prompts, in place of `prompts`. A bundle with a template (kind
            `tokens`) takes a whole conditional row, which begins and ends as its layout says; others the ids of a text.
        embeddings: text embeddings, for bundles that take them instead of prompts: floats `[tokens, dim]` or
            `[prompts, tokens, dim]`, alone or as `(embeddings, mask)` with a right-padded mask `[prompts, tokens]`.
        negative_prompt: prompt that guidance leads away from, for all prompts; needs prompts and guidance.
        keep_rows: number of grid rows at the top of `image` to preserve, in place of a mask; from 1.
        seed: random seed, 0 .. 2**64 - 1, one or one per prompt. Image i of a prompt has seed + i and does not depend
            on the batch.
        num_images: number of images per prompt, from 1, at most 1024 images in all.
        quality: preset of the bundle; `"strict"`, the default, is exact.
        method: in place of `quality`, a name such as `"lantern++"`, a method string such as `"sjd:window=5"`, or an
            object of `lantern_rt.methods`.
        cfg_scale: guidance scale, 0 .. 1000; 1 is off.
        cfg_tokens: number of image tokens that are sampled with guidance, the first in generation order: from 0, or
            a share of the image such as `"50%"`. Later tokens have one batch row instead of two, and take less time.
        cfg_schedule: `"linear"` lets guidance grow from 1 to its scale within an image; `"constant"` does not.
        temperature: 0 (greedy) or 0.001 .. 1000.
        top_k: number of most probable tokens to keep; 0 is off.
        top_p: probability mass to keep, above 0 up to 1; 1 is off.
        repetition_penalty: 0.01 .. 100; 1 is off.
        size: `"WIDTHxHEIGHT"` in pixels, for bundles with several image sizes.
        image: image to edit, or source image for bundles that take source images: a Pillow image, an array, a file's
            path or its bytes. Without prompts, the prompt recorded in it is used.
        mask: image of the same size as `image`. Cells are generated again where it is transparent or, if it has no
            transparent pixel, white. None: where `image` is transparent.
    """

    image: ImageSource | None
    mask: ImageSource | None
