"""Model family Prologue (arXiv 2605.06137): class-conditional, with a short prologue of codes before the image's codes.

A sequence is the class, the codes of the prologue, an end mark, and the codes of the image. Visual codes come first in
the vocabulary, then the codes of the prologue, then the end mark. Each position allows codes of one kind only, so that
the end mark is forced.

The weights do not show how many numbers of a head the rotary embedding rotates. The published models have heads of 64
numbers; for others, a JSON file states `rotated_by_position` and, for the image decoder, `rotated_by_row`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...methods import Sampling
from ..checkpoints.files import Config, read_config
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from ..models.decoder import EXCLUDED, DecoderConfig
from ..models.llama import load_llama_decoder
from ..models.llamagen_vq import HALF_LEVEL
from ..models.prologue import read_folded_sizes, read_prologue_tokenizer
from .common import build_image_model, make_size

# Guidance of the published models, by the number of visual codes and the width: scale of the image, scale of the
# prologue, and power of the image's schedule.
_GUIDANCE = {
    (16384, 768): (3.75, 0.7, 0.2),
    (16384, 1024): (3.0, 0.8, 0.225),
    (16384, 1280): (2.75, 0.8, 0.25),
    (4096, 768): (2.75, 0.65, 0.25),
    (4096, 1024): (2.5, 0.7, 0.25),
}
_DEFAULT_GUIDANCE = (2.25, 0.7, 0.225)  # that of the largest model
_LABELS = "uncond_ar_labels"  # those of no class
_KIND_DISTANCE = 10.0  # vectors of codes have the length 1


def read_prologue(target: Checkpoint, vq: Path, *, config: Path | None = None) -> BundleContents:
    """Read Prologue; `vq` is the folder of its image tokenizer, and `config` a JSON file."""
    settings = Config(target.path, {}) if config is None else read_config(config)
    image_decoder, image_encoder = read_prologue_tokenizer(vq, target.progress, settings)
    image_decoder.head.bias.data = image_decoder.head.bias.data - HALF_LEVEL
    image = image_decoder.config
    target.sources += [] if config is None else [("config", config)]
    target.read_weights(name_filter=lambda name: name != _LABELS)
    target.rename_weights({"classes": "bos_emb.weight", "embed.weight": "semantic_emb.weight"})
    sizes = read_folded_sizes(target, "ar_model.", settings, "rotated_by_position")
    length = image_encoder.length
    visual = image_encoder.num_visual_codes
    end = image.vocab_size - 1
    target.get_shape("classes")  # raises an error for a missing weight
    condition = ClassCondition(target.weights.pop("classes").float()).make_condition()
    if (rows := target.get_shape("embed.weight")[0]) != end + 1:
        expected = f"{end + 1}: the codes of the image tokenizer and an end mark"
        raise target.make_error("embed.weight", found=f"{rows} rows", expected=expected)
    limits = torch.full((length + 2, end + 1), EXCLUDED)
    limits[:length, visual:end] = limits[length, end] = limits[length + 1, :visual] = -EXCLUDED
    target.weights["code_limits"] = limits
    decoder_config = DecoderConfig(
        **sizes,
        vocab_size=end + 1,
        grid=image.grid,
        prefix=1,
        max_image_tokens=length + 1 + image.grid**2,
        rotary="sequence",
        limited_positions=len(limits),
    )
    decoder, embeddings = load_llama_decoder(target, decoder_config)
    scale, first, power = _GUIDANCE.get((visual, decoder_config.hidden_size), _DEFAULT_GUIDANCE)
    # Neighbours of a code are of its kind: vectors of other kinds differ in one more number.
    kinds = torch.bucketize(torch.arange(end + 1), torch.tensor([visual, end]), right=True)
    model = build_image_model(
        decoder=decoder,
        code_embeddings=embeddings.float(),
        condition=condition,
        vq=None,
        codebook=torch.cat([image_decoder.codebook.weight, _KIND_DISTANCE * kinds[:, None]], 1),
        pixels_per_cell=image_decoder.patch,
        sampling=Sampling(cfg_scale=scale, cfg_schedule=f"{first}x{length},cosine-{power}"),
        sizes=(make_size(image.grid, image.grid, image_decoder.patch, first_grid=(1, length + 1)),),
    )
    networks = (image_encoder, image_decoder)
    sources = [*model.sources, *(source for network in networks for source in network.checkpoint.sources)]
    graphs = [*model.graphs, *(network.make_graph() for network in networks)]
    return replace(model, graphs=graphs, sources=sources)


FAMILY = ModelFamily(read_prologue)
