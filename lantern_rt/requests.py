"""Validation of requests against a bundle, before a graph is loaded. A parameter of None gets the bundle's default."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from secrets import randbelow
from shlex import quote
from typing import Any, get_args

from .bundle.manifest import Manifest, Size
from .completion import parse_method_config, resolve_method, validate_model
from .errors import RequestError
from .hints import suggest_name
from .inputs import check_int, convert_numpy_value, convert_to_list, format_value
from .methods import METHODS_BY_PARAMETER, SAMPLING, MethodConfig, Quality, Sampling, find_sampling_class
from .options import Options
from .subjects.base import ImageRequest, RequestContext, make_missing_guidance_error
from .subjects.table import PARTS, WORDS, choose_subject_kind, list_subjects, restore_subject
from .text.prompt_tokenizer import PromptTokenizer

IMAGES_LIMIT = 1024  # maximum number of images per request
SEED_LIMIT = 2**64  # seeds are smaller than this


def choose_random_seed() -> int:
    return randbelow(2**32)


@dataclass(frozen=True)
class GenerationSettings:
    """Settings that determine an image, besides prompt, seed and bundle."""

    method: MethodConfig
    sampling: Sampling
    image_size: Size  # entry of the manifest, adapted to a source image
    size: str | None = None  # WIDTHxHEIGHT in pixels; None: the bundle has a single size
    quality: Quality | None = None  # whose preset is the method; None: the request named a method

    def as_dict(self) -> dict[str, Any]:
        """Return all settings that are not None, by their public names, as a JSON object."""
        size = {} if self.size is None else {"size": self.size}
        # `model_dump` would turn a Ctrl-C in the serializer of `ExtendedModel` into an error of pydantic.
        sampling = {name: value for name, value in self.sampling if value is not None}
        return {"method": self.method.method, **size, **sampling, **self.method.parameters()}


@dataclass(frozen=True)
class Request:
    """Checked request: its images, in the order of the prompts, and the settings of all images."""

    images: list[ImageRequest]
    settings: GenerationSettings


def resolve_settings(manifest: Manifest, options: Mapping[str, Any]) -> GenerationSettings:
    """Check the options `quality`, `method`, `size` and `SAMPLING`, and complete them from the bundle's defaults."""
    options = {name: convert_numpy_value(value) for name, value in options.items() if value is not None}
    _check_option_names(options)
    _check_quality_option(options)
    size = _find_size(manifest, options.get("size"))
    parameters = {name: options[name] for name in SAMPLING if name in options}
    sampling = validate_model(find_sampling_class(), dict(manifest.sampling) | parameters)
    sampling = _check_guidance(sampling, parameters.keys(), size.codes)
    quality: Quality | None = options.get("quality")
    method = options.get("method")
    if method is None:
        quality = quality or "strict"
        method = _find_preset_method(manifest, quality)
    size_name = size.name if manifest.sizes else None
    return GenerationSettings(resolve_method(manifest, method), sampling, size, size_name, quality)


def _check_option_names(options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - {"method", "quality", "size", *SAMPLING})
    for name in unknown:
        # `lambda` is a keyword of Python, so callers write `lambda_`.
        if methods := METHODS_BY_PARAMETER.get(name.rstrip("_")):
            example = f"{methods[0]}:{name.rstrip('_')}={format_value(options[name])}"
            remedy = f"write it into a method that takes it ({', '.join(methods)}), such as method={example!r}"
            raise RequestError("a parameter without its method", field=name.rstrip("_"), remedy=remedy)
    if unknown:
        known = [*dict.fromkeys(["prompts", *Options.__annotations__, *WORDS, *SAMPLING])]
        hint = suggest_name(unknown[0], known) or f"expected one of {', '.join(known)}"
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; {hint}")


def _check_guidance(sampling: Sampling, requested_settings: Collection[str], num_codes: int) -> Sampling:
    """Check the guidance settings, and remove those that have no effect at a `cfg_scale` of 1."""
    if sampling.cfg_scale == 1.0:
        for field in ("cfg_tokens", "cfg_schedule"):
            if field in requested_settings:
                raise make_missing_guidance_error(field)
        return sampling.model_copy(update={"cfg_tokens": None, "cfg_schedule": None})
    count = sampling.cfg_tokens
    if isinstance(count, int) and count > num_codes and "cfg_tokens" in requested_settings:
        expected = f"0 .. {num_codes}, or a percentage such as 50%"
        raise RequestError(field="cfg_tokens", found=format_value(count), expected=expected)
    return sampling


def _find_size(manifest: Manifest, name: Any) -> Size:
    """Return the image size of a name, by default the bundle's."""
    names = [size.name for size in manifest.all_sizes]
    if name is not None and name not in names:
        raise RequestError(field="size", found=format_value(name), expected=", ".join(names))
    return manifest.size(name)


