"""GLM-Image pipeline of diffusers with random weights, which must decode the codes of lantern-rt to the same image.

The session `journeys` of noxfile.py installs diffusers.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern_rt import Pipeline

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: pip install --no-deps diffusers")
ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests/data/glm-image"
PROMPT = "a wooden sign that says 'open'"


@pytest.fixture(scope="module")
def diffusers_pipeline() -> Any:
    """Return the GLM-Image pipeline of diffusers, whose first stage has the small checkpoint and decodes greedily."""
    from transformers import AutoTokenizer, ByT5Tokenizer, T5Config, T5EncoderModel
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil
    from transformers.models.glm_image.modeling_glm_image import GlmImageForConditionalGeneration
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    torch.set_num_threads(1)
    torch.manual_seed(0)
    processor_settings = json.loads((CHECKPOINTS / "processor/processor_config.json").read_text())["image_processor"]
    del processor_settings["image_processor_type"]
    processor = GlmImageProcessor(
        image_processor=GlmImageImageProcessorPil(**processor_settings),
        tokenizer=AutoTokenizer.from_pretrained(CHECKPOINTS / "processor"),
        chat_template=(CHECKPOINTS / "processor/chat_template.jinja").read_text(),
    )
    first_stage = GlmImageForConditionalGeneration.from_pretrained(
        CHECKPOINTS / "vision_language_encoder", dtype=torch.float32
    ).eval()
    first_stage.generation_config.top_k = 1
    # diffusers 0.42.1 joins the features of several images, while transformers 5.23 expects a list of them.
    first_stage.get_image_tokens = lambda features, grids: first_stage.model.get_image_tokens([features])
    transformer = diffusers.GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=98,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    tokenizer = ByT5Tokenizer()
    text_encoder = T5EncoderModel(
        T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    ).eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.GlmImagePipeline(tokenizer, processor, text_encoder, first_stage, vae, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate_pixels(diffusers_pipeline: Any, **arguments: Any) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    (image,) = diffusers_pipeline(prompt=PROMPT, num_inference_steps=2, generator=generator, **arguments).images
    pixels: list[int] = np.asarray(image).ravel().tolist()
    return pixels


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 5), (5, 2)])
@pytest.mark.parametrize("has_source", [False, True], ids=["text", "image"])
def test_diffusers_decodes_our_codes_to_its_own_image(
    diffusers_pipeline: Any, glm_image_bundle: Path, rows: int, columns: int, has_source: bool
) -> None:
    pixels = np.random.default_rng(rows).integers(0, 256, (4 * rows, 4 * columns, 3), np.uint8)
    source = Image.fromarray(pixels).resize((32 * columns, 32 * rows))
    options: dict[str, Any] = {"image": source} if has_source else {}
    make_prior_tokens = runpy.run_path(str(ROOT / "examples/glm_image.py"))["make_prior_tokens"]
    with Pipeline.from_bundle(glm_image_bundle, threads=1) as pipe:
        arguments = make_prior_tokens(pipe, PROMPT, size=f"{32 * columns}x{32 * rows}", temperature=0, **options)
        on_device = make_prior_tokens(pipe, PROMPT, "meta", size="64x64", **options)
    names = [name for name in arguments if name.startswith(("prior_", "source_"))]
    assert {value.device.type for name in names for value in on_device[name]} == {"meta"}
    sources: dict[str, Any] = {"image": [source]} if has_source else {}
    expected = generate_pixels(diffusers_pipeline, height=32 * rows, width=32 * columns, **sources)
    assert generate_pixels(diffusers_pipeline, **arguments) == expected
    changed_arguments = arguments | {"prior_token_ids": (arguments["prior_token_ids"] + 1) % 90}
    assert generate_pixels(diffusers_pipeline, **changed_arguments) != expected  # other codes change the image
