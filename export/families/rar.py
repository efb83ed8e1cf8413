"""Model family RAR (arXiv 2411.00776), class-conditional, with MaskGIT's image tokenizer.

RAR (Randomized Autoregressive visual generation) is trained in random orders that end in raster order, in which it
generates. Position 0 is a constant token, position 1 the class, and code k is at position 2 + k. An input is the sum of
the token, its position and the cell that is sampled after it; class and position also determine the adaptive norms
(`AdaptiveLayers` in `engines/graph_writer.py`). A file has only weights, whose shapes determine all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ..models.adaptive import AdaptiveDecoder, fold_norms
from ..models.decoder import DecoderConfig
from ..models.maskgit_vq import read_maskgit_vq
from .common import build_image_model

_PREFIX = 2
_EPSILON = 1e-6
# Numbers of rows of the tables of positions in addition to those of codes.
_TABLES = {"pos_embed": 1024, "target_aware_pos_embed": 1024, "timesteps_embeddings": 100}
_KINDS = ("weight", "bias")
_NORMS = ("attention_norm", "ffn_norm")
_LAYER_NAMES = {
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
_NAMES = {
    **{f"layers.*.{ours}": f"blocks.*.{theirs}" for ours, theirs in _LAYER_NAMES.items()},
    "norm.modulation": "adaln_before_head.adaLN_modulation.1",
    "head": "lm_head",
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
    if not {*_TABLES, "lm_head.weight"} <= target.weights.keys():
        expected = f"a RAR transformer, with lm_head, {', '.join(_TABLES)}"
        raise target.make_error(found=target.format_names(), expected=expected)
    target.rename_weights({f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _NAMES.items() for kind in _KINDS})
    config = _read_sizes(target)
    num_codes = config.vocab_size
    embeddings = target.weights.pop("embeddings.weight").float()
    first = _take(target, "cls_token", 1, 1, config.hidden_size).float()
    condition = _Condition(embeddings[num_codes + 1 :], first.flatten())
    target.weights |= {"class_vectors": condition.table.data, **_take_position_vectors(target, config)}
    for i in range(config.num_layers):
        _change_layer(target, config, f"layers.{i}")
    _change_last_norm(target, config.hidden_size)
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
    num_embeddings, _ = target.get_shape("embeddings.weight")
    (head_width,) = target.get_shape("layers.0.attention.query_norm.weight", 1)
    lengths = {target.get_shape(name, 3)[1] - extra for name, extra in _TABLES.items()}
    grid = isqrt(max(0, *lengths))
    conditions = num_embeddings - num_codes - 1
    if lengths != {grid**2} or not grid or conditions < 2 or width % head_width:
        found = f"tables for {sorted(lengths)} codes, {num_embeddings} embeddings, {num_codes} codes"
        expected = f"tables for a square number of codes, embeddings of classes, heads that divide {width}"
        raise target.make_error(found=f"{found}, heads of {head_width}", expected=expected)
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


def _take(target: Checkpoint, name: str, *shape: int) -> Tensor:
    """Return a weight, which must have this shape, and remove it from the checkpoint."""
    found = target.get_shape(name, len(shape))
    if found != shape:
        raise target.make_error(name, found=f"shape {[*found]}", expected=f"{[*shape]}")
    return target.weights.pop(name)


def _take_position_vectors(target: Checkpoint, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the decoder's tables of positions."""
    cells = config.grid**2
    tables = (_take(target, name, 1, cells + extra, config.hidden_size)[0].float() for name, extra in _TABLES.items())
    positions, next_cells, steps = tables
    count = config.max_sequence_length
    # Inputs from the class on also contain the vector of the cell that is sampled next. The last code has none.
    padding = (0, 0, _PREFIX - 1, count - cells - _PREFIX + 1)
    return {
        "position_vectors": positions[:count] + F.pad(next_cells[_PREFIX : _PREFIX + cells], padding),
        "step_vectors": steps[:count],
    }


def _change_layer(target: Checkpoint, config: DecoderConfig, name: str) -> None:
    width = config.hidden_size
    for norm in ("query_norm", "key_norm"):  # one norm for all heads
        for kind in _KINDS:
            weight = f"{name}.attention.{norm}.{kind}"
            target.weights[weight] = _take(target, weight, config.head_dim).expand(config.num_heads, -1)
    norms = [[_take(target, f"{name}.{norm}.{kind}", width) for kind in _KINDS] for norm in _NORMS]
    matrix = _take(target, f"{name}.modulation.weight", 6 * width, width)
    bias = _take(target, f"{name}.modulation.bias", 6 * width)
    _store_modulation(target, name, matrix, bias, norms)


def _change_last_norm(target: Checkpoint, width: int) -> None:
    """Store the last norm, which has no weight and bias. In a file the scale comes before the shift."""
    shapes = ((2 * width, width), (2 * width,))
    parts = (_take(target, f"norm.modulation.{kind}", *shape) for kind, shape in zip(_KINDS, shapes, strict=True))
    matrix, bias = (torch.cat([*reversed(part.chunk(2))]) for part in parts)
    _store_modulation(target, "norm", matrix, bias, [[torch.ones(width), torch.zeros(width)]])


def _store_modulation(
    target: Checkpoint, name: str, matrix: Tensor, bias: Tensor, norms: Sequence[Sequence[Tensor]]
) -> None:
    parts = fold_norms(matrix, bias, norms)
    target.weights |= {f"{name}.modulation.{kind}": part for kind, part in zip(_KINDS, parts, strict=True)}
