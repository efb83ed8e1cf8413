"""What a request asks for, checked against what a bundle can do, before anything is computed.

Every parameter that is left out (None) comes from the bundle. Which of them a method takes is in `methods.py`.

Does not know engines, pictures or files. The prefix rows of an embeddings bundle are laid out here: given
right-padded, needed left-padded.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .bundle.manifest import ConditionSpec, Manifest, Method, TokenLayout
from .checks import brief as _brief
from .checks import number as _number
from .checks import short as _short
from .checks import whole as _whole
from .errors import RequestError
from .methods import Residual, check_method, resolve_method
from .runtime.drafter import Children
from .runtime.jacobi import Redraft, Start
from .runtime.sampling import FilterOrder
from .runtime.tree import TreeShape

Label = str | int | None
Embeddings = ArrayLike | tuple[ArrayLike, ArrayLike]

PROMPT_LIMIT = 2000  # characters
IMAGES_LIMIT = 1024  # in one request
SEED_LIMIT = 2**63


class Options(TypedDict, total=False):
    """Parameters of a request; what is missing or None comes from the bundle.

    method: `ar`, `eagle`, `lantern`, `lantern++`, `sjd`, or `auto`, which takes what is fastest on this host within
    `quality` (`strict`, `balanced`, `fast` or `TVD=x`, for `auto` only). cfg_scale: guidance, 1 is off.
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.

    Methods with a drafter: tree, a tree's name, or a .json file of paths; for static trees children, `sampled`
    or the `likeliest`, and stop, draft no further once the drafter gives all paths together less probability
    than this (0 is off); drafter_cfg_scale, guidance of the drafter where it is not the target's. `sjd`: window,
    how many codes are drafted ahead; redraft, `coupled` or `independent`; start of new positions, `random`, or
    a copy of the code `left` or `above`.

    Relaxation, for `lantern`, `lantern++` and, if asked for, `sjd`: neighbors, how many codes may lend
    probability; delta (`lantern`, `sjd`) or lambda_ (`lantern++`, `sjd`) bounds it; residual, what a rejection
    removes (`neighborhood` is what the published code does); omega, factor above 1 on the chance to accept;
    anneal, 0 .. 1, how much of omega - 1 each further depth keeps. With omega, neighbors may be 0.
    """

    method: str | None
    cfg_scale: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    tree: str | None
    neighbors: int | None
    delta: float | None
    lambda_: float | None
    residual: str | None
    quality: str | None
    children: str | None
    stop: float | None
    drafter_cfg_scale: float | None
    window: int | None
    redraft: str | None
    start: str | None
    omega: float | None
    anneal: float | None


@dataclass(frozen=True)
class Settings:
    """Everything that decides an image besides prompt, seed and bundle. None: the method has no such thing.

    choice: why `auto` chose this, None where the caller chose. quality: `auto`'s budget, while nothing is chosen.
    """

    method: Method
    cfg_scale: float
    temperature: float
    top_k: int
    top_p: float
    filter_order: FilterOrder
    tree: str | None = None
    neighbors: int | None = None
    delta: float | None = None
    lambda_: float | None = None
    residual: Residual | None = None
    quality: str | None = None
    choice: str | None = field(default=None, compare=False)
    children: Children | None = None
    stop: float | None = None
    drafter_cfg_scale: float | None = None
    window: int | None = None
    redraft: Redraft | None = None
    start: Start | None = None
    omega: float | None = None
    anneal: float | None = None
    shape: TreeShape | None = field(default=None, repr=False)

    @property
    def relaxed(self) -> bool:
        """Whether acceptance may stray from the target's distribution."""
        return self.neighbors is not None or self.omega is not None

    def as_dict(self) -> dict[str, str | float | int]:
        """What is set, by the names that users give, ready for JSON."""
        names = [name for name in self.__dataclass_fields__ if name not in ("shape", "choice")]
        values = {name.rstrip("_"): getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ImageRequest:
    """One image: its label (prompt, class id, or None), its seed, and what the condition graph reads.

    inputs: by name, `[1, ...]`. real: bool `[prefix]`, False on padding. uncond_real: the same of the unconditional
    row, where it differs. tokens: ids of both rows, where prompts are made of them.
    """

    label: Label
    seed: int
    inputs: dict[str, NDArray[Any]]
    real: NDArray[np.bool_]
    uncond_real: NDArray[np.bool_] | None = None
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None


# ---------------------------------------------------------------- settings


def resolve_settings(manifest: Manifest, options: Options) -> Settings:
    """The settings of a request; RequestError names the parameter at fault and what to do."""
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; known: {', '.join(Options.__annotations__)}")
    method = check_method(manifest, options.get("method"))
    defaults = manifest.sampling
    temperature = _number("temperature", options.get("temperature"), defaults.temperature, 0, 1000)
    if 0 < temperature < 1e-3:
        raise RequestError(f"temperature: found {temperature:g}, expected 0 (greedy) or 0.001 .. 1000")
    top_p = _number("top_p", options.get("top_p"), defaults.top_p, 0, 1)
    if top_p == 0:
        raise RequestError("top_p: found 0, expected a number above 0, up to 1 (1 is off)")
    return Settings(
        method=method,
        cfg_scale=_number("cfg_scale", options.get("cfg_scale"), defaults.cfg_scale, 0, 1000),
        temperature=temperature,
        top_k=_whole("top_k", options.get("top_k"), defaults.top_k, 0, 2**31),
        top_p=top_p,
        filter_order=defaults.filter_order,
        **resolve_method(manifest, method, options),
    )


# ---------------------------------------------------------------- images


def resolve_images(
    manifest: Manifest,
    encode: Callable[[str], NDArray[np.int64]] | None,
    prompts: str | Sequence[str] | None,
    class_ids: int | Sequence[int] | None,
    embeddings: Embeddings | None,
    seed: int | Sequence[int],
    num_images: int,
) -> list[ImageRequest]:
    """One request per image, prompt by prompt. `encode` turns a prompt into ids: of words `[prefix]`, or of tokens,
    as many as there are.

    Image i of a prompt gets seed + i; `seed` may also be one number per prompt.
    """
    kind = manifest.condition.kind
    written = kind if kind in ("text", "tokens") else "words"
    given = {written: prompts, "class": class_ids, "embeddings": embeddings}
    takes = {written: "a prompt", "class": "class ids", "embeddings": "text embeddings (from Python, `embeddings=`)"}
    for name, value in given.items():
        if value is not None and name != kind:
            cure = "; export it with --text-encoder to give prompts" if (name, kind) == ("words", "embeddings") else ""
            raise RequestError(
                f"found {takes[name]}, expected {takes[kind]}: that is what bundle {manifest.name} takes{cure}"
            )
    if given[kind] is None:
        raise RequestError(f"found nothing to draw, expected {takes[kind]}: that is what bundle {manifest.name} takes")
    whole = np.ones(manifest.condition.prefix, np.bool_)
    subjects: list[ImageRequest]
    if prompts is not None:
        assert encode is not None
        layout = manifest.condition.layout
        subjects = [
            ImageRequest(prompt, 0, *_tokens(manifest, encode(prompt), whole))
            if layout is None
            else _token_request(prompt, encode(prompt), layout)
            for prompt in _prompts(prompts)
        ]
    elif class_ids is not None:
        ids = _class_ids(manifest, class_ids)
        subjects = [ImageRequest(i, 0, {"class_ids": np.array([i], np.int64)}, whole) for i in ids]
    else:
        assert embeddings is not None
        subjects = [ImageRequest(None, 0, inputs, real) for inputs, real in _embeddings(manifest, embeddings)]
    count = _whole("num_images", num_images, 1, 1, IMAGES_LIMIT)
    if len(subjects) * count > IMAGES_LIMIT:
        raise RequestError(
            f"found {len(subjects)} x {count} images, expected at most {IMAGES_LIMIT} in one request; split it"
        )
    seeds = _seeds(seed, len(subjects), count)
    return [
        replace(subject, seed=first + i) for subject, first in zip(subjects, seeds, strict=True) for i in range(count)
    ]


def token_slots(condition: ConditionSpec) -> int:
    """How many ids a prompt's own text may have."""
    layout = condition.layout
    return condition.prefix - (0 if layout is None else len(layout.before) + len(layout.after))


def _token_request(prompt: str, ids: NDArray[np.int64], layout: TokenLayout) -> ImageRequest:
    """Both rows of a prompt of token ids, each as long as it needs to be."""
    cond = np.array([*layout.before, *ids, *layout.after], np.int64)
    if layout.uncond is not None:
        uncond = np.array(layout.uncond, np.int64)
    else:
        assert layout.uncond_fill is not None  # the manifest has one of the two
        uncond = cond.copy()
        uncond[len(layout.before) : len(cond) - len(layout.after)] = layout.uncond_fill
    return ImageRequest(
        prompt,
        0,
        {"token_ids": cond[None], "uncond_ids": uncond[None]},
        np.ones(len(cond), np.bool_),
        np.ones(len(uncond), np.bool_),
        (cond, uncond),
    )


def _prompts(prompts: str | Sequence[str]) -> list[str]:
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompt: found {_short(prompts)}, expected text or a list of texts")
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise RequestError("prompt: found an empty list, expected at least one prompt")
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"prompt: found {_short(text)}, expected text")
        if not text.strip():
            raise RequestError("prompt: found an empty one, expected a few words")
        if len(text) > PROMPT_LIMIT:
            raise RequestError(f"prompt: found {len(text):,} characters, expected at most {PROMPT_LIMIT:,}; shorten it")
    return texts


