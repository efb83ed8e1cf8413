"""Model family GEAR-T2I: a LlamaGen whose prompts Qwen3 encodes, and whose first layers have other weights for text.

In these layers, text has a norm, a projection to queries, keys and values, and an output projection of its own. With
them, the graph `prefix` computes the keys and values of a prompt. The unconditional prompt is the empty text.
"""

from __future__ import annotations

from pathlib import Path

from ...methods import Sampling
from ..checkpoints.files import format_names, read_training_arguments
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition, make_causal_text_condition
from ..model import BundleContents
from ..models.causal_encoder import read_qwen3_encoder
from ..models.vq_checkpoints import read_llamagen_vq
from .common import build_image_model
from .common_llamagen import LlamaGenVariant, PublishedModelSize, read_llamagen_transformer

# Names in the files of the modules of a layer that text has for itself, by their names in the decoder.
_TEXT_MODULES = {
    "attention_norm": "attention_norm_text",
    "attention.qkv": "attention.wqkv_text",
    "attention.out": "attention.wo_text",
}
_VARIANT = LlamaGenVariant(
    published_sizes=(PublishedModelSize(36, 1440, 20, (), (16,)),),
    prefix_weights={f"layers.*.{ours}.weight": f"layers.*.{theirs}.weight" for ours, theirs in _TEXT_MODULES.items()},
)


def read_gear(
    target: Checkpoint, vq: Path, text_encoder: Path, *, config: Path | None = None, grid: int | None = None
) -> BundleContents:
    """Read GEAR-T2I with its VQ tokenizer, both with averaged weights, and a folder of Qwen3-1.7B.

    `config` and `grid` are those of `read_llamagen`.
    """
    read_training_arguments(target.path).check_value("text_attn", "causal", None)
    transformer = read_llamagen_transformer(target, config=config, grid=grid, weights="ema", variant=_VARIANT)
    captions = transformer.condition
    if isinstance(captions, ClassCondition) or transformer.prefix_decoder is None:
        raise target.make_error(found="a class-conditional model", expected="a text-conditional model")
    sizes = transformer.decoder.config
    text = transformer.prefix_decoder.checkpoint
    count = max(1, round(sizes.num_layers / 3))
    names = {f"layers.{i}.{part}.weight" for i in range(count) for part in _TEXT_MODULES}
    if differing := names ^ text.weights.keys():
        found = f"missing or unexpected: {format_names({text.get_stored_name(name) for name in differing})}"
        raise target.make_error(found=found, expected=f"weights for text in the first {count} layers")
    encoder = read_qwen3_encoder(text_encoder, captions.first.shape[1], sizes.prefix, target.progress)
    condition = make_causal_text_condition(encoder.encoder, encoder.tokenizer, captions)
    return build_image_model(
        decoder=transformer.decoder,
        prefix_decoder=transformer.prefix_decoder,
        code_embeddings=transformer.code_embeddings,
        condition=condition._replace(sources=encoder.sources),
        vq=read_llamagen_vq(vq, target.progress, averaged=True),
        sampling=Sampling(cfg_scale=4.0),
    )


FAMILY = ModelFamily(read_gear)
