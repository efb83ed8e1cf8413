"""Types of the options of pipeline calls, for type checkers. `requests.py` checks the values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar

from .methods import CfgSchedule, MethodConfig, Quality

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray
    from PIL.Image import Image

Function = TypeVar("Function", bound=Callable[..., Any])
Embeddings: TypeAlias = "ArrayLike | tuple[ArrayLike, ArrayLike]"
ImageSource: TypeAlias = "Image | NDArray[Any] | str | Path | bytes"


class GenerationOptions(TypedDict, total=False):
    """Options of a pipeline call without `image` and `mask`. The docstring of `Options` describes all options."""

    prompt: str | Sequence[str] | None
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
    min_p: float | None
    repetition_penalty: float | None
    size: str | None


class Options(GenerationOptions, total=False):
    """Options of a pipeline call besides the prompts.

    The bundle has a default for an option that is missing or None.

    Attributes:
        prompt: the same as `prompts`, for callers who know diffusers.
        class_ids: class id or list of class ids, from 0, for bundles that take class ids instead of prompts.
        token_ids: token ids of one prompt or of several prompts, in place of `prompts`. A bundle of condition kind
            `tokens` needs the whole conditional row, with the ids of its template before and after the text. Other
            bundles need the ids of the text only.
        embeddings: text embeddings, for bundles that take embeddings instead of prompts: a float array `[tokens, dim]`
            or `[prompts, tokens, dim]`, or the pair `(embeddings, mask)`. The mask `[prompts, tokens]` is 1 on tokens
            and 0 on the padding after the tokens.
        negative_prompt: text that guidance leads away from, for all prompts. It requires prompts and guidance.
        keep_rows: number of grid rows at the top of `image` to preserve, from 1, or 0 for a prologue alone; replaces
            `mask`.
        seed: random seed, 0 .. 2**64 - 1: one seed for all prompts, or one seed per prompt. Image i of a prompt has
            seed + i. An image depends on its seed, but not on the other images of the call.
        num_images: number of images per prompt, from 1; at most 1024 images per call.
        quality: preset of the bundle: `"strict"` (the default, exact), `"balanced"` or `"fast"`.
        method: decoding method, in place of `quality`: a name such as `"lantern++"`, a method string such as
            `"sjd:window=5"`, or an object of `lantern_rt.methods`.
        cfg_scale: guidance scale, 0 .. 1000; 1 turns guidance off.
        cfg_tokens: number of image tokens that are sampled with guidance, from 0, or a percentage of the image's
            tokens such as `"50%"`. They are the first tokens in generation order. Later tokens take less time, because
            they need one batch row instead of two.
        cfg_schedule: `"linear"`, or `"cosine-2.75"` with any power, raises the guidance scale from 1 to `cfg_scale`
            within an image; `"constant"` does not.
        temperature: sampling temperature, 0 (greedy) or 0.001 .. 1000.
        top_k: number of most probable tokens to keep; 0 turns the filter off.
        top_p: total probability of the tokens to keep, above 0 up to 1; 1 turns the filter off.
        min_p: share of the largest probability that a token needs to be kept, 0 .. 1; 0 turns the filter off.
        repetition_penalty: divisor of the logits of tokens that the image already contains, 0.01 .. 100; 1 turns the
            penalty off.
        size: image size `"WIDTHxHEIGHT"` in pixels, for bundles with several image sizes.
        image: image to edit, or source image for bundles that take source images: a Pillow image, an array, the path of
            a file, or the bytes of a file. A call without prompts uses the prompt that is recorded in the image.
        mask: image of the same size as `image`. Cells are generated again where the mask is transparent or, if the mask
            has no transparent pixel, white. None: where `image` is transparent.
    """

    image: ImageSource | None
    mask: ImageSource | None


def name_options(function: Function) -> Function:
    """Name the options in the signature of a function with `**options: Unpack[Options]`, so that editors complete them.

    Type checkers read the annotation of `**options` itself.
    """
    signature = inspect.signature(function)
    *parameters, options = signature.parameters.values()
    typed = GenerationOptions if "GenerationOptions" in options.annotation else Options
    known = signature.parameters.keys()
    named = [
        options.replace(name=name, kind=inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint.__forward_arg__)
        for name, hint in typed.__annotations__.items()
        if name not in known
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*parameters, *named])
    return function
