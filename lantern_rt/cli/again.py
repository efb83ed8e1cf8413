"""`run --from PICTURE`: what the picture records becomes the request, or a refusal that names the picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle.files import Bundle, embedded_names
from ..checks import short
from ..errors import BundleError, RequestError
from ..methods import PARAMETERS
from ..output.recipe import CURE, Recipe, read_recipe
from ..prompts import bundle_tokenizer
from ..requests import SAMPLING, Request, check_request


@dataclass(frozen=True)
class Again:
    """A picture to draw again, and its recipe."""

    picture: Path
    recipe: Recipe

    @classmethod
    def read(cls, picture: Path, asked: Iterable[str]) -> Again:
        """The picture's recipe. asked: names of what else was asked for, which must be nothing.

        Raises: RequestError: there is something, or the picture has no recipe.
        """
        options = {"prompts": "prompt", "class_ids": "class-id"}
        if (name := next(iter(asked), None)) is not None:
            option = f"--{options.get(name, name.rstrip('_').replace('_', '-'))}"
            raise RequestError(f"{option}: found together with --from, and {picture} says that itself; leave one out")
        return cls(picture, read_recipe(picture))

    def embedded_bundle(self) -> str:
        """The name of its bundle. Raises: RequestError: that bundle is not embedded."""
        if (name := self.recipe.bundle) in embedded_names():
            return name
        raise RequestError(f"{self.picture}: was drawn by bundle {short(name)}; give the folder of that with --bundle")

    def asked(self) -> dict[str, Any]:
        """What a call of a pipeline takes, without settings that are unknown or always the bundle's."""
        settings, known = self.recipe.settings, ("method", "size", *SAMPLING, *PARAMETERS)
        own = {name: settings[name] for name in known if name in settings}
        return {"prompts": self.recipe.prompt, "class_ids": self.recipe.class_id, "seed": self.recipe.seed, **own}

    def check(self, bundle: Bundle) -> Request:
        """The request that draws exactly this picture with its bundle.

        Raises: BundleError: it is another bundle. RequestError: the bundle refuses the recipe, or understands it
        differently.
        """
        digest, recipe = bundle.digest, self.recipe
        if digest != recipe.bundle_digest:
            raise BundleError(
                f"{self.picture}: found bundle {bundle.folder} of digest {digest[:12]}..., expected the one that drew "
                f"it, {short(recipe.bundle)} of {recipe.bundle_digest[:12]}...; give that one with --bundle"
            )
        try:
            request = check_request(bundle.manifest, bundle_tokenizer(bundle), **self.asked())
        except RequestError as error:
            raise RequestError(f"{self.picture}: {error}") from error
        found, expected = recipe.settings, request.settings.as_dict()
        for name in sorted(found.keys() | expected.keys()):
            if name not in found or name not in expected or found[name] != expected[name]:
                one, other = (short(side[name]) if name in side else "nothing" for side in (found, expected))
                raise RequestError(f"{self.picture}: settings: {short(name)}: found {one}, expected {other}; {CURE}")
        return request
