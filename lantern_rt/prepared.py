"""Requests that are ready to decode, with the loaded model, the plan and the prefix rows of the images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from .bundle.files import Bundle
from .bundle.manifest import Manifest
from .errors import BundleError
from .methods import MethodConfig, MethodRequirements
from .requests import GenerationSettings
from .runtime.drafters import count_draft_nodes
from .runtime.engine import Floats, Ints
from .runtime.likelihood import Likelihood, compute_likelihood
from .runtime.state import DrafterLayout, LoadedModel, Plan, Prompt
from .subjects.base import ImageRequest

if TYPE_CHECKING:
    from .engines.loader import BundleEngines


@dataclass(frozen=True)
class PreparedRequest:
    """Checked request with all data that the runtime needs to decode the images.

    Args:
        settings: settings of all images, adapted to these engines.
        plan: these settings in the form that the runtime reads, with the image layout and the maximum number of nodes.
        max_images: maximum number of images per forward pass.
    """

    bundle: Bundle
    engines: BundleEngines
    images: Sequence[ImageRequest]
    settings: GenerationSettings
    plan: Plan
    max_images: int

    @property
    def seeds(self) -> list[int]:
        return [image.seed for image in self.images]

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prefix (rows of prompt embeddings) of each image. Images of one prompt share it."""
        for part in self.images[0].parts:
            part.encode(self.engines.encode_images)
        # Outputs of the condition graph for the current image and the one before it, by identity of the inputs.
        outputs: dict[int, tuple[Floats, Floats]] = {}
        for _, group in groupby(self.images, lambda image: id(image.subject)):
            image, *others = group
            prefix = image.prefix
            inputs = {id(row.inputs): row.inputs for row in prefix}
            outputs = {key: outputs.get(key) or self.engines.compute_condition(value) for key, value in inputs.items()}
            # both [1, prefix, hidden_size], perhaps with different lengths of the prefix
            cond, uncond = (outputs[id(row.inputs)][row.output] for row in prefix)
            if [(1, len(row.is_real_token)) for row in prefix] != [cond.shape[:2], uncond.shape[:2]]:
                problem = f"returned {cond.shape[:2]} and {uncond.shape[:2]} rows and tokens for a prompt"
                raise BundleError(problem, field=str(self.bundle.path("condition")), remedy="export the bundle again")
            if not (np.isfinite(cond).all() and np.isfinite(uncond).all()):
                problem = "returned NaN or infinity, so its weights are damaged"
                raise BundleError(problem, field=str(self.bundle.path("condition")), remedy="export the bundle again")
            prompt = Prompt(prefix.cond.embed(cond[0]), prefix.uncond.embed(uncond[0]), image.preserved_codes)
            yield from [prompt] * (1 + len(others))

    def model(self) -> LoadedModel:
        """Load the graphs and tables that the decoding method of this request needs."""
        return load_model(self.bundle, self.engines, [self.settings.method])

    def likelihoods(self, codes: Sequence[Ints]) -> list[Likelihood]:
        """Compute what `Pipeline.likelihoods` returns; `codes` are int64 `[cells]` for each image."""
        model = self.model()
        likelihoods = []
        for prompt, image_codes in zip(self.prompts(), codes, strict=True):
            preserved = prompt.preserved_codes
            # For an edit, the average is over preserved cells only.
            cells = None if preserved is None or (preserved < 0).all() else preserved >= 0
            likelihoods.append(compute_likelihood(model, self.plan, prompt, image_codes, cells))
        return likelihoods


def make_plan(
    manifest: Manifest, settings: GenerationSettings, engines: BundleEngines, adaptive_window: bool = False
) -> Plan:
    """Convert the settings of a request to the form that the runtime reads."""
    nodes = count_draft_nodes(settings.method, engines.max_nodes)
    return Plan(manifest.layout(settings.image_size), settings.sampling, settings.method, nodes, adaptive_window)


def load_model(bundle: Bundle, engines: BundleEngines, methods: Sequence[MethodConfig] | None = None) -> LoadedModel:
    """Load the graphs and tables that `methods` need; None: any method may run."""
    manifest = bundle.manifest
    names = {field.name for field in fields(DrafterLayout)}
    layout = manifest.drafter.model_dump(include=names) if manifest.drafter else {}  # {}: the runtime's defaults
    all_parts = MethodRequirements(("eagle",), True, manifest.neighbors)
    requirements = [all_parts] if methods is None else [method.requirements for method in methods]
    uses_drafter = any("eagle" in each.drafters for each in requirements)
    uses_heads = any(each.uses_heads for each in requirements)
    uses_neighbors = any(each.neighbors for each in requirements)
    return LoadedModel(
        engines.target,
        engines.drafter if uses_drafter else None,
        manifest.target.max_positions,
        DrafterLayout(**layout),
        bundle.neighbor_table if uses_neighbors else None,
        engines.rounding_bound,
        engines.max_nodes,
        bundle.draft_heads if uses_heads else None,
    )
