"""GLM-Image: lantern-rt generates the codes, diffusers makes the image of them.

    python examples/glm_image.py bundles/glm-image GLM-Image/ "a red fox in deep snow" --size 1024x1024

The second argument is the folder or repository of diffusers' `GlmImagePipeline`, whose own autoregressive part is not
loaded. It needs a GPU, and `pip install diffusers transformers`. The codes need neither.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_rt import Pipeline


def generate_codes(pipe: Pipeline, prompt: str, size: str | None, seed: int) -> NDArray[np.int64]:
    """Return the codes of the image, `[rows, columns]`; those of the smaller grid before it are left out."""
    grid = pipe.bundle.manifest.size(size)
    (codes,) = pipe(prompt, size=size, seed=seed).codes
    return codes[grid.first_codes :].reshape(grid.rows, grid.columns)


def prior_token_ids(codes: NDArray[np.int64]) -> torch.Tensor:
    """Return codes `[rows, columns]` as diffusers takes them: each for 2 x 2 cells, int64 `[1, 4 * rows * columns]`."""
    return torch.from_numpy(codes.repeat(2, 0).repeat(2, 1).reshape(1, -1))


def make_image(model: str, prompt: str, codes: NDArray[np.int64], pixels: tuple[int, int], device: str) -> Any:
    """Return the Pillow image of some codes; `pixels` are width and height."""
    from diffusers import GlmImagePipeline

    decoder = GlmImagePipeline.from_pretrained(
        model, vision_language_encoder=None, processor=None, torch_dtype=torch.bfloat16
    ).to(device)
    width, height = pixels
    ids = prior_token_ids(codes).to(device)
    return decoder(prompt=prompt, prior_token_ids=ids, width=width, height=height).images[0]


def main() -> None:
    """Generate one image."""
    parser = argparse.ArgumentParser(description="An image of GLM-Image.")
    parser.add_argument("bundle", help="bundle of the autoregressive part")
    parser.add_argument("model", help="folder or repository of GlmImagePipeline")
    parser.add_argument("prompt")
    parser.add_argument("--size", help="WIDTHxHEIGHT, a size of the bundle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default="glm-image.png")
    arguments = parser.parse_args()
    with Pipeline.from_bundle(arguments.bundle) as pipe:
        codes = generate_codes(pipe, arguments.prompt, arguments.size, arguments.seed)
        manifest = pipe.bundle.manifest
        pixels = manifest.pixels(manifest.size(arguments.size))
    make_image(arguments.model, arguments.prompt, codes, pixels, arguments.device).save(arguments.output)


if __name__ == "__main__":
    main()
