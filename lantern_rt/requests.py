"""What a request asks for, checked against what a bundle can do, before anything is computed.

Every parameter that is left out (None) comes from the bundle. The prefix rows of an embeddings bundle are laid out
here: given right-padded, needed left-padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from .bundle.files import Bundle
from .bundle.manifest import ConditionSpec, Manifest, Size
from .checks import brief, explain, short, whole
from .errors import BundleError, RequestError, TreeError
from .methods import (
    METHODS,
    PARAMETERS,
    Auto,
    Config,
    Drafted,
    Embeddings,
    MethodConfig,
    Options,
    Quality,
    Relaxed,
    Sampling,
    parse_method,
)
from .runtime.tree import StaticTree
from .runtime.tree_names import named_tree, tree_name
from .text.tokenizers import CaptionTokenizer, TemplateTokenizer, load_tokenizer
from .text.words import WordTokenizer, read_tokenizer

Label = str | int | None
PromptTokenizer = WordTokenizer | CaptionTokenizer | TemplateTokenizer
SAMPLING = ("cfg_scale", "temperature", "top_k", "top_p")

PROMPT_LIMIT = 2000  # characters
IMAGES_LIMIT = 1024  # in one request
SEED_LIMIT = 2**63
C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Settings:
    """Everything that decides an image besides prompt, seed and bundle.

    size: None where the bundle draws one only. choice: why `auto` chose this method, None where the caller did.
    """

    method: MethodConfig
    sampling: Sampling
    size: str | None = None
    choice: str | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """What is set, by the names that users give, ready for JSON."""
        size = {} if self.size is None else {"size": self.size}
        shaping = self.sampling.model_dump(exclude_none=True)
        return {"method": self.method.method, **size, **shaping, **self.method.parameters()}


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
    """A checked request: what each image is made from, prompt by prompt, and the settings of all."""

    images: list[ImageRequest]
    settings: Settings


def bundle_tokenizer(bundle: Bundle) -> PromptTokenizer | None:
    """The tokenizer of a bundle that takes prompts."""
    condition = bundle.manifest.condition
    if condition.kind == "text":
        return CaptionTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.cleaning)
    if condition.layout is not None:
        return TemplateTokenizer(load_tokenizer(bundle.path("tokenizer")), condition.layout.template)
    return read_tokenizer(bundle.path("tokenizer")) if condition.kind == "words" else None


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> Settings:
    """The settings of a request.

    options: `method` (a name, a method string, or an object of `methods.py`), `size`, the names of `SAMPLING`, and
    parameters of the method, each by its name (`lambda_` for lambda); None counts as left out.

    Raises: RequestError: names the parameter at fault and what to do.
    """
    given = {name.rstrip("_"): _plain(value) for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - {"method", "size", *SAMPLING, *PARAMETERS}):
        known = ["prompts", *Options.__annotations__]
        similar = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"expected one of {', '.join(known)}"
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; {hint}")
    asked, size = given.pop("method", None), _resolve_size(manifest, given.pop("size", None))
    shaping = {name: given.pop(name) for name in SAMPLING if name in given}
    sampling = _checked(Sampling, manifest.sampling.model_dump() | shaping)
    if isinstance(asked, MethodConfig):
        given = asked.parameters() | given
        asked = asked.method
    elif isinstance(asked, str) and ":" in asked:
        asked, own = parse_method(asked)
        given = own | given
    return Settings(_resolve_method(manifest, asked, given), sampling, size)


def _resolve_size(manifest: Manifest, asked: Any) -> str | None:
    """The name of the size that is asked for, or the default; None where the bundle draws one only."""
    known = [size.name for size in manifest.sizes or (manifest.size(),)]
    if asked is not None and asked not in known:
        raise RequestError(field="size", found=short(asked), expected=", ".join(known))
    return manifest.size(asked).name if manifest.sizes else None


def _resolve_method(manifest: Manifest, asked: Any, given: dict[str, Any]) -> MethodConfig:
    """The method, its parameters filled in from the bundle's defaults."""
    name = manifest.decoding.method if asked is None else asked
    *others, last = METHODS
    if name not in (*others, last):  # whatever its type
        raise RequestError(field="method", found=short(name), expected=f"{', '.join(others)} or {last}")
    kind, called = METHODS[name], name if asked else f"{name} (the bundle's default)"
    if kind.needs_drafter and manifest.drafter is None:
        raise RequestError(
            f"bundle {manifest.name} has no drafter", field=f"method {name}", remedy="use method ar or sjd"
        )
    if strange := sorted(one for one in given if name not in PARAMETERS[one]):
        raise RequestError(
            f"method {called} does not take it",
            field=strange[0],
            remedy=f"leave {strange[0]} out, or use method {' or '.join(PARAMETERS[strange[0]])}",
        )
    fields = _defaults(manifest, name) | given
    if issubclass(kind, Relaxed):
        fields |= _neighborhood(manifest, name, given)
    if kind is Auto:
        _check_preset(manifest, fields.get("quality"))
    if issubclass(kind, Drafted):
        fields["tree"] = _tree(manifest, fields["tree"], by_bundle="tree" not in given)
    return _checked(kind, fields)


