"""NAR (Neighboring Autoregressive Modeling, arXiv 2503.10696): a LlamaGen that draws a diagonal of the grid in a pass.

After each code it has logits for two cells: for the cell to the right, as LlamaGen, and for the cell below, from one
layer, norm and head more. A cell is drawn from the mean of the logits after its two neighbours; see `runtime/order.py`.
Heads and grid are found as LlamaGen's.
"""

from __future__ import annotations

from pathlib import Path

from ...bundle.order import MAX_GROUP, GroupOrderSpec
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from .common_llamagen import LlamaGenVariant, PublishedSize, build_llamagen_model, read_llamagen_transformer

MODELS = (
    PublishedSize(12, 768, 12, (16,)),  # GPT-B
    PublishedSize(18, 1024, 16, (16,)),  # GPT-M
    PublishedSize(24, 1024, 16, (16,)),  # GPT-L
    PublishedSize(36, 1280, 20, (16,), (16, 32)),  # GPT-XL
    PublishedSize(48, 1536, 24, (16,)),  # GPT-XXL
)
_VARIANT = LlamaGenVariant(
    config_fields=("medusa_attention_num",),
    weight_names={
        "head.right.weight": "output.weight",
        "head.below.weight": "medusa_output.weight",
        "below_norm.weight": "medusa_norm.weight",
    },
    published_sizes=MODELS,
    two_heads=True,
)


def read_nar(
    target: Checkpoint,
    vq: Path,
    *,
    text_encoder: Path | None = None,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
) -> BundleContents:
    """Read NAR with LlamaGen's VQ tokenizer.

    Args:
        target: published file, or a checkpoint of the training program.
        vq: file of the VQ tokenizer.
        text_encoder: folder of flan-t5-xl, see `read_llamagen`.
        config: JSON file of the arguments; its `n_layer` does not count the last layer.
        grid: grid rows, 16 or 32 for texts; see `read_llamagen`.
        weights: `model` or `ema`, for files with both; None for the first, with a warning.

    Raises:
        CheckpointError: a file is missing or damaged, or is not of NAR.
        RequestError: `weights` is unknown.
    """
    transformer = read_llamagen_transformer(target, config=config, grid=grid, weights=weights, variant=_VARIANT)
    transformer.config.check_value("medusa_attention_num", 1, None)
    rows = transformer.decoder.config.grid
    if rows > MAX_GROUP:
        expected = f"at most {MAX_GROUP} rows, for passes of as many codes"
        raise target.make_error("grid", found=f"{rows} x {rows} codes", expected=expected)
    is_class_conditional = isinstance(transformer.condition, ClassCondition)
    return build_llamagen_model(
        transformer,
        vq,
        weights=weights,
        text_encoder=text_encoder,
        # the published programs for one image
        sampling=Sampling(cfg_scale=4.0, top_k=2000) if is_class_conditional else Sampling(cfg_scale=7.5),
        order=make_diagonal_order(rows),
    )


FAMILY = ModelFamily(read_nar)


def make_diagonal_order(grid_side: int) -> GroupOrderSpec:
    """Return NAR's order: the diagonals of a square grid from its first cell, each from the top row down.

    Args:
        grid_side: rows and columns of the grid.
    """
    diagonals = range(2 * grid_side - 1)
    groups = [
        [row * grid_side + d - row for row in range(max(0, d - grid_side + 1), min(d, grid_side - 1) + 1)]
        for d in diagonals
    ]
    return GroupOrderSpec(groups=tuple(map(tuple, groups)), two_heads=True)