def _check_quality_option(options: Mapping[str, Any]) -> None:
    quality = options.get("quality")
    if quality is not None and options.get("method") is not None:
        raise RequestError("a quality and a method", field="quality", remedy="give one of them")
    if quality is not None and quality not in get_args(Quality):
        raise RequestError(field="quality", found=format_value(quality), expected=", ".join(get_args(Quality)))


def _find_preset_method(manifest: Manifest, quality: str) -> MethodConfig:
    if quality not in manifest.presets:
        problem = f"bundle {manifest.name} has no preset {quality}"
        remedy = f"`lantern-rt eval {quote(manifest.name)} --write-presets` measures and writes presets"
        raise RequestError(problem, field="quality", remedy=remedy)
    return manifest.presets[quality].method


def check_request(manifest: Manifest, tokenizer: PromptTokenizer | None, options: Mapping[str, Any]) -> Request:
    """Check a request against a bundle, without loading a graph.

    `options` are `prompts` and those of `Options`, of which None counts as missing. An error of an option that does not
    exist is a TypeError; the RequestError of any other names the option and, among several prompts, the prompt.
    """
    settings_options = {name: value for name, value in options.items() if value is not None}
    if "prompt" in settings_options:
        if "prompts" in settings_options:
            raise RequestError("given together with prompts", field="prompt", remedy="give one of them")
        settings_options["prompts"] = settings_options.pop("prompt")
    inputs = {name: settings_options.pop(name) for name in WORDS if name in settings_options}
    inputs = {name: value for name, value in inputs.items() if not (WORDS[name].needs_text and value == "")}
    seed = settings_options.pop("seed", 0)
    num_images = settings_options.pop("num_images", 1)
    part_kinds = [kind for kind in PARTS if any(words.parameter in inputs for words in kind.words)]
    part_inputs = [kind.read(inputs, manifest) for kind in part_kinds]
    for part in part_inputs:
        settings_options = {**part.default_options(), **settings_options}
        if not list_subjects(inputs):
            inputs |= restore_subject(part.read_recorded_texts())
    settings = resolve_settings(manifest, settings_options)
    context = RequestContext(manifest.condition, tokenizer, settings.image_size, settings.sampling.uses_guidance)
    for part in part_inputs:
        context = part.adapt(context)
    kind = choose_subject_kind(inputs, manifest.condition.kind, f"bundle {manifest.name}")
    subjects = kind.read(inputs[kind.words.parameter], context)
    if not subjects:
        expected = f"{kind.description}, as bundle {manifest.name} requires"
        raise RequestError(field=kind.words.parameter, found="an empty list", expected=expected)
    images_per_subject = check_int("num_images", num_images, 1, 1, IMAGES_LIMIT)
    first_seeds = _check_seeds(seed, len(subjects), images_per_subject)
    parts = tuple(part.finish(context) for part in part_inputs)  # last, because decoding an image takes longest
    images = [
        ImageRequest(subject, parts, first_seed + i)
        for subject, first_seed in zip(subjects, first_seeds, strict=True)
        for i in range(images_per_subject)
    ]
    return Request(images, replace(settings, image_size=context.size))


def check_options(num_prompts: int, options: Mapping[str, Any]) -> tuple[int, MethodConfig | None]:
    """Check options as far as possible without a bundle; return the number of images, and the method if named."""
    _check_quality_option(options)
    validate_model(find_sampling_class(), {name: options[name] for name in SAMPLING if name in options})
    images_per_prompt = check_int("num_images", options.get("num_images"), 1, 1, IMAGES_LIMIT)
    _check_seeds(options.get("seed", 0), num_prompts, images_per_prompt)
    method = parse_method_config(options["method"]) if "method" in options else None
    return num_prompts * images_per_prompt, method


def _check_seeds(seed: Any, num_prompts: int, images_per_prompt: int) -> list[int]:
    """Return the seed of the first image of each prompt. The images of a prompt have consecutive seeds."""
    if num_prompts * images_per_prompt > IMAGES_LIMIT:
        actual = f"{num_prompts} x {images_per_prompt} images"
        raise RequestError(field="num_images", found=actual, expected=f"at most {IMAGES_LIMIT} in one request")
    seeds = convert_to_list(seed, num_prompts)
    if len(seeds) != num_prompts:
        actual = f"{len(seeds)} seeds for {num_prompts} prompts"
        raise RequestError(field="seed", found=actual, expected="one number, or one for each image")
    return [check_int("seed", value, 0, 0, SEED_LIMIT - images_per_prompt) for value in seeds]
