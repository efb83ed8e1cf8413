"""Janus and Janus-Pro in the layout of transformers: one folder with decoder, generation head and image tokenizer.

The decoder is a Llama. Image tokens have a separate vocabulary. An embedding and a small network, which are folded into
one table here, compute the decoder's input; a head with a hidden layer predicts codes. A prompt is a chat turn; the
unconditional row is the prompt with its text replaced by padding. LANTERN has no drafter for Janus.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...bundle.conditions import TokenLayout
from ...methods import Sampling
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from ..family import Family
from ..graph.conditions import token_condition
from ..model import Model
from ..models.llama import decoder_config, load_decoder, rename_llama
from ..models.vq_checkpoints import load_vq, rename_vqgan
from .common import check_grid, image_model

_LANGUAGE = "model.language_model."
_ALIGNER = "model.generation_aligner."
_UNUSED = ("model.vision_model.", "model.aligner.", "lm_head.")  # weights for image and text understanding
_NAMES = {
    "embed.weight": f"{_LANGUAGE}embed_tokens.weight",
    "codes": "model.generation_embeddings.weight",
    "head.first.weight": "model.generation_head.proj_out.weight",
    "head.first.bias": "model.generation_head.proj_out.bias",
    "head.second.weight": "model.generation_head.vision_head.weight",
    "head.second.bias": "model.generation_head.vision_head.bias",
}
_TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"


def read_janus(target: Checkpoint) -> Model:
    """Read Janus or Janus-Pro.

    Args:
        target: folder with config.json, generation_config.json, tokenizer.json and weights.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
    """
    config = target.model_config("deepseek-community/Janus-Pro-1B", "janus")
    generation = target.config("generation_config.json")
    tokenizer = target.tokenizer()
    text, vision, vq = (config.section(name) for name in ("text_config", "vision_config", "vq_config"))
    vq.expect("hidden_act", "gelu", None)
    pixels = vision.integer("image_size")
    patch = vision.integer("patch_size")
    if pixels is None or patch is None:
        raise config.error("vision_config", "lacks image_size or patch_size, which determine the grid rows")
    check_grid(pixels // patch)
    target.read(keep=lambda name: not name.startswith(_UNUSED))
    vq_checkpoint = target.extract("model.vqmodel.")
    rename_vqgan(vq_checkpoint, coarsest_first=True)
    image_tokenizer = load_vq(vq_checkpoint, normalize_for_encoder=False)
    aligner = target.extract(_ALIGNER)
    rename_llama(target, _LANGUAGE, _NAMES)
    codes = target.shape("codes")[0]
    hidden = target.shape("head.first.weight")[0]
    sizes = decoder_config(target, text, codes, pixels // patch, head_hidden=hidden)
    code_embeddings = _fold_codes(target.weights.pop("codes"), aligner)
    decoder, text_embeddings = load_decoder(target, sizes)
    return image_model(
        decoder=decoder,
        code_embeddings=code_embeddings,
        condition=token_condition(text_embeddings, decoder.config.prefix, _layout(generation), tokenizer),
        vq=image_tokenizer,
        sampling=Sampling(cfg_scale=generation.number("guidance_scale", 5.0)),
        sources=target.sources,
    )


FAMILY = Family(read_janus, model_types=("janus", "multi_modality"))  # and as DeepSeek publishes it


def _fold_codes(codes: Tensor, aligner: Checkpoint) -> Tensor:
    """Compute the decoder's input for each code, `[codes, hidden_size]`, with the aligner network."""
    layers = ["fc1", *(f"hidden_layers.{i}" for i in range(aligner.count("hidden_layers.")))]
    wanted = {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    if aligner.weights.keys() != wanted:
        raise aligner.error(found=str(sorted(aligner.weights)), expected=str(sorted(wanted)))
    codes = codes.float()
    with torch.no_grad():
        for i, layer in enumerate(layers):
            weight, bias = (aligner.weights[f"{layer}.{part}"].float() for part in ("weight", "bias"))
            codes = F.linear(F.gelu(codes) if i else codes, weight, bias)
    return codes


def _layout(generation: Config) -> TokenLayout:
    """Return the prompt layout: start of text, the chat turn or its padding, begin of image."""
    extra = generation.get("generation_kwargs")
    ids = dict(generation.values) | (dict(extra) if isinstance(extra, Mapping) else {})
    names = ("bos_token_id", "pad_token_id", "boi_token_id")
    if missing := [name for name in names if type(ids.get(name)) is not int]:
        raise generation.error(", ".join(missing), "is not a token id", remedy="give the model's own file")
    start, padding, begin = (ids[name] for name in names)
    return TokenLayout(template=_TEMPLATE, before=(start,), after=(begin,), uncond_fill=padding)