def _tokens(
    manifest: Manifest, ids: NDArray[np.int64], whole: NDArray[np.bool_]
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """What the condition graph reads of a prompt's tokens, and which prefix rows are real."""
    if manifest.condition.kind == "words":
        return {"token_ids": ids[None]}, whole
    real = np.arange(len(whole)) >= len(whole) - len(ids)
    return {"token_ids": ids[None], "token_mask": np.ones((1, len(ids)), np.int64)}, real


def _class_ids(manifest: Manifest, class_ids: int | Sequence[int]) -> list[int]:
    listed = [class_ids] if isinstance(class_ids, numbers.Integral) else class_ids
    if isinstance(listed, str) or not isinstance(listed, Sequence | np.ndarray):
        raise RequestError(f"class id: found {_short(listed)}, expected a whole number or a list of them")
    if len(listed) == 0:
        raise RequestError("class id: found an empty list, expected at least one class id")
    return [_whole("class id", i, 0, 0, (manifest.condition.classes or 1) - 1) for i in listed]


def _embeddings(manifest: Manifest, given: Embeddings) -> list[tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]]:
    """Left-pad right-padded embeddings: real rows go to the end, padding becomes zero."""
    prefix, width = manifest.condition.prefix, manifest.condition.caption_dim or 0
    rows, mask = given if isinstance(given, tuple) else (given, None)
    try:
        values = np.asarray(rows, np.float32)
        marks = np.ones(values.shape[:-1], np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"embeddings: expected an array of numbers and a mask, found {_brief(error)}") from error
    if values.ndim == 2:
        values, marks = values[None], marks[None]
    fits = values.ndim == 3 and values.shape[0] > 0 and 1 <= values.shape[1] <= prefix and values.shape[2] == width
    if not fits or marks.shape != values.shape[:2]:
        raise RequestError(
            f"embeddings: found {list(values.shape)} with mask {list(marks.shape)}, "
            f"expected [prompts, 1 .. {prefix}, {width}] with mask [prompts, the same]"
        )
    lengths = marks.sum(1)
    if (lengths == 0).any() or not np.array_equal(marks, np.arange(marks.shape[1]) < lengths[:, None]):
        raise RequestError("embeddings: found a mask with gaps, expected ones, at least one, then zeros (right-padded)")
    if not np.isfinite(values[marks]).all():
        raise RequestError("embeddings: found NaN or infinity, expected finite numbers")
    laid_out: list[tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]] = []
    for value, length in zip(values, lengths, strict=True):
        left, real = np.zeros((prefix, width), np.float32), np.zeros(prefix, np.bool_)
        left[prefix - length :], real[prefix - length :] = value[:length], True
        laid_out.append(({"caption_embeds": left[None], "caption_mask": real[None].astype(np.int64)}, real))
    return laid_out


def _seeds(seed: int | Sequence[int], subjects: int, images: int) -> list[int]:
    """First seed of every prompt."""
    several = isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str)
    listed: list[Any] = list(cast(Any, seed)) if several else [seed] * subjects
    if len(listed) != subjects:
        raise RequestError(f"seed: found {len(listed)} seeds for {subjects} prompts, expected one number, or one each")
    return [_whole("seed", one, 0, 0, SEED_LIMIT - images) for one in listed]
