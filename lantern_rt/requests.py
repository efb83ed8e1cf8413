"""What a request asks for, checked against what a bundle can do, before anything is computed.

Every parameter that is left out (None) comes from the bundle. The prefix rows of an embeddings bundle are laid out
here: given right-padded, needed left-padded.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

from .bundle.manifest import ConditionSpec, Manifest
from .checks import brief as _brief
from .checks import explain
from .checks import short as _short
from .checks import whole as _whole
from .errors import BundleError, RequestError, TreeError
from .methods import METHODS, PARAMETERS, Config, MethodConfig, Sampling, parameter_names, parse_method
from .runtime.tree import StaticTree
from .runtime.tree_names import named_tree, tree_name

Label = str | int | None
Embeddings = ArrayLike | tuple[ArrayLike, ArrayLike]
SAMPLING = ("cfg_scale", "temperature", "top_k", "top_p")

PROMPT_LIMIT = 2000  # characters
IMAGES_LIMIT = 1024  # in one request
SEED_LIMIT = 2**63
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Settings:
    """Everything that decides an image besides prompt, seed and bundle.

    choice: why `auto` chose this method, None where the caller did.
    """

    method: MethodConfig
    sampling: Sampling
    choice: str | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """What is set, by the names that users give, ready for JSON."""
        return {"method": self.method.method, **self.sampling.model_dump(), **self.method.parameters()}


@dataclass(frozen=True)
class ImageRequest:
    """One image: its label (prompt, class id, or None), its seed, and what the condition graph reads.

    inputs: by name, `[1, ...]`. real: of the conditional and the unconditional row, bool `[prefix]`, False on padding.
    tokens: ids of both rows, where prompts are made of them.
    """

    label: Label
    inputs: dict[str, NDArray[Any]]
    real: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """A checked request: what each image is made from, and the settings of all."""

    images: list[ImageRequest]
    settings: Settings


# ---------------------------------------------------------------- settings


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> Settings:
    """The settings of a request.

    options: `method` (a name, a method string, or an object of `methods.py`), the names of `SAMPLING`, and parameters
    of the method, each by its name (`lambda_` for lambda); None counts as left out.

    Raises: RequestError: names the parameter at fault and what to do.
    """
    given = {name.rstrip("_"): _plain(value) for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - {"method", *SAMPLING, *PARAMETERS}):
        known = ", ".join(["method", *SAMPLING, *PARAMETERS])
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; known: {known}")
    asked = given.pop("method", None)
    shaping = {name: given.pop(name) for name in SAMPLING if name in given}
    sampling = _checked(Sampling, manifest.sampling.model_dump() | shaping)
    if isinstance(asked, MethodConfig):
        given = asked.parameters() | given
        asked = asked.method
    elif isinstance(asked, str) and ":" in asked:
        asked, own = parse_method(asked)
        given = own | given
    return Settings(_resolve_method(manifest, asked, given), sampling)


def names_method(options: Mapping[str, Any]) -> bool:
    """Whether a request names a method, or a parameter that only some methods take; `quality` is of none of these."""
    given = {name.rstrip("_") for name, value in options.items() if value is not None}
    return bool(given & {"method", *PARAMETERS} - {"quality"})


def _resolve_method(manifest: Manifest, asked: Any, given: dict[str, Any]) -> MethodConfig:
    """The method, its parameters filled in from the bundle's defaults."""
    name = manifest.decoding.method if asked is None else asked
    if name not in METHODS:
        *others, last = METHODS
        raise RequestError(f"method: found {_short(name)}, expected {', '.join(others)} or {last}")
    called = name if asked else f"{name} (the bundle's default)"
    kind = METHODS[name]
    if kind.needs_drafter and manifest.drafter is None:
        raise RequestError(f"method {name}: bundle {manifest.name} has no drafter; use method ar or sjd")
    taken = parameter_names(kind)
    for parameter in sorted(given.keys() - set(taken)):
        raise RequestError(
            f"{parameter}: method {called} does not take it; leave {parameter} out, "
            f"or use method {' or '.join(PARAMETERS[parameter])}"
        )
    fields = _defaults(manifest, name) | given
    if "neighbors" in taken:
        fields |= _neighborhood(manifest, name, given)
    if fields.get("omega") is not None:
        fields.setdefault("anneal", 1.0)
    if "tree" in taken:
        fields["tree"] = _tree(manifest, given.get("tree"), fields["tree"])
    return _checked(kind, fields)


def _defaults(manifest: Manifest, name: str) -> dict[str, Any]:
    own = next((one for one in manifest.decoding.methods if one.method == name), None)
    return (own or METHODS[name](method=name)).parameters()