def _check_preset(manifest: Manifest, quality: Any) -> None:
    """Refuse a quality of which the bundle has no preset, or which is none."""
    qualities = get_args(Quality)
    if quality not in qualities:
        raise RequestError(field="quality", found=short(quality), expected=", ".join(qualities))
    if quality != "strict" and quality not in manifest.presets:
        raise RequestError(
            f"bundle {manifest.name} has no preset {quality}",
            field="quality",
            expected=" or ".join(("strict", *manifest.presets)),
            remedy=f"`lantern-rt eval {manifest.name} --write-presets` measures and writes presets",
        )


def _defaults(manifest: Manifest, name: str) -> dict[str, Any]:
    own = next((one for one in manifest.decoding.methods if one.method == name), None)
    return (own or METHODS[name](method=name)).parameters()


def _neighborhood(manifest: Manifest, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """neighbors, its bound and residual, as far as the method aggregates at all; else all of them None."""
    bounds = [one for one in ("delta", "lambda") if name in PARAMETERS[one]]
    nothing: dict[str, Any] = dict.fromkeys([*bounds, "neighbors", "residual"])
    told = [one for one in nothing if one in given]
    bound = next((one for one in bounds if one in given), bounds[0] if len(bounds) == 1 else None)
    if bound is None:
        if told:
            raise RequestError(
                f"method {name} aggregates nothing unless bounded",
                field=told[0],
                remedy="give delta or lambda too",
            )
        return nothing
    table = manifest.neighbors
    if not table:
        raise RequestError(
            f"bundle {manifest.name} has no neighbour table",
            field=f"method {name}",
            remedy="use method ar, eagle or sjd",
        )
    like = _defaults(manifest, "lantern" if bound == "delta" else "lantern++")
    usual = min(like.get("neighbors", 0), table)
    neighbors = whole("neighbors", given.get("neighbors"), usual, 1, table)
    return {"residual": "aggregated", bound: like.get(bound), **given, "neighbors": neighbors}


def _tree(manifest: Manifest, name: Any, by_bundle: bool) -> str:
    """The name of a tree that exists and fits the codebook; a file's tree by a name that holds its shape."""
    if not isinstance(name, str):
        raise TreeError(field="tree", found=short(name), expected="a name or a .json file")
    try:
        if by_bundle and name.endswith(".json"):
            raise TreeError("a bundle names a tree, it cannot point to a file")
        shape = named_tree(name)
    except TreeError as error:
        if by_bundle:
            raise BundleError(f"default tree {short(name)}: {error}", field=f"bundle {manifest.name}") from error
        raise
    if not isinstance(shape, StaticTree):
        return name
    if (widest := max(map(len, shape.children))) > manifest.codebook_size:
        raise TreeError(
            field="tree",
            found=f"a node with {widest} children",
            expected=f"at most codebook_size {manifest.codebook_size}",
        )
    return tree_name(shape.paths) if name.endswith(".json") else name


def _checked(kind: type[C], fields: Mapping[str, Any]) -> C:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        field, problem = explain(error)
        raise RequestError(f"{field}: {problem}" if field else problem) from error


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _listed(value: Any, times: int = 1) -> list[Any]:
    """Elements of a list; anything else so many times."""
    value = _plain(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * times


def check_request(
    manifest: Manifest,
    tokenizer: PromptTokenizer | None,
    prompts: str | Sequence[str] | None = None,
    *,
    class_ids: int | Sequence[int] | None = None,
    embeddings: Embeddings | None = None,
    seed: int | Sequence[int] = 0,
    num_images: int = 1,
    **options: Any,
) -> Request:
    """Check everything that a caller gave, without loading a graph; takes what a call of a pipeline takes.

    Raises: RequestError: says what is wrong.
    """
    settings, condition = resolve_settings(manifest, options), manifest.condition
    kind = condition.kind
    written = kind if kind in ("text", "tokens") else "words"
    given = {written: prompts, "class": class_ids, "embeddings": embeddings}
    takes = {
        written: "a prompt",
        "class": "class ids",
        "embeddings": "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)",
    }
    wanted = f"{takes[kind]}: that is what bundle {manifest.name} takes"
    for name, value in given.items():
        if value is not None and name != kind:
            cure = "export it with --text-encoder to give prompts" if (name, kind) == ("words", "embeddings") else ""
            raise RequestError(found=takes[name], expected=wanted, remedy=cure)
    if given[kind] is None:
        raise RequestError(found="nothing to draw", expected=wanted)
    if embeddings is not None:
        subjects = _embeddings(condition, embeddings)
    elif class_ids is not None:
        listed, most = _listed(class_ids), (condition.classes or 1) - 1
        ids = [whole(_nth("class id", i, len(listed)), one, 0, 0, most) for i, one in enumerate(listed)]
        real = np.ones(condition.prefix, np.bool_)
        subjects = [ImageRequest(i, {"class_ids": np.array([i], np.int64)}, (real, real)) for i in ids]
    else:
        assert tokenizer is not None
        listed = _listed(prompts)
        size = manifest.size(settings.size)
        tokenizer = tokenizer.of_size(size.name) if isinstance(tokenizer, TemplateTokenizer) else tokenizer
        subjects = [_text_request(condition, tokenizer, size, one, i, len(listed)) for i, one in enumerate(listed)]
    if not subjects:
        raise RequestError(found="an empty list", expected=wanted)
    count = whole("num_images", num_images, 1, 1, IMAGES_LIMIT)
    if len(subjects) * count > IMAGES_LIMIT:
        raise RequestError(
            found=f"{len(subjects)} x {count} images",
            expected=f"at most {IMAGES_LIMIT} in one request",
            remedy="split it",
        )
    seeds = _listed(seed, len(subjects))
    if len(seeds) != len(subjects):
        raise RequestError(
            field="seed", found=f"{len(seeds)} seeds for {len(subjects)} prompts", expected="one number, or one each"
        )
    firsts = [whole("seed", one, 0, 0, SEED_LIMIT - count) for one in seeds]
    images = [replace(one, seed=first + i) for one, first in zip(subjects, firsts, strict=True) for i in range(count)]
    return Request(images, settings)


def _nth(name: str, i: int, count: int) -> str:
    return name if count == 1 else f"{name} {i + 1} of {count}"


def _text_request(
    condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompt: Any, i: int, count: int
) -> ImageRequest:
    """`_one_text_request` of prompt i of `count`; a refusal says which one it is of."""
    try:
        return _one_text_request(condition, tokenizer, size, prompt)
    except RequestError as error:
        raise RequestError(
            error.problem,
            field=_nth("prompt", i, count),
            found=error.found,
            expected=error.expected,
            remedy=error.remedy,
        ) from error


def _one_text_request(condition: ConditionSpec, tokenizer: PromptTokenizer, size: Size, prompt: Any) -> ImageRequest:
    """What the condition graph reads of a prompt; rows of kind `tokens` are each as long as they need to be."""
    if not isinstance(prompt, str):
        raise RequestError(field="prompt", found=short(prompt), expected="text or a list of texts")
    if not prompt.strip():
        raise RequestError(field="prompt", found="an empty one", expected="a few words")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # how Python passes on bytes of arguments
        raise RequestError(field="prompt", found=short(prompt), expected="text in UTF-8", remedy="type it again")
    if len(prompt) > PROMPT_LIMIT:
        raise RequestError(
            field="prompt",
            found=f"{len(prompt):,} characters",
            expected=f"at most {PROMPT_LIMIT:,}",
            remedy="shorten it",
        )
    layout, prefix = condition.layout, condition.prefix
    if layout is None:
        ids = tokenizer.encode(prompt, prefix)
        real = np.arange(prefix) >= prefix - len(ids)
        mask = {"token_mask": np.ones((1, len(ids)), np.int64)} if condition.kind == "text" else {}
        return ImageRequest(prompt, {"token_ids": ids[None], **mask}, (real, real))
    behind = (*layout.after, *size.tokens)
    ids = tokenizer.encode(prompt, prefix - len(layout.before) - len(behind))
    cond = np.array([*layout.before, *ids, *behind], np.int64)
    uncond = cond.copy() if layout.uncond is None else np.array([*layout.uncond, *size.tokens], np.int64)
    if layout.uncond_fill is not None:
        uncond[len(layout.before) : len(cond) - len(behind)] = layout.uncond_fill
    inputs = {"token_ids": cond[None], "uncond_ids": uncond[None]}
    return ImageRequest(prompt, inputs, (np.ones(len(cond), bool), np.ones(len(uncond), bool)), (cond, uncond))


def _embeddings(condition: ConditionSpec, given: Embeddings) -> list[ImageRequest]:
    """Left-pad right-padded embeddings: real rows go to the end, padding becomes zero."""
    prefix, width = condition.prefix, condition.caption_dim or 0
    rows, mask = given if isinstance(given, tuple) else (given, None)
    try:
        values = np.asarray(rows, np.float32)
        marks = np.ones(values.shape[:-1], np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(field="embeddings", found=brief(error), expected="an array of numbers and a mask") from error
    if values.ndim == 2:
        values, marks = values[None], marks[None]
    fits = values.ndim == 3 and values.shape[0] > 0 and 1 <= values.shape[1] <= prefix and values.shape[2] == width
    if not fits or marks.shape != values.shape[:2]:
        raise RequestError(
            field="embeddings",
            found=f"{list(values.shape)} with mask {list(marks.shape)}",
            expected=f"[prompts, 1 .. {prefix}, {width}] with mask [prompts, the same]",
        )
    lengths = marks.sum(1)[:, None]
    if (lengths == 0).any() or not np.array_equal(marks, np.arange(marks.shape[1]) < lengths):
        raise RequestError(
            field="embeddings", found="a mask with gaps", expected="ones, at least one, then zeros (right-padded)"
        )
    if not np.isfinite(values[marks]).all():
        raise RequestError(field="embeddings", found="NaN or infinity", expected="finite numbers")
    left, real = np.zeros((len(values), prefix, width), np.float32), np.arange(prefix) >= prefix - lengths
    left[real] = values[marks]
    return [
        ImageRequest(None, {"caption_embeds": value[None], "caption_mask": own[None].astype(np.int64)}, (own, own))
        for value, own in zip(left, real, strict=True)
    ]
