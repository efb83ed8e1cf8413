"""Validation of requests against a bundle, before anything is computed.

A parameter that is None comes from the bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from shlex import quote
from typing import Any, TypeVar, get_args

import numpy as np
from pydantic import ValidationError

from .bundle.manifest import Manifest
from .edits import nearest_size, prepare_edit, read_image, read_image_size
from .errors import BundleError, RequestError, TreeError
from .inputs import check_int, error_fields, format_value
from .methods import (
    METHODS,
    PARAMETERS,
    Drafted,
    Embeddings,
    FrozenModel,
    Groups,
    ImageSource,
    MethodConfig,
    Options,
    Quality,
    Relaxed,
    Sampling,
    parse_method,
)
from .prompts import ImageRequest, PromptTokenizer, prepare_class_ids, prepare_embeddings, prepare_prompts
from .runtime.tree import StaticTree
from .runtime.tree_names import parse_tree

SAMPLING = ("cfg_scale", "cfg_tokens", "cfg_schedule", "temperature", "top_k", "top_p", "repetition_penalty")
IMAGES_LIMIT = 1024  # images per request
SEED_LIMIT = 2**64
C = TypeVar("C", bound=FrozenModel)


@dataclass(frozen=True)
class Settings:
    """Everything that determines an image besides prompt, seed and bundle.

    Attributes:
        method: decoding method with all its parameters.
        sampling: sampling settings.
        size: name of the image size, `WIDTHxHEIGHT`; None if the bundle has a single size.
        quality: preset that the method comes from; None if the request named a method.
    """

    method: MethodConfig
    sampling: Sampling
    size: str | None = None
    quality: Quality | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that are not None, by their public names, ready for JSON."""
        size = {} if self.size is None else {"size": self.size}
        sampling = self.sampling.model_dump(exclude_none=True)
        return {"method": self.method.method, **size, **sampling, **self.method.parameters()}


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        images: images to generate, in the order of the prompts.
        settings: settings of all images.
    """

    images: list[ImageRequest]
    settings: Settings


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> Settings:
    """Validate the settings of a request and complete them from the bundle's defaults.

    Args:
        manifest: manifest of the bundle.
        options: `quality` or `method` (a name, a method string, or an object of `methods.py`), `size`, and the
            parameters in `SAMPLING`. None counts as missing.

    Returns:
        The method with all its parameters, the sampling settings and the size.

    Raises:
        RequestError: an option is invalid; the error names it and the cure.
        TypeError: an option does not exist.
    """
    options = {name: _to_python(value) for name, value in options.items() if value is not None}
    _check_names(options)
    size = _resolve_size(manifest, options.get("size"))
    parameters = {name: options[name] for name in SAMPLING if name in options}
    sampling = _validate(Sampling, manifest.sampling.model_dump() | parameters)
    sampling = _check_guidance(sampling, parameters.keys(), manifest.size(size).codes)
    quality: Quality | None = options.get("quality")
    method = options.get("method")
    if method is None:
        quality = quality or "strict"
        method = _preset_method(manifest, quality)
    elif quality is not None:
        raise RequestError("a quality and a method", field="quality", remedy="give one of them")
    return Settings(_resolve_method(manifest, method), sampling, size, quality)


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise an error for options that do not exist, and for method parameters outside a method string.

    Raises:
        RequestError: a method parameter is given as an option.
        TypeError: an option does not exist.
    """
    unknown = sorted(options.keys() - {"method", "quality", "size", *SAMPLING})
    for name in unknown:
        if methods := PARAMETERS.get(name.rstrip("_")):
            example = f"{methods[0]}:{name.rstrip('_')}={format_value(options[name])}"
            remedy = f"write it into a method that takes it ({', '.join(methods)}), such as method={example!r}"
            raise RequestError("a parameter without its method", field=name.rstrip("_"), remedy=remedy)
    if unknown:
        known = ["prompts", *Options.__annotations__]
        similar = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"expected one of {', '.join(known)}"
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; {hint}")


