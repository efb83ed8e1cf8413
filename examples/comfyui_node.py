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
    """Pictures of a prompt, drawn by the bundle of a visual autoregressive model."""

    CATEGORY = "image"
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        """What the node asks for, as ComfyUI has it."""
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

    def draw(
        self, bundle: str, prompt: str, negative_prompt: str, seed: int, count: int, quality: str
    ) -> tuple[torch.Tensor]:
        """Pictures `[count, height, width, 3]`, float32 in 0 .. 1; cancelling in ComfyUI stops within a pass."""
        options: dict[str, Any] = {"seed": seed, "num_images": count, "quality": quality}
        bar = ProgressBar(100) if ProgressBar else None
        for step in _pipeline(bundle).stream(prompt, negative_prompt=negative_prompt, **options):
            if bar is not None:
                bar.update_absolute(step.done, step.total)  # raises when the user cancels
        pictures = [np.asarray(step.image(i), np.float32) / 255 for i in range(count)]
        return (torch.from_numpy(np.stack(pictures)),)


NODE_CLASS_MAPPINGS = {"LanternDraw": LanternDraw}
NODE_DISPLAY_NAME_MAPPINGS = {"LanternDraw": "Draw with lantern-rt"}