def _neighborhood(manifest: Manifest, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """neighbors, its bound and residual, as far as the method aggregates at all; else all of them None."""
    nothing = {
        "neighbors": None,
        "residual": None,
        **dict.fromkeys({"delta", "lambda"} & set(parameter_names(METHODS[name]))),
    }
    bound = next((one for one in ("delta", "lambda") if one in given), None)
    bound = bound or {"lantern": "delta", "lantern++": "lambda"}.get(name)
    idle = next((one for one in ("neighbors", "residual") if one in given), None)
    if bound is None:
        if idle:
            raise RequestError(f"{idle}: method {name} aggregates nothing unless bounded; give delta or lambda too")
        return nothing
    table, annealed = manifest.neighbors, "omega" in given
    if not table and not annealed:
        raise RequestError(
            f"method {name}: bundle {manifest.name} has no neighbour table; use method ar, eagle or sjd, "
            "or give omega, which needs none"
        )
    like = _defaults(manifest, "lantern" if bound == "delta" else "lantern++")
    neighbors = _whole(
        "neighbors", given.get("neighbors"), min(like.get("neighbors", 0), table), 0 if annealed else 1, table
    )
    if not neighbors:
        if idle := next((one for one in ("delta", "lambda", "residual") if one in given), None):
            raise RequestError(f"{idle}: found neighbors 0; leave {idle} out, or give neighbors above 0")
        return nothing
    residual = given.get("residual", "aggregated")
    return {"neighbors": neighbors, "residual": residual, bound: given.get(bound, like.get(bound))}


def _tree(manifest: Manifest, asked: Any, default: str) -> str:
    """The name of a tree that exists and fits the codebook; a file's tree by a name that holds its shape."""
    if asked is not None and not isinstance(asked, str):
        raise TreeError(f"tree: found {_short(asked)}, expected a name or a .json file")
    name = default if asked is None else asked
    try:
        if asked is None and name.endswith(".json"):
            raise TreeError("a bundle names a tree, it cannot point to a file")
        shape = named_tree(name)
    except TreeError as error:
        if asked is not None:
            raise
        raise BundleError(f"bundle {manifest.name}: default tree {_short(name)}: {error}") from error
    if isinstance(shape, StaticTree):
        widest = max(len(children) for children in shape.children)
        if widest > manifest.codebook_size:
            raise TreeError(
                f"tree: found a node with {widest} children, expected at most codebook_size {manifest.codebook_size}"
            )
        if name.endswith(".json"):
            return tree_name(shape.paths)
    return name


def _checked(kind: type[C], fields: Mapping[str, Any]) -> C:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        field, problem = explain(error)
        raise RequestError(f"{field}: {problem}" if field else problem) from error


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's."""
    return value.item() if isinstance(value, np.generic) else value


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
    if prompts is not None:
        assert encode is not None
        subjects = [_text_request(manifest.condition, prompt, encode(prompt)) for prompt in _prompts(prompts)]
    elif class_ids is not None:
        real = (np.ones(manifest.condition.prefix, np.bool_),) * 2
        ids = _class_ids(manifest, class_ids)
        subjects = [ImageRequest(i, {"class_ids": np.array([i], np.int64)}, real) for i in ids]
    else:
        assert embeddings is not None
        subjects = _embeddings(manifest, embeddings)
    count = _whole("num_images", num_images, 1, 1, IMAGES_LIMIT)
    if len(subjects) * count > IMAGES_LIMIT:
        raise RequestError(
            f"found {len(subjects)} x {count} images, expected at most {IMAGES_LIMIT} in one request; split it"
        )
    firsts = zip(subjects, _seeds(seed, len(subjects), count), strict=True)
    return [replace(subject, seed=first + i) for subject, first in firsts for i in range(count)]


def token_slots(condition: ConditionSpec) -> int:
    """How many ids a prompt's own text may have."""
    layout = condition.layout
    return condition.prefix - (0 if layout is None else len(layout.before) + len(layout.after))


def _text_request(condition: ConditionSpec, prompt: str, ids: NDArray[np.int64]) -> ImageRequest:
    """What the condition graph reads of a prompt; rows of kind `tokens` are each as long as they need to be."""
    layout, whole = condition.layout, np.ones(condition.prefix, np.bool_)
    if condition.kind == "words":
        return ImageRequest(prompt, {"token_ids": ids[None]}, (whole, whole))
    if layout is None:
        real = np.arange(len(whole)) >= len(whole) - len(ids)
        mask = np.ones((1, len(ids)), np.int64)
        return ImageRequest(prompt, {"token_ids": ids[None], "token_mask": mask}, (real, real))
    cond = np.array([*layout.before, *ids, *layout.after], np.int64)
    uncond = np.array(layout.uncond or cond, np.int64)
    if layout.uncond_fill is not None:
        uncond[len(layout.before) : len(cond) - len(layout.after)] = layout.uncond_fill
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None]}
    return ImageRequest(prompt, inputs, (np.ones(len(cond), bool), np.ones(len(uncond), bool)), (cond, uncond))


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


def _class_ids(manifest: Manifest, class_ids: int | Sequence[int]) -> list[int]:
    listed = [class_ids] if isinstance(class_ids, numbers.Integral) else class_ids
    if isinstance(listed, str) or not isinstance(listed, Sequence | np.ndarray):
        raise RequestError(f"class id: found {_short(listed)}, expected a whole number or a list of them")
    if len(listed) == 0:
        raise RequestError("class id: found an empty list, expected at least one class id")
    return [_whole("class id", i, 0, 0, (manifest.condition.classes or 1) - 1) for i in listed]


def _embeddings(manifest: Manifest, given: Embeddings) -> list[ImageRequest]:
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
    requests = []
    for value, length in zip(values, lengths, strict=True):
        left, real = np.zeros((1, prefix, width), np.float32), np.arange(prefix) >= prefix - length
        left[0, prefix - length :] = value[:length]
        inputs = {"caption_embeds": left, "caption_mask": real[None].astype(np.int64)}
        requests.append(ImageRequest(None, inputs, (real, real)))
    return requests


def _seeds(seed: int | Sequence[int], subjects: int, images: int) -> list[int]:
    """First seed of every prompt."""
    several = isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str)
    listed: list[Any] = list(cast(Any, seed)) if several else [seed] * subjects
    if len(listed) != subjects:
        raise RequestError(f"seed: found {len(listed)} seeds for {subjects} prompts, expected one number, or one each")
    return [_whole("seed", one, 0, 0, SEED_LIMIT - images) for one in listed]