def _check_guidance(sampling: Sampling, chosen: Collection[str], num_codes: int) -> Sampling:
    """Return the sampling settings after checking guidance; defaults that do nothing without guidance are removed.

    Args:
        sampling: the sampling settings.
        chosen: names of the settings that do not come from the bundle.
        num_codes: number of tokens of the image.
    """
    if sampling.cfg_scale == 1.0:
        for field in ("cfg_tokens", "cfg_schedule"):
            if field in chosen:
                raise _useless_without_guidance(field)
        return sampling.model_copy(update={"cfg_tokens": None, "cfg_schedule": None})
    count = sampling.cfg_tokens
    if isinstance(count, int) and count > num_codes and "cfg_tokens" in chosen:
        expected = f"0 .. {num_codes}, or a share such as 50%"
        raise RequestError(field="cfg_tokens", found=format_value(count), expected=expected)
    return sampling


def _useless_without_guidance(field: str) -> RequestError:
    remedy = "omit it, or give a larger cfg_scale"
    return RequestError("does nothing without guidance", field=field, found="cfg_scale 1", remedy=remedy)


def _resolve_size(manifest: Manifest, size: Any) -> str | None:
    names = [entry.name for entry in manifest.all_sizes]
    if size is not None and size not in names:
        raise RequestError(field="size", found=format_value(size), expected=", ".join(names))
    return manifest.size(size).name if manifest.sizes else None


def _resolve_method(manifest: Manifest, method: Any) -> MethodConfig:
    """Return a method with all its parameters, checked against the bundle.

    Args:
        manifest: manifest of the bundle; its defaults complete a method string.
        method: method object, which is complete, or method string.

    Raises:
        RequestError: the method does not exist, or the bundle lacks a drafter, neighbours or tree for it.
    """
    complete = isinstance(method, MethodConfig)
    name = method
    parameters: dict[str, Any] = {}
    if isinstance(method, MethodConfig):
        name = method.method
        parameters = method.parameters()
    elif isinstance(method, str) and ":" in method:
        name, parameters = parse_method(method)
    *others, last = METHODS
    if name not in (*others, last):  # the name may have any type
        raise RequestError(field="method", found=format_value(name), expected=f"{', '.join(others)} or {last}")
    kind = METHODS[name]
    has_order = manifest.order is not None
    for is_unfit, problem in (
        (name == "groups" and not has_order, "draws one token after another"),
        (has_order and name not in ("ar", "groups"), "draws groups of cells, in an order of its own"),
        (kind.needs_drafter and not manifest.drafters, "has no drafter"),
    ):
        if is_unfit:
            remedy = "use method groups" if has_order else "use method ar or sjd"
            raise RequestError(f"bundle {manifest.name} {problem}", field=f"method {name}", remedy=remedy)
    for parameter in sorted(parameters):
        if name not in PARAMETERS[parameter]:
            remedy = f"omit {parameter}, or use method {' or '.join(PARAMETERS[parameter])}"
            raise RequestError(f"method {name} does not take it", field=parameter, remedy=remedy)
    if manifest.order is not None:
        return Groups()  # plain decoding is the bundle's order
    fields = method.model_dump() if complete else _defaults(manifest, name) | parameters
    if issubclass(kind, Relaxed) and (not complete or "neighbors" in parameters):
        fields |= _neighborhood(manifest, name, parameters)
    if issubclass(kind, Drafted):
        drafter = fields.get("drafter")
        if drafter is None and manifest.heads is not None:
            fields["drafter"] = "heads"
        if drafter is not None and drafter not in manifest.drafters:
            expected = f"{' or '.join(manifest.drafters)}, which the bundle has"
            raise RequestError(field="drafter", found=format_value(drafter), expected=expected)
        fields["tree"] = _check_tree(manifest, fields["tree"], is_default="tree" not in parameters)
    return _validate(kind, fields)


