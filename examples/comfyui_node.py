"""A node for ComfyUI: put this file into `custom_nodes/`, and lantern-rt with the extra `cpu` into its Python."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lantern_rt import Pipeline

try:
    from comfy.utils import ProgressBar
except ImportError:  # outside ComfyUI
    ProgressBar = None


@lru_cache(maxsize=1)  # bundles are large
def _pipeline(bundle: str) -> Pipeline:
    return Pipeline.from_bundle(bundle)


class LanternDraw:
    """Generates images from a prompt with the bundle of a visual autoregressive model."""

    CATEGORY = "image"
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """Return the node's inputs with their types and defaults."""
        return {
            "required": {
                "bundle": ("STRING", {"default": "scenes", "tooltip": "folder, embedded name, or hf:owner/name"}),
                "prompt": ("STRING", {"multiline": True}),
                "negative_prompt": ("STRING", {"default": ""}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**63}),
                "count": ("INT", {"default": 1, "min": 1, "max": 64}),
                "quality": (["strict", "balanced", "fast"],),
            }
        }

    def generate(
        self, bundle: str, prompt: str, negative_prompt: str, seed: int, count: int, quality: str
    ) -> tuple[torch.Tensor]:
        """Return images `[count, height, width, 3]`, float32 in 0 .. 1.

        If the user cancels in ComfyUI, generation stops after the current forward pass.
        """
        options: dict[str, Any] = {"seed": seed, "num_images": count, "quality": quality}
        bar = ProgressBar(100) if ProgressBar else None
        for step in _pipeline(bundle).stream(prompt, negative_prompt=negative_prompt, **options):
            if bar is not None:
                bar.update_absolute(step.done, step.total)  # raises when the user cancels
        images = [np.asarray(step.image(i), np.float32) / 255 for i in range(count)]
        return (torch.from_numpy(np.stack(images)),)


NODE_CLASS_MAPPINGS = {"LanternDraw": LanternDraw}
NODE_DISPLAY_NAME_MAPPINGS = {"LanternDraw": "Generate with lantern-rt"}
