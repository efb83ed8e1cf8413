"""Validation of requests against a bundle, before a graph is loaded. A parameter of None gets the bundle's default."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from secrets import randbelow
from shlex import quote
from typing import Any, get_args

import numpy as np

from .bundle.conditions import ConditionSpec
from .bundle.manifest import Manifest, Size
from .completion import parse_method_config, resolve_method, validate_model
from .edits import check_supports_edits, find_nearest_size, prepare_edit, read_image, read_image_size
from .errors import RequestError
from .inputs import check_int, format_value, is_number
from .methods import METHODS_BY_PARAMETER, SAMPLING, MethodConfig, Quality, Sampling
from .options import Embeddings, ImageSource, Options
from .prompts import (
    ImageRequest,
    PromptTokenizer,
    build_class_requests,
    build_embedding_requests,
    build_prompt_requests,
    build_token_id_requests,
    insert_source_image,
)
from .sources import prepare_source_image

IMAGES_LIMIT = 1024  # maximum number of images per request
SEED_LIMIT = 2**64  # seeds are smaller than this
# Inputs that bundles take: parameter -> description for error messages.
INPUT_DESCRIPTIONS = {
    "prompts": "a prompt",
    "class_ids": "class ids",
    "token_ids": "token ids",
    "embeddings": "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)",
}


def choose_random_seed() -> int:
    return randbelow(2**32)


@dataclass(frozen=True)
class GenerationSettings:
    """Settings that determine an image, besides prompt, seed and bundle."""

    method: MethodConfig
    sampling: Sampling
    size: str | None = None  # WIDTHxHEIGHT in pixels; None: the bundle has a single size
    quality: Quality | None = None  # whose preset is the method; None: the request named a method
    has_source_image: bool = False

    def image_size(self, manifest: Manifest) -> Size:
        """Return the entry of the image size in the manifest, adapted to source images."""
        size = manifest.size(self.size)
        return size.with_source_image() if self.has_source_image else size

    def as_dict(self) -> dict[str, Any]:
        """Return all settings that are not None, by their public names, as a JSON object."""
        size = {} if self.size is None else {"size": self.size}
        sampling = self.sampling.model_dump(exclude_none=True)
        return {"method": self.method.method, **size, **sampling, **self.method.parameters()}


@dataclass(frozen=True)
class Request:
    """Checked request: its images, in the order of the prompts, and the settings of all images."""

    images: list[ImageRequest]
    settings: GenerationSettings


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> GenerationSettings:
    """Validate the settings of a request and complete them from the bundle's defaults.

    Args:
        options: `quality` or `method`, `size`, and settings in `SAMPLING`, as in `Options`; None counts as missing.
    """
    options = {name: _convert_numpy_value(value) for name, value in options.items() if value is not None}
    _check_option_names(options)
    _check_quality_option(options)
    size = _resolve_size(manifest, options.get("size"))
    parameters = {name: options[name] for name in SAMPLING if name in options}
    sampling = validate_model(Sampling, manifest.sampling.model_dump() | parameters)
    sampling = _check_guidance(sampling, parameters.keys(), manifest.size(size).codes)
    quality: Quality | None = options.get("quality")
    method = options.get("method")
    if method is None:
        quality = quality or "strict"
        method = _find_preset_method(manifest, quality)
    return GenerationSettings(resolve_method(manifest, method), sampling, size, quality)


def _check_option_names(options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - {"method", "quality", "size", *SAMPLING})
    for name in unknown:
        # `lambda` is a keyword of Python, so callers write `lambda_`.
        if methods := METHODS_BY_PARAMETER.get(name.rstrip("_")):
            example = f"{methods[0]}:{name.rstrip('_')}={format_value(options[name])}"
            remedy = f"write it into a method that takes it ({', '.join(methods)}), such as method={example!r}"
            raise RequestError("a parameter without its method", field=name.rstrip("_"), remedy=remedy)
    if unknown:
        known = ["prompts", *Options.__annotations__]
        similar = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"expected one of {', '.join(known)}"
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; {hint}")


def _check_guidance(sampling: Sampling, requested_settings: Collection[str], num_codes: int) -> Sampling:
    """Check the guidance settings, and remove those that have no effect at a `cfg_scale` of 1."""
    if sampling.cfg_scale == 1.0:
        for field in ("cfg_tokens", "cfg_schedule"):
            if field in requested_settings:
                raise _make_missing_guidance_error(field)
        return sampling.model_copy(update={"cfg_tokens": None, "cfg_schedule": None})
    count = sampling.cfg_tokens
    if isinstance(count, int) and count > num_codes and "cfg_tokens" in requested_settings:
        expected = f"0 .. {num_codes}, or a percentage such as 50%"
        raise RequestError(field="cfg_tokens", found=format_value(count), expected=expected)
    return sampling


def _make_missing_guidance_error(field: str) -> RequestError:
    remedy = "omit it, or give a larger cfg_scale"
    return RequestError("does nothing without guidance", field=field, found="cfg_scale 1", remedy=remedy)


def _resolve_size(manifest: Manifest, size: Any) -> str | None:
    """Check an image size, and return its name or the default size's name; None: the bundle has a single size."""
    names = [entry.name for entry in manifest.all_sizes]
    if size is not None and size not in names:
        raise RequestError(field="size", found=format_value(size), expected=", ".join(names))
    return manifest.size(size).name if manifest.sizes else None


