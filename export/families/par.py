"""Model family PAR (arXiv 2412.15119): a class-conditional LlamaGen that samples n cells in one forward pass.

PAR (Parallelized Autoregressive Visual Generation) cuts the grid into n regions, sqrt(n) in each direction. The first
cells of all regions are sampled one after another. Then each forward pass samples one cell of every region, at the same
offset in all regions; the offsets follow in raster order. The first of these passes reads one code and n - 1 learned
vectors. A file has LlamaGen's weights and these vectors, whose number determines n. The number of heads and the grid
are found as for LlamaGen.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

from ...bundle.order import MAX_GROUP, GroupOrderSpec
from ...methods import Sampling
from ..checkpoints.deferred import defer_concatenation
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from .common_llamagen import LlamaGenVariant, build_llamagen_model, read_llamagen_transformer

_VECTORS = "spe_tok_embeddings.special_embeddings.weight"
_VARIANT = LlamaGenVariant(config_fields=("spe_token_num", "ar_token_num"), extra_weights=(_VECTORS,))


def read_par(
    target: Checkpoint,
    vq: Path,
    *,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
) -> BundleContents:
    """Read PAR with LlamaGen's VQ tokenizer. Takes the arguments of `read_llamagen` but those for drafters and text."""
    transformer = read_llamagen_transformer(target, config=config, grid=grid, weights=weights, variant=_VARIANT)
    if not isinstance(transformer.condition, ClassCondition):
        raise target.make_error(found="a text-conditional model", expected="a class-conditional model")
    vectors = transformer.extra_weights[_VECTORS]
    transformer.config.check_sizes_match_weights(spe_token_num=len(vectors), ar_token_num=len(vectors) + 1)
    rows = transformer.decoder.config.grid
    order = make_parallel_order(rows, len(vectors) + 1)
    if order is None:
        regions = f"{len(vectors) + 1} regions, as it has {len(vectors)} learned vectors"
        expected = f"a larger grid that divides into {regions}"
        raise target.make_error("grid", found=f"{rows} x {rows} codes", expected=expected)
    transformer = transformer._replace(code_embeddings=defer_concatenation([transformer.code_embeddings, vectors]))
    sampling = Sampling(cfg_scale=1.5)  # the published evaluation
    return build_llamagen_model(transformer, vq, weights=weights, sampling=sampling, order=order)


FAMILY = ModelFamily(read_par)


def make_parallel_order(grid_side: int, num_regions: int) -> GroupOrderSpec | None:
    """Return the groups of cells that PAR generates together; None if the grid cannot be cut into the regions.

    The number of regions, and of cells per forward pass, is a square number. Each region needs at least two cells.
    """
    side = isqrt(num_regions)
    if side**2 != num_regions or num_regions > MAX_GROUP or grid_side % side or grid_side == side:
        return None
    size = grid_side // side  # rows and columns of a region
    corners = [row * grid_side + column for row in range(0, grid_side, size) for column in range(0, grid_side, size)]
    offsets = [row * grid_side + column for row in range(size) for column in range(size)]
    places = [tuple(corner + offset for corner in corners) for offset in offsets]
    first, *others = places
    return GroupOrderSpec(groups=(*((cell,) for cell in first), *others), vectors=num_regions - 1)