def _preset_method(manifest: Manifest, quality: Any) -> MethodConfig:
    if quality not in get_args(Quality):
        raise RequestError(field="quality", found=format_value(quality), expected=", ".join(get_args(Quality)))
    if quality not in manifest.presets:
        problem = f"bundle {manifest.name} has no preset {quality}"
        remedy = f"`lantern-rt eval {quote(manifest.name)} --write-presets` measures and writes presets"
        raise RequestError(problem, field="quality", remedy=remedy)
    return manifest.presets[quality].method


def _defaults(manifest: Manifest, name: str) -> dict[str, Any]:
    default = next((method for method in manifest.decoding.methods if method.method == name), None)
    return (default or METHODS[name](method=name)).parameters()


def _neighborhood(manifest: Manifest, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the neighbors, bound and residual of a relaxed method; all of them None if it adds no neighbours."""
    bounds = [bound for bound in ("delta", "lambda") if name in PARAMETERS[bound]]
    default_bound = bounds[0] if len(bounds) == 1 else None
    bound = next((bound for bound in bounds if bound in parameters), default_bound)
    if bound is None:
        if unused := [parameter for parameter in ("neighbors", "residual") if parameter in parameters]:
            problem = f"method {name} adds no neighbors without a bound"
            raise RequestError(problem, field=unused[0], remedy="give delta or lambda, too")
        return dict.fromkeys([*bounds, "neighbors", "residual"])
    if not manifest.neighbors:
        problem = f"bundle {manifest.name} has no neighbour table"
        raise RequestError(problem, field=f"method {name}", remedy="use method ar or sjd, without a bound")
    defaults = _defaults(manifest, "lantern" if bound == "delta" else "lantern++")
    default = min(defaults.get("neighbors", 0), manifest.neighbors)
    neighbors = check_int("neighbors", parameters.get("neighbors"), default, 1, manifest.neighbors)
    return {"residual": "aggregated", bound: defaults.get(bound), **parameters, "neighbors": neighbors}


def _check_tree(manifest: Manifest, name: Any, is_default: bool) -> str:
    """Return the name of a draft tree after checking that it exists and fits the codebook.

    Args:
        manifest: manifest of the bundle.
        name: name of the tree.
        is_default: whether the name comes from the bundle, so that the bundle is at fault.
    """
    if not isinstance(name, str):
        raise TreeError(field="tree", found=format_value(name), expected="a name")
    try:
        shape = parse_tree(name)
    except TreeError as error:
        if is_default:
            raise BundleError(f"default tree {format_value(name)}: {error}", field=f"bundle {manifest.name}") from error
        raise
    max_children = max(map(len, shape.children)) if isinstance(shape, StaticTree) else 0
    if max_children > manifest.codebook_size:
        expected = f"at most codebook_size {manifest.codebook_size}"
        raise TreeError(field="tree", found=f"a node with {max_children} children", expected=expected)
    return name


def _validate(kind: type[C], fields: Mapping[str, Any]) -> C:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestError(**error_fields(error)) from error


def _to_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _as_list(value: Any, times: int = 1) -> list[Any]:
    value = _to_python(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value] * times


def _recorded_subject(info: Mapping[Any, Any], field: str) -> tuple[str | None, int | None]:
    prompt = info.get("prompt")
    number = info.get("class_id")
    if field == "prompts" and isinstance(prompt, str):
        return prompt, None
    return None, int(number) if field == "class_ids" and isinstance(number, str) and number.isdecimal() else None


def check_request(
    manifest: Manifest,
    tokenizer: PromptTokenizer | None,
    prompts: str | Sequence[str] | None = None,
    *,
    class_ids: int | Sequence[int] | None = None,
    embeddings: Embeddings | None = None,
    negative_prompt: str | None = None,
    image: ImageSource | None = None,
    mask: ImageSource | None = None,
    keep_rows: int | None = None,
    seed: int | Sequence[int] = 0,
    num_images: int = 1,
    **options: Any,
) -> Request:
    """Check a request without loading a graph.

    Args:
        manifest: manifest of the bundle.
        tokenizer: tokenizer of the bundle; None if the bundle takes no prompts.
        prompts: one prompt or several, or None.
        class_ids: see `Options`, as for all further arguments.
        embeddings: text embeddings.
        negative_prompt: prompt that guidance leads away from.
        image: image to edit.
        mask: cells to generate again.
        keep_rows: number of grid rows to preserve.
        seed: one seed, or one per prompt.
        num_images: number of images per prompt.
        options: options of `resolve_settings`.

    Returns:
        The checked request.

    Raises:
        RequestError: an option is invalid; the error names it, and the prompt if there are several.
        TypeError: an option does not exist.
    """
    pixels = None if image is None else read_image_size(image, mask)
    if pixels is not None and options.get("size") is None:
        options["size"] = nearest_size(manifest, pixels)
    settings = resolve_settings(manifest, options)
    condition = manifest.condition
    kind = condition.kind
    subject_field = {"class": "class_ids", "embeddings": "embeddings"}.get(kind, "prompts")
    descriptions = {
        "prompts": "a prompt",
        "class_ids": "class ids",
        "embeddings": "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)",
    }
    picture = None
    if image is not None and prompts is None and class_ids is None and embeddings is None:
        picture = read_image("image", image)
        prompts, class_ids = _recorded_subject(picture.info, subject_field)
    expected = f"{descriptions[subject_field]}, as bundle {manifest.name} requires"
    subjects_by_field = {"prompts": prompts, "class_ids": class_ids, "embeddings": embeddings}
    present = [name for name, value in subjects_by_field.items() if value is not None]
    if present != [subject_field]:
        wrong_field = next((name for name in present if name != subject_field), None)
        actual = descriptions[wrong_field] if wrong_field else "nothing to generate"
        remedy = ""
        if (wrong_field, kind) == ("prompts", "embeddings"):
            remedy = "export it with --text-encoder to give prompts"
        raise RequestError(field=subject_field, found=actual, expected=expected, remedy=remedy)
    if negative_prompt == "":
        negative_prompt = None
    if negative_prompt is not None and subject_field != "prompts":
        problem = f"bundle {manifest.name} takes {descriptions[subject_field]}"
        raise RequestError(problem, field="negative_prompt", remedy="omit it")
    if negative_prompt is not None and not settings.sampling.guided:
        raise _useless_without_guidance("negative_prompt")
    if embeddings is not None:
        subjects = prepare_embeddings(condition, embeddings)
    elif class_ids is not None:
        subjects = prepare_class_ids(condition, _as_list(class_ids))
    else:
        assert tokenizer is not None
        subjects = prepare_prompts(
            condition, tokenizer, manifest.size(settings.size), _as_list(prompts), negative_prompt
        )
    if image is None and (mask is not None or keep_rows is not None):
        name = "keep_rows" if mask is None else "mask"
        raise RequestError("given without an image to edit", field=name, remedy="give the image, too")
    if not subjects:
        raise RequestError(field=subject_field, found="an empty list", expected=expected)
    count = check_int("num_images", num_images, 1, 1, IMAGES_LIMIT)
    if len(subjects) * count > IMAGES_LIMIT:
        actual = f"{len(subjects)} x {count} images"
        raise RequestError(field="num_images", found=actual, expected=f"at most {IMAGES_LIMIT} in one request")
    seeds = _as_list(seed, len(subjects))
    if len(seeds) != len(subjects):
        actual = f"{len(seeds)} seeds for {len(subjects)} prompts"
        raise RequestError(field="seed", found=actual, expected="one number, or one each")
    first_seeds = [check_int("seed", value, 0, 0, SEED_LIMIT - count) for value in seeds]
    edit = None
    if image is not None:  # checked last, because decoding the image takes longest
        picture = picture or read_image("image", image)
        edit = prepare_edit(manifest, manifest.size(settings.size), picture, mask, keep_rows)
    images = [
        replace(subject, seed=first_seed + i, edit=edit)
        for subject, first_seed in zip(subjects, first_seeds, strict=True)
        for i in range(count)
    ]
    return Request(images, settings)
