"""Model family NAR (arXiv 2503.10696): a LlamaGen that samples a diagonal of the grid in one forward pass.

After each code, NAR (Neighboring Autoregressive Modeling) predicts two cells. LlamaGen's head gives logits for the cell
to the right. One more layer, norm and head give logits for the cell below. A cell is sampled from the mean of the two
logits that its left and upper neighbours give; see `runtime/groups.py`. The number of heads and the grid are found as
for LlamaGen.
"""

from __future__ import annotations

from pathlib import Path

from ...bundle.order import MAX_GROUP, GroupOrderSpec
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from .common_llamagen import LlamaGenVariant, PublishedModelSize, build_llamagen_model, read_llamagen_transformer

MODELS = (
    PublishedModelSize(12, 768, 12, (16,)),  # GPT-B
    PublishedModelSize(18, 1024, 16, (16,)),  # GPT-M
    PublishedModelSize(24, 1024, 16, (16,)),  # GPT-L
    PublishedModelSize(36, 1280, 20, (16,), (16, 32)),  # GPT-XL
    PublishedModelSize(48, 1536, 24, (16,)),  # GPT-XXL
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
    """Read NAR with LlamaGen's VQ tokenizer. Takes the arguments of `read_llamagen` but `drafter`.

    In a configuration, `n_layer` does not count the last layer. The grid has 16 rows, or 32 with text prompts.
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
        # Settings of the published programs that generate one image.
        sampling=Sampling(cfg_scale=4.0, top_k=2000) if is_class_conditional else Sampling(cfg_scale=7.5),
        order=make_diagonal_order(rows),
    )


FAMILY = ModelFamily(read_nar)


def make_diagonal_order(grid_side: int) -> GroupOrderSpec:
    """Return the diagonals of a square grid, from the top left; the cells of a diagonal from top to bottom."""
    diagonals = range(2 * grid_side - 1)
    groups = [
        [row * grid_side + d - row for row in range(max(0, d - grid_side + 1), min(d, grid_side - 1) + 1)]
        for d in diagonals
    ]
    return GroupOrderSpec(groups=tuple(map(tuple, groups)), two_heads=True)