def _check_quality_option(options: Mapping[str, Any]) -> None:
    quality = options.get("quality")
    if quality is not None and options.get("method") is not None:
        raise RequestError("a quality and a method", field="quality", remedy="give one of them")
    if quality is not None and quality not in get_args(Quality):
        raise RequestError(field="quality", found=format_value(quality), expected=", ".join(get_args(Quality)))


def check_options(num_prompts: int, seed: int = 0, num_images: int = 1, **options: Any) -> MethodConfig | None:
    """Check options of a request as far as possible without a bundle, for example before a download.

    Returns:
        The method; None if the options name no method.
    """
    _check_quality_option(options)
    validate_model(Sampling, {name: options[name] for name in SAMPLING if name in options})
    _check_seeds(seed, num_prompts, check_int("num_images", num_images, 1, 1, IMAGES_LIMIT))
    return parse_method_config(options["method"]) if "method" in options else None


def _find_preset_method(manifest: Manifest, quality: str) -> MethodConfig:
    if quality not in manifest.presets:
        problem = f"bundle {manifest.name} has no preset {quality}"
        remedy = f"`lantern-rt eval {quote(manifest.name)} --write-presets` measures and writes presets"
        raise RequestError(problem, field="quality", remedy=remedy)
    return manifest.presets[quality].method


def _convert_numpy_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _convert_to_list(value: Any, repeat_count: int = 1) -> list[Any]:
    value = _convert_numpy_value(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value] * repeat_count


def check_request(
    manifest: Manifest,
    tokenizer: PromptTokenizer | None,
    prompts: str | Sequence[str] | None = None,
    *,
    class_ids: int | Sequence[int] | None = None,
    token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    embeddings: Embeddings | None = None,
    negative_prompt: str | None = None,
    image: ImageSource | None = None,
    mask: ImageSource | None = None,
    keep_rows: int | None = None,
    seed: int | Sequence[int] = 0,
    num_images: int = 1,
    **options: Any,
) -> Request:
    """Check a request against a bundle, without loading a graph. Takes the options of `Pipeline`.

    Raises:
        RequestError: an option is invalid. The error names the option and, if there are several prompts, the prompt.
        TypeError: an option does not exist.
    """
    pixels = None if image is None else read_image_size(image, mask)
    if pixels is not None and options.get("size") is None:
        options["size"] = find_nearest_size(manifest, pixels)  # an edit keeps the shape of its image
    settings = resolve_settings(manifest, options)
    condition = manifest.condition
    source_size = None
    if pixels is not None and manifest.source is not None:
        source_size = manifest.size(find_nearest_size(manifest, pixels))
        settings = replace(settings, has_source_image=True)
        num_source_tokens = manifest.source.count_prompt_tokens(source_size)
        condition = condition.model_copy(update={"prefix": condition.prefix - num_source_tokens})
    values = {"prompts": prompts, "class_ids": class_ids, "token_ids": token_ids, "embeddings": embeddings}
    source_image = None
    if image is not None and not _list_present_names(values):
        source_image = read_image("image", image)
        values |= _read_recorded_prompt(source_image.info)
    image_requests = _build_image_requests(manifest, condition, tokenizer, settings, values, negative_prompt)
    if image is None and (mask is not None or keep_rows is not None):
        name = "keep_rows" if mask is None else "mask"
        raise RequestError("given without an image to edit", field=name, remedy="also give the image")
    count = check_int("num_images", num_images, 1, 1, IMAGES_LIMIT)
    first_seeds = _check_seeds(seed, len(image_requests), count)
    if image is not None:  # checked last, because decoding the image takes longest
        source_image = source_image or read_image("image", image)
        size = settings.image_size(manifest)
        if source_size is not None:
            if mask is not None or keep_rows is not None:
                check_supports_edits(manifest)  # raises an error, because a bundle with a source cannot edit
            source = prepare_source_image(manifest, source_size, source_image)
            image_requests = [
                insert_source_image(image_request, manifest, size, source) for image_request in image_requests
            ]
        else:
            edit = prepare_edit(manifest, size, source_image, mask, keep_rows)
            image_requests = [replace(image_request, edit=edit) for image_request in image_requests]
    images = [
        replace(image_request, seed=first_seed + i)
        for image_request, first_seed in zip(image_requests, first_seeds, strict=True)
        for i in range(count)
    ]
    return Request(images, settings)


