"""Inputs of the runtime: the model, and the prefix rows of every image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from .bundle.files import Bundle
from .bundle.manifest import Manifest
from .errors import BundleError
from .methods import MethodConfig, Needs
from .prompts import ImageRequest
from .requests import Request
from .runtime.engine import Ints
from .runtime.groups import GroupLayout, TwoHeadLayout
from .runtime.layout import ImageLayout
from .runtime.likelihood import Likelihood, likelihood
from .runtime.raster import RasterLayout, RowEndLayout
from .runtime.state import DrafterLayout, Model, PrefixRow, Prompt

if TYPE_CHECKING:
    from .engines.loader import Engines


def compute_prefixes(bundle: Bundle, engines: Engines, images: Sequence[ImageRequest]) -> Iterator[Prompt]:
    """Compute the prefix rows of a request's images, once per prompt.

    Args:
        bundle: open bundle.
        engines: loaded graphs of the bundle.
        images: images of one request, in the order of the prompts.

    Yields:
        The prefix of each image: a conditional and an unconditional row.

    Raises:
        BundleError: the condition graph gave another shape than the bundle says, or NaN.
    """
    negative = images[0].negative
    negative_row = None if negative is None else engines.condition(negative.inputs)[0]
    edit = images[0].edit
    preserved = None if edit is None else edit.encode(engines.vq_encoder)
    for _, group in groupby(images, lambda image: id(image.inputs)):
        image, *others = group
        cond, uncond = engines.condition(image.inputs)
        uncond = uncond if negative_row is None else negative_row
        if [(1, len(real)) for real in image.real] != [cond.shape[:2], uncond.shape[:2]]:
            problem = f"gave {cond.shape[:2]} and {uncond.shape[:2]} rows and tokens of a prompt"
            raise BundleError(problem, field=str(bundle.path("condition")), remedy="export the bundle again")
        if not (np.isfinite(cond).all() and np.isfinite(uncond).all()):
            problem = "gave NaN or infinity, its weights are damaged"
            raise BundleError(problem, field=str(bundle.path("condition")), remedy="export the bundle again")
        rows = zip((cond[0], uncond[0]), image.real, image.tokens or (None, None), strict=True)
        first, second = (PrefixRow(*row, image.first_position) for row in rows)
        yield from [Prompt(first, second, preserved)] * (1 + len(others))


def compute_likelihoods(bundle: Bundle, engines: Engines, request: Request, codes: Sequence[Ints]) -> list[Likelihood]:
    """Compute the negative log-likelihood of images under the target model, see `Pipeline.likelihoods`.

    Args:
        bundle: open bundle.
        engines: loaded graphs of the bundle.
        request: request of the images.
        codes: tokens of each image, int64 `[cells]`.
    """
    settings = request.settings
    model = load_model(bundle, engines, [settings.method])
    layout = image_layout(bundle.manifest, settings.size)
    prefixes = compute_prefixes(bundle, engines, request.images)
    edits = [image.edit for image in request.images]
    masks = [None if edit is None or edit.regenerated.all() else ~edit.regenerated.ravel() for edit in edits]
    return [
        likelihood(model, layout, prefix, tokens, settings.sampling, mask)
        for prefix, tokens, mask in zip(prefixes, codes, masks, strict=True)
    ]


def image_layout(manifest: Manifest, size: str | None = None) -> ImageLayout:
    """Return the layout of images of one size.

    Args:
        manifest: manifest of the bundle.
        size: name of the image size; None: the bundle's default.
    """
    grid = manifest.size(size)
    order = manifest.order
    if order is not None:
        if order.two_heads:
            return TwoHeadLayout(order.groups, manifest.codebook_size, grid.columns)
        return GroupLayout(order.groups, manifest.codebook_size)
    if manifest.row_end is not None:
        return RowEndLayout(grid.codes, grid.columns, row_end=manifest.row_end)
    return RasterLayout(grid.codes, grid.columns, grid.first_grid or (0, 0))


def load_model(bundle: Bundle, engines: Engines, methods: Sequence[MethodConfig] | None = None) -> Model:
    """Load the graphs and tables that the runtime needs to generate images.

    Args:
        bundle: open bundle.
        engines: loaded graphs of the bundle.
        methods: methods that will run; graphs and tables that none of them reads stay unloaded. None: any method
            may run.
    """
    manifest = bundle.manifest
    names = {field.name for field in fields(DrafterLayout)}
    layout = manifest.drafter.model_dump(include=names) if manifest.drafter else {}
    everything = Needs(("eagle",), True, manifest.neighbors)
    needs = [everything] if methods is None else [method.needs for method in methods]
    uses_drafter = any("eagle" in each.drafters for each in needs)
    uses_heads = any(each.heads for each in needs)
    uses_neighbors = any(each.neighbors for each in needs)
    return Model(
        engines.target,
        engines.drafter if uses_drafter else None,
        manifest.target.max_positions,
        DrafterLayout(**layout),
        bundle.neighbors if uses_neighbors else None,
        engines.rounding,
        engines.max_nodes,
        bundle.heads if uses_heads else None,
    )
