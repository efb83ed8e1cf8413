"""Validation of requests against a bundle, before anything is computed.

A parameter that is None comes from the bundle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from secrets import randbelow
from shlex import quote
from typing import Any, get_args

import numpy as np

from .bundle.manifest import Manifest, Size
from .completion import check_method, resolve_method, validate_model
from .edits import check_supports_edits, find_nearest_size, prepare_edit, read_image, read_image_size
from .errors import RequestError
from .inputs import check_int, format_value
from .methods import PARAMETERS, SAMPLING, MethodConfig, Quality, Sampling
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

IMAGES_LIMIT = 1024  # images per request
SEED_LIMIT = 2**64
# The kinds of input that bundles take, by parameter.
SUBJECTS = {
    "prompts": "a prompt",
    "class_ids": "class ids",
    "token_ids": "token ids",
    "embeddings": "text embeddings (`--embeddings FILE.npz`, in Python `embeddings=`)",
}


def draw_seed() -> int:
    """Draw a random seed, 0 .. 2**32 - 1."""
    return randbelow(2**32)


@dataclass(frozen=True)
class GenerationSettings:
    """Everything that determines an image besides prompt, seed and bundle.

    Attributes:
        method: decoding method with all its parameters.
        sampling: sampling settings.
        size: name of the image size, `WIDTHxHEIGHT`; None if the bundle has a single size.
        quality: preset that the method comes from; None if the request named a method.
        has_source_image: whether images are generated from a source image.
    """

    method: MethodConfig
    sampling: Sampling
    size: str | None = None
    quality: Quality | None = None
    has_source_image: bool = False

    def image_size(self, manifest: Manifest) -> Size:
        """Return the size of the images."""
        size = manifest.size(self.size)
        return size.with_source() if self.has_source_image else size

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
    settings: GenerationSettings


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> GenerationSettings:
    """Validate the settings of a request and complete them from the bundle's defaults.

    Args:
        options: `quality` or `method` (a name, a method string, or an object of `methods.py`), `size`, and the
            parameters in `SAMPLING`. None counts as missing.

    Returns:
        The method with all its parameters, the sampling settings and the size.

    Raises:
        RequestError: an option is invalid; the error names it and the cure.
        TypeError: an option does not exist.
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


def _check_guidance(sampling: Sampling, requested_settings: Collection[str], num_codes: int) -> Sampling:
    """Return the sampling settings after checking guidance; defaults that do nothing without guidance are removed.

    Args:
        requested_settings: names of the settings that do not come from the bundle.
        num_codes: number of tokens of the image.
    """
    if sampling.cfg_scale == 1.0:
        for field in ("cfg_tokens", "cfg_schedule"):
            if field in requested_settings:
                raise _make_no_guidance_error(field)
        return sampling.model_copy(update={"cfg_tokens": None, "cfg_schedule": None})
    count = sampling.cfg_tokens
    if isinstance(count, int) and count > num_codes and "cfg_tokens" in requested_settings:
        expected = f"0 .. {num_codes}, or a share such as 50%"
        raise RequestError(field="cfg_tokens", found=format_value(count), expected=expected)
    return sampling


def _make_no_guidance_error(field: str) -> RequestError:
    remedy = "omit it, or give a larger cfg_scale"
    return RequestError("does nothing without guidance", field=field, found="cfg_scale 1", remedy=remedy)


def _resolve_size(manifest: Manifest, size: Any) -> str | None:
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
    """Check the options of a request as far as no bundle is needed, for example before a bundle is downloaded.

    Args:
        num_prompts: number of prompts, class ids or embeddings.
        seed, num_images: see `Options`.
        options: options of `resolve_settings`, without None.

    Returns:
        The method, if the options name it.

    Raises:
        RequestError: no bundle takes an option.
    """
    _check_quality_option(options)
    validate_model(Sampling, {name: options[name] for name in SAMPLING if name in options})
    _check_seeds(seed, num_prompts, check_int("num_images", num_images, 1, 1, IMAGES_LIMIT))
    return check_method(options["method"]) if "method" in options else None


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
    """Check a request without loading a graph.

    Args:
        tokenizer: tokenizer of the bundle; None if the bundle takes no prompts.
        prompts: one prompt or several, or None.
        class_ids, token_ids, embeddings, negative_prompt, image, mask, keep_rows, seed, num_images: see `Options`.
        options: options of `resolve_settings`.

    Returns:
        The checked request.

    Raises:
        RequestError: an option is invalid; the error names it, and the prompt if there are several.
        TypeError: an option does not exist.
    """
    pixels = None if image is None else read_image_size(image, mask)
    if pixels is not None and options.get("size") is None:
        options["size"] = find_nearest_size(manifest, pixels)
    settings = resolve_settings(manifest, options)
    source_size = None
    if pixels is not None and manifest.source is not None:
        source_size = manifest.size(find_nearest_size(manifest, pixels))
        settings = replace(settings, has_source_image=True)
    values = {"prompts": prompts, "class_ids": class_ids, "token_ids": token_ids, "embeddings": embeddings}
    picture = None
    if image is not None and not _list_given_names(values):
        picture = read_image("image", image)
        values |= _read_recorded_prompt(picture.info)
    num_reserved_tokens = (
        0 if source_size is None or manifest.source is None else manifest.source.count_prompt_tokens(source_size)
    )
    subjects = _build_image_requests(manifest, tokenizer, settings, values, negative_prompt, num_reserved_tokens)
    if image is None and (mask is not None or keep_rows is not None):
        name = "keep_rows" if mask is None else "mask"
        raise RequestError("given without an image to edit", field=name, remedy="give the image, too")
    count = check_int("num_images", num_images, 1, 1, IMAGES_LIMIT)
    first_seeds = _check_seeds(seed, len(subjects), count)
    if image is not None:  # checked last, because decoding the image takes longest
        picture = picture or read_image("image", image)
        size = settings.image_size(manifest)
        if source_size is not None:
            if mask is not None or keep_rows is not None:
                check_supports_edits(manifest)
            source = prepare_source_image(manifest, source_size, picture)
            subjects = [insert_source_image(subject, manifest, size, source) for subject in subjects]
        else:
            edit = prepare_edit(manifest, size, picture, mask, keep_rows)
            subjects = [replace(subject, edit=edit) for subject in subjects]
    images = [
        replace(subject, seed=first_seed + i)
        for subject, first_seed in zip(subjects, first_seeds, strict=True)
        for i in range(count)
    ]
    return Request(images, settings)


