"""Generate an image with GLM-Image: lantern-rt generates the codes, diffusers turns them into an image.

    python examples/glm_image.py bundles/glm-image GLM-Image/ "a red fox in deep snow" --size 1024x1024
    python examples/glm_image.py bundles/glm-image GLM-Image/ "the same fox in summer" --image fox.png

The second argument is the folder or repository of diffusers' `GlmImagePipeline`, whose autoregressive part is not
loaded. That pipeline needs a GPU and `pip install diffusers transformers`; generating the codes needs neither.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.subjects.source_image import SourceImage


def make_prior_tokens(pipe: Pipeline, prompt: str, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """Generate the codes of an image and return them as arguments for `GlmImagePipeline`.

    Args:
        pipe: pipeline of a bundle of GLM-Image.
        prompt: the prompt, which `GlmImagePipeline` must get as well.
        device: device of `GlmImagePipeline`, for the tensors.
        options: other options of `Pipeline.__call__`, such as `size`, `seed`, `method` or `image` (the source image for
            image to image).

    Returns:
        `prior_token_ids`, int64 `[1, 4 * codes]`, and `width` and `height` in pixels. With a source image also the
        scaled source `image`, its codes `prior_token_image_ids` and its grid size `source_image_grid_thw`.
    """
    manifest = pipe.bundle.manifest
    request = pipe.check(prompt, **options)
    *_, last = pipe.decode(request)
    size = request.settings.image_size
    codes = last.codes[0][size.first_codes :].reshape(size.rows, size.columns)
    width, height = manifest.size_in_pixels(size)
    arguments: dict[str, Any] = {
        "prior_token_ids": repeat_codes(codes)[None].to(device),
        "width": width,
        "height": height,
    }
    for source in request.images[0].parts:
        if isinstance(source, SourceImage):
            rows, columns = source.size.rows, source.size.columns
            arguments["image"] = [source.image]
            arguments["prior_token_image_ids"] = [repeat_codes(source.codes.reshape(rows, columns)).to(device)]
            arguments["source_image_grid_thw"] = [torch.tensor([[1, 2 * rows, 2 * columns]], device=device)]
    return arguments


def repeat_codes(codes: NDArray[np.int64]) -> torch.Tensor:
    """Repeat each code `[rows, columns]` for 2 x 2 grid cells, as diffusers expects: int64 `[4 * rows * columns]`."""
    return torch.from_numpy(codes.repeat(2, 0).repeat(2, 1).ravel())


def main() -> None:
    """Generate an image from command-line arguments."""
    parser = argparse.ArgumentParser(description="Generate an image with GLM-Image.")
    parser.add_argument("bundle", help="bundle of the autoregressive part")
    parser.add_argument("model", help="folder or repository of GlmImagePipeline")
    parser.add_argument("prompt")
    parser.add_argument("--size", help="WIDTHxHEIGHT, a size of the bundle")
    parser.add_argument("--image", help="source image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default="glm-image.png")
    arguments = parser.parse_args()
    options = {"size": arguments.size, "image": arguments.image, "seed": arguments.seed}
    with Pipeline.from_bundle(arguments.bundle) as pipe:
        tokens = make_prior_tokens(pipe, arguments.prompt, arguments.device, **options)

    from diffusers import GlmImagePipeline

    decoder = GlmImagePipeline.from_pretrained(
        arguments.model, vision_language_encoder=None, processor=None, torch_dtype=torch.bfloat16
    ).to(arguments.device)
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed)
    decoder(prompt=arguments.prompt, generator=generator, **tokens).images[0].save(arguments.output)


if __name__ == "__main__":
    main()
