"""`run --from PICTURE`, and pictures that are there already: the request that drew a picture, by what it records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ..bundle.files import Bundle, embedded_names
from ..errors import BundleError, LanternError, RequestError
from ..inputs import format_value
from ..methods import PARAMETERS
from ..output.recipe import CURE, Recipe, read_recipe
from ..prompts import load_bundle_tokenizer
from ..requests import SAMPLING, Request, Settings, check_request, resolve_settings
from ..results import recipe_fields

if TYPE_CHECKING:
    from .options import EngineOptions

# What a recipe says of its image besides settings.
_IMAGE = {"prompt", "negative_prompt", "class_id", "embedding", "edit", "seed"}


def read_recorded_request(
    picture: Path, options: Mapping[str, Any], engine: EngineOptions, name: str | None
) -> tuple[Bundle, Request]:
    """The bundle and the request that draw a picture again.

    Args:
        picture: a PNG.
        options: what else the user wants to decide, which must be nothing.
        engine: opens the bundle.
        name: of the bundle; None: the embedded one that the picture names.

    Raises:
        RequestError: the picture has no recipe, or the bundle refuses it. BundleError: it is another bundle.
    """
    for option in options:
        raise RequestError(field=option, found=f"it together with --from {picture}, which records that itself")
    recipe = read_recipe(picture)
    if name is None and recipe.bundle not in embedded_names():  # a name in a file is never a path
        problem = f"was drawn by bundle {format_value(recipe.bundle)}"
        raise RequestError(problem, field=str(picture), remedy="give the folder of that before --from")
    bundle = engine.open_bundle(recipe.bundle if name is None else name)
    return bundle, request_of_recipe(picture, recipe, bundle)


def request_of_recipe(picture: Path, recipe: Recipe, bundle: Bundle) -> Request:
    """The request that draws exactly this picture with its bundle.

    Raises:
        BundleError: it is another bundle. RequestError: the bundle refuses the recipe, or understands it differently.
    """
    if recipe.edit is not None:
        problem = "records a change of another picture, which it does not hold"
        raise RequestError(problem, field=str(picture), remedy="give that picture to `lantern-rt edit`")
    settings = settings_of_recipe(picture, recipe, bundle)
    options = {name: getattr(settings.sampling, name) for name in SAMPLING}
    options |= {"method": settings.method, "size": settings.size, "seed": recipe.seed}
    subjects: dict[str, Any] = {"prompts": recipe.prompt, "class_ids": recipe.class_id}
    subjects["negative_prompt"] = recipe.negative_prompt
    try:
        return check_request(bundle.manifest, load_bundle_tokenizer(bundle), **subjects, **options)
    except RequestError as error:
        raise RequestError(str(error), field=str(picture)) from error


def settings_of_recipe(picture: Path, recipe: Recipe, bundle: Bundle) -> Settings:
    """The settings of a recipe, as its bundle understands them; raises as `request_of_recipe` does."""
    if bundle.digest != recipe.bundle_digest:
        raise BundleError(
            field=str(picture),
            found=f"bundle {bundle.folder} of digest {bundle.digest[:12]}...",
            expected=f"the one that drew it, {format_value(recipe.bundle)} of {recipe.bundle_digest[:12]}...",
            remedy="give that one before --from",
        )
    recorded = recipe.settings
    parameters = [f"{name}={recorded[name]}" for name in PARAMETERS if name in recorded]
    options = {name: recorded[name] for name in ("size", *SAMPLING) if name in recorded}
    options["method"] = ":".join([recipe.method, *parameters])
    try:
        settings = resolve_settings(bundle.manifest, options)
    except RequestError as error:
        raise RequestError(str(error), field=str(picture)) from error
    own = settings.as_dict()
    for name in sorted(recorded.keys() | own.keys()):
        if name not in recorded or name not in own or recorded[name] != own[name]:
            found, expected = (format_value(side[name]) if name in side else "nothing" for side in (recorded, own))
            field = f"{picture}: settings: {format_value(name)}"
            raise RequestError(field=field, found=found, expected=expected, remedy=CURE)
    return settings


def holds_image(path: Path, bundle: Bundle, request: Request, scale: int) -> bool:
    """Whether a file already holds the picture, enlarged so many times, of this request of one image."""
    try:
        recipe = read_recipe(path)
        old = settings_of_recipe(path, recipe, bundle)
        with Image.open(path) as file:
            size = file.size
    except (LanternError, OSError):
        return False
    (image,) = request.images
    settings = request.settings
    width, height = bundle.manifest.pixels(bundle.manifest.size(settings.size))
    recorded = recipe.model_dump(include=_IMAGE, exclude_none=True)
    own = {name: text for name, text in recipe_fields(bundle, settings, image).items() if name in _IMAGE}
    return (
        size == (scale * width, scale * height)
        and {name: str(value) for name, value in recorded.items()} == own
        and (old.sampling, old.size) == (settings.sampling, settings.size)
        and (old.method == settings.method or (old.method.exact and settings.quality == "strict"))
    )
