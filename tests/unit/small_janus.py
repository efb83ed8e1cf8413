"""Small Janus with random weights in the published checkpoint layout, for tests of exports and engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = ["a", "red", "cube", "on", "sand", "<|User|>:", "<|Assistant|>:"]
START_ID = 1  # token id
PADDING = 2  # token id
IMAGE_START_ID = 3  # token id that begins an image
GRID = 4  # rows and columns of an image
CODES = 96  # tokens of the codebook


def make_random_janus() -> Any:
    """Return a Janus whose weights, biases and norms are random, so that every lost tensor changes the output."""
    torch.manual_seed(0)
    config = transformers.JanusConfig(
        text_config=transformers.LlamaConfig(
            vocab_size=100,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            rope_theta=500.0,
            rms_norm_eps=1e-5,
        ),
        vision_config=transformers.JanusVisionConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            projection_dim=48,
            num_image_tokens=GRID**2,
        ),
        vq_config=transformers.JanusVQVAEConfig(
            embed_dim=8,
            num_embeddings=CODES,
            latent_channels=32,
            base_channels=32,
            channel_multiplier=[1, 2, 2, 3],
            num_res_blocks=1,
            projection_dim=48,
            image_token_embed_dim=48,
        ),
    )
    model = transformers.JanusForConditionalGeneration(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        # Biases are 0 and norms are 1 at first.
        if weight.ndim < 2 and "vision_model" not in name:
            weight += 0.1 * torch.randn_like(weight)
        if "generation_" in name or "language_model" in name:
            weight *= 3
    model.generation_config.update(bos_token_id=START_ID, pad_token_id=PADDING, guidance_scale=5.0)
    model.generation_config.generation_kwargs = {"boi_token_id": IMAGE_START_ID}
    return model


def write_janus(model: Any, folder: Path) -> None:
    """Save the model with transformers, in more than two shards, and a tokenizer of a few words."""
    model.save_pretrained(folder, max_shard_size="400KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    vocabulary = {"<unk>": 0} | {word: 10 + i for i, word in enumerate(WORDS)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