def _list_present_names(values: Mapping[str, Any]) -> list[str]:
    return [name for name, value in values.items() if value is not None]


def _read_recorded_prompt(image_info: Mapping[Any, Any]) -> dict[str, str | int]:
    """Return the prompt or class id in the recipe of an image, by name of the request parameter; empty if none."""
    prompt = image_info.get("prompt")
    number = image_info.get("class_id")
    if isinstance(prompt, str):
        return {"prompts": prompt}
    return {"class_ids": int(number)} if isinstance(number, str) and is_number(number) else {}


def _build_image_requests(
    manifest: Manifest,
    condition: ConditionSpec,
    tokenizer: PromptTokenizer | None,
    settings: GenerationSettings,
    values: Mapping[str, Any],
    negative_prompt: Any,
) -> list[ImageRequest]:
    """Build a request for one image of each prompt, class id or text embedding.

    Args:
        condition: condition of the bundle, without the prefix positions of a source image.
        values: `prompts`, `class_ids`, `token_ids` and `embeddings`; None: not given.
    """
    size = settings.image_size(manifest)
    field = {"class": "class_ids", "embeddings": "embeddings"}.get(condition.kind, "prompts")
    expected = f"{INPUT_DESCRIPTIONS[field]}, as bundle {manifest.name} requires"
    present = _list_present_names(values)
    if (present, field) == (["token_ids"], "prompts"):  # bundles with prompts also take token ids
        field = "token_ids"
    if present != [field]:
        wrong = next((name for name in present if name != field), None)
        actual = INPUT_DESCRIPTIONS[wrong] if wrong else "nothing to generate"
        needs_encoder = (wrong, field) == ("prompts", "embeddings")
        remedy = "export it with --text-encoder to give prompts" if needs_encoder else ""
        raise RequestError(field=field, found=actual, expected=expected, remedy=remedy)
    negative_prompt = None if negative_prompt == "" else negative_prompt
    if negative_prompt is not None and tokenizer is None:
        problem = f"bundle {manifest.name} takes {INPUT_DESCRIPTIONS[field]}"
        raise RequestError(problem, field="negative_prompt", remedy="omit it")
    if negative_prompt is not None and not settings.sampling.uses_guidance:
        raise _make_missing_guidance_error("negative_prompt")
    value = values[field]
    if field == "embeddings":
        image_requests = build_embedding_requests(condition, value)
    elif field == "class_ids":
        image_requests = build_class_requests(condition, _convert_to_list(value))
    else:
        assert tokenizer is not None
        prepare = build_token_id_requests if field == "token_ids" else build_prompt_requests
        image_requests = prepare(condition, tokenizer, size, _convert_to_list(value), negative_prompt)
    if not image_requests:
        raise RequestError(field=field, found="an empty list", expected=expected)
    return image_requests


def _check_seeds(seed: Any, num_prompts: int, images_per_prompt: int) -> list[int]:
    """Return the seed of the first image of each prompt. The images of a prompt have consecutive seeds."""
    if num_prompts * images_per_prompt > IMAGES_LIMIT:
        actual = f"{num_prompts} x {images_per_prompt} images"
        raise RequestError(field="num_images", found=actual, expected=f"at most {IMAGES_LIMIT} in one request")
    seeds = _convert_to_list(seed, num_prompts)
    if len(seeds) != num_prompts:
        actual = f"{len(seeds)} seeds for {num_prompts} prompts"
        raise RequestError(field="seed", found=actual, expected="one number, or one for each image")
    return [check_int("seed", value, 0, 0, SEED_LIMIT - images_per_prompt) for value in seeds]
