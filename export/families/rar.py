"""Model family RAR (arXiv 2411.00776), class-conditional, with MaskGIT's image tokenizer.

RAR (Randomized Autoregressive visual generation) is trained in random orders that end in raster order, in which it
generates. Position 0 is a constant token, position 1 the class, and code k is at position 2 + k. An input is the sum of
the token, its position and the cell that is sampled after it; class and position also determine the adaptive norms
(`AdaptiveLayers` in `engines/graph_writer.py`). A file has only weights, whose shapes determine all sizes.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...methods import Sampling
from ..checkpoints.deferred import skip_weight_allocation
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from ..models.adaptive import AdaptiveDecoder, fold_norm_into_modulation
from ..models.decoder import DecoderConfig
from ..models.maskgit_vq import read_maskgit_vq
from .common import build_image_model

_PREFIX = 2
_EPSILON = 1e-6
# Numbers of rows of the tables of positions in addition to those of codes.
_TABLES = {"pos_embed": 1024, "target_aware_pos_embed": 1024, "timesteps_embeddings": 100}
_KINDS = ("weight", "bias")
_NAMES = {
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "attention.query_norm": "attn.q_norm",
    "attention.key_norm": "attn.k_norm",
    "attention_norm": "norm1",
    "ffn_norm": "norm2",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
    "modulation": "adaLN_modulation.1",
}
# Settings of the published evaluation, by number of layers and width; those of the demonstration for other sizes.
SAMPLING = {
    (24, 768): Sampling(cfg_scale=16.0, cfg_schedule="cosine-2.75"),  # RAR-B
    (24, 1024): Sampling(cfg_scale=15.5, cfg_schedule="cosine-2.5", temperature=1.02),  # RAR-L
    (32, 1280): Sampling(cfg_scale=6.9, cfg_schedule="cosine-1.5", temperature=1.02),  # RAR-XL
    (40, 1408): Sampling(cfg_scale=8.0, cfg_schedule="cosine-1.2", temperature=1.02),  # RAR-XXL
}
_DEMONSTRATION = Sampling(cfg_scale=4.0)


class _Condition(ClassCondition):
    """Class embeddings after the constant token `first [hidden_size]`."""

    def __init__(self, table: Tensor, first: Tensor) -> None:
        super().__init__(table)
        self.first = nn.Parameter(first, requires_grad=False)

    def forward(self, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = super().forward(class_ids)
        cond, uncond = (torch.cat([self.first.expand_as(row), row], 1) for row in rows)
        return cond, uncond


def read_rar(target: Checkpoint, vq: Path) -> BundleContents:
    """Read RAR from a file of weights, with MaskGIT's VQ tokenizer."""
    target.read_weights()
    layer_names = {
        f"layers.*.{ours}.{kind}": f"blocks.*.{theirs}.{kind}" for ours, theirs in _NAMES.items() for kind in _KINDS
    }
    end_names = {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in (("head", "lm_head"), ("norm.modulation", "adaln_before_head.adaLN_modulation.1"))
        for kind in _KINDS
    }
    target.rename_weights({**layer_names, **end_names})
    config = _read_sizes(target)
    num_codes = config.vocab_size
    embeddings, first = (target.weights.pop(name).float() for name in ("embeddings.weight", "cls_token"))
    condition = _Condition(embeddings[num_codes + 1 :], first.flatten())
    _move_vectors(target, config, condition.table)
    _change_layers(target, config)
    with skip_weight_allocation():
        decoder = AdaptiveDecoder(config)
    target.load_module_weights(decoder)
    return build_image_model(
        decoder=decoder,
        code_embeddings=embeddings[:num_codes],
        condition=condition.make_condition(_PREFIX, positions_per_class=config.max_sequence_length),
        vq=read_maskgit_vq(vq, target.progress),
        sampling=SAMPLING.get((config.num_layers, config.hidden_size), _DEMONSTRATION),
    )


FAMILY = ModelFamily(read_rar)


def _read_sizes(target: Checkpoint) -> DecoderConfig:
    num_codes, width = target.get_shape("head.weight")
    rows, _ = target.get_shape("embeddings.weight")
    (head_width,) = target.get_shape("layers.0.attention.query_norm.weight", 1)
    lengths = {target.get_shape(name, 3)[1] - extra for name, extra in _TABLES.items()}
    cells = max(lengths)
    grid = isqrt(max(cells, 0))
    conditions = rows - num_codes - 1
    if len(lengths) > 1 or not grid or grid**2 != cells or conditions < 2 or width % head_width:
        found = f"tables for {sorted(lengths)} codes, {rows} embeddings for {num_codes} codes, heads of {head_width}"
        expected = f"tables for a square number of codes, embeddings of classes, and heads that divide {width}"
        raise target.make_error(found=found, expected=expected)
    return DecoderConfig(
        hidden_size=width,
        num_layers=target.count_layers("layers."),
        num_heads=width // head_width,
        num_kv_heads=width // head_width,
        intermediate_size=target.get_shape("layers.0.ffn.up.weight")[0],
        vocab_size=num_codes,
        grid=grid,
        prefix=_PREFIX,
        norm_eps=_EPSILON,
        layer_head_eps=_EPSILON,
        rotary="learned",
        query_key_norm=True,
        qkv_bias=True,
        final_norm=False,
        conditions=conditions,
    )


def _move_vectors(target: Checkpoint, config: DecoderConfig, classes: Tensor) -> None:
    """Move the tables of positions and classes to the decoder's names."""
    positions, cells, steps = (target.weights.pop(name)[0].float() for name in _TABLES)
    count = config.max_sequence_length
    last = config.grid**2 + _PREFIX  # position after the last code
    # Inputs from the class on also contain the vector of the cell that is sampled next; the last code has none.
    next_cells = F.pad(cells[_PREFIX:last], (0, 0, 1, count - last + 1))
    target.weights |= {
        "position_vectors": positions[:count] + next_cells,
        "step_vectors": steps[:count],
        "class_vectors": classes.data,
    }


def _change_layers(target: Checkpoint, config: DecoderConfig) -> None:
    weights = target.weights
    for i in range(config.num_layers):
        name = f"layers.{i}"
        for norm in ("query_norm", "key_norm"):  # one norm for all heads
            for kind in _KINDS:
                vector = weights[f"{name}.attention.{norm}.{kind}"]
                weights[f"{name}.attention.{norm}.{kind}"] = vector.expand(config.num_heads, -1)
        fold_norm_into_modulation(target, f"{name}.modulation", [f"{name}.attention_norm", f"{name}.ffn_norm"], 3)
    for kind in _KINDS:  # scale, shift in the file
        joint = weights[f"norm.modulation.{kind}"]
        weights[f"norm.modulation.{kind}"] = torch.cat([*reversed(joint.chunk(2))])
    fold_norm_into_modulation(target, "norm.modulation", ["norm"], 2)