def _list_given_names(values: Mapping[str, Any]) -> list[str]:
    return [name for name, value in values.items() if value is not None]


def _read_recorded_prompt(image_info: Mapping[Any, Any]) -> dict[str, str | int]:
    """Return the prompt or the class id that an image records in its `image_info`, by parameter."""
    prompt = image_info.get("prompt")
    number = image_info.get("class_id")
    if isinstance(prompt, str):
        return {"prompts": prompt}
    return {"class_ids": int(number)} if isinstance(number, str) and number.isdecimal() else {}


def _build_image_requests(
    manifest: Manifest,
    tokenizer: PromptTokenizer | None,
    settings: GenerationSettings,
    values: Mapping[str, Any],
    negative_prompt: Any,
    num_reserved_tokens: int = 0,
) -> list[ImageRequest]:
    """Prepare an image for each prompt, class id or embedding.

    Args:
        manifest: manifest of the bundle, whose condition is of one kind.
        tokenizer: tokenizer of the bundle; None if the bundle takes no prompts.
        values: prompts, class ids, token ids and embeddings by parameter, None without.
        negative_prompt: negative prompt; None or an empty text: none.
        num_reserved_tokens: number of prompt tokens to leave for a source image.

    Raises:
        RequestError: the bundle takes another kind of input, or a value is invalid.
    """
    condition = manifest.condition
    size = settings.image_size(manifest)
    if num_reserved_tokens:
        condition = condition.model_copy(update={"prefix": condition.prefix - num_reserved_tokens})
    field = {"class": "class_ids", "embeddings": "embeddings"}.get(condition.kind, "prompts")
    expected = f"{SUBJECTS[field]}, as bundle {manifest.name} requires"
    present = _list_given_names(values)
    if (present, field) == (["token_ids"], "prompts"):
        field = "token_ids"
    if present != [field]:
        wrong = next((name for name in present if name != field), None)
        actual = SUBJECTS[wrong] if wrong else "nothing to generate"
        needs_encoder = (wrong, field) == ("prompts", "embeddings")
        remedy = "export it with --text-encoder to give prompts" if needs_encoder else ""
        raise RequestError(field=field, found=actual, expected=expected, remedy=remedy)
    negative_prompt = None if negative_prompt == "" else negative_prompt
    if negative_prompt is not None and tokenizer is None:
        problem = f"bundle {manifest.name} takes {SUBJECTS[field]}"
        raise RequestError(problem, field="negative_prompt", remedy="omit it")
    if negative_prompt is not None and not settings.sampling.uses_guidance:
        raise _make_no_guidance_error("negative_prompt")
    value = values[field]
    if field == "embeddings":
        subjects = build_embedding_requests(condition, value)
    elif field == "class_ids":
        subjects = build_class_requests(condition, _convert_to_list(value))
    else:
        assert tokenizer is not None
        prepare = build_token_id_requests if field == "token_ids" else build_prompt_requests
        subjects = prepare(condition, tokenizer, size, _convert_to_list(value), negative_prompt)
    if not subjects:
        raise RequestError(field=field, found="an empty list", expected=expected)
    return subjects


def _check_seeds(seed: Any, num_prompts: int, images_per_prompt: int) -> list[int]:
    """Return the seed of the first of `images_per_prompt` images of each subject."""
    if num_prompts * images_per_prompt > IMAGES_LIMIT:
        actual = f"{num_prompts} x {images_per_prompt} images"
        raise RequestError(field="num_images", found=actual, expected=f"at most {IMAGES_LIMIT} in one request")
    seeds = _convert_to_list(seed, num_prompts)
    if len(seeds) != num_prompts:
        actual = f"{len(seeds)} seeds for {num_prompts} prompts"
        raise RequestError(field="seed", found=actual, expected="one number, or one for each image")
    return [check_int("seed", value, 0, 0, SEED_LIMIT - images_per_prompt) for value in seeds]
