"""PAR (Parallelized Autoregressive Visual Generation, arXiv 2412.15119): a class-conditional LlamaGen that draws n
cells in a pass.

The grid is cut into n regions, sqrt(n) each way. The first cells of all regions are drawn one after another. Then every
pass draws the cells of one place, in raster order inside the regions. The first of these passes reads one code and n-1
learned vectors. A file has LlamaGen's weights and the vectors, which tell n. Heads and grid are found as LlamaGen's.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

from ...bundle.order import MAX_GROUP, OrderSpec
from ...methods import Sampling
from ..checkpoints.deferred import defer_concatenation
from ..checkpoints.folders import Checkpoint
from ..family import Family
from ..graph.conditions import ClassCondition
from ..model import Model
from .common_llamagen import LlamaGenVariant, llamagen_model, read_transformer

_VECTORS = "spe_tok_embeddings.special_embeddings.weight"
_VARIANT = LlamaGenVariant(arguments=("spe_token_num", "ar_token_num"), extra=(_VECTORS,))


def read_par(
    target: Checkpoint,
    vq: Path,
    *,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
) -> Model:
    """Read PAR with LlamaGen's VQ tokenizer.

    Args:
        target: published file, or a checkpoint of the training program.
        vq: file of the VQ tokenizer.
        config: JSON file of the arguments, see `read_llamagen`.
        grid: grid rows, 24 for 384 pixels; see `read_llamagen`.
        weights: `model` or `ema`, for files with both; None for the first, with a warning.

    Raises:
        CheckpointError: a file is missing or damaged, is not of PAR, or the grid cannot be cut into its regions.
        RequestError: `weights` is unknown.
    """
    transformer = read_transformer(target, config=config, grid=grid, weights=weights, variant=_VARIANT)
    if not isinstance(transformer.condition, ClassCondition):
        raise target.error(found="a text-conditional model", expected="a class-conditional one")
    vectors = transformer.extra[_VECTORS]
    transformer.config.check_sizes(spe_token_num=len(vectors), ar_token_num=len(vectors) + 1)
    rows = transformer.decoder.config.grid
    order = parallel_order(rows, len(vectors) + 1)
    if order is None:
        regions = f"{len(vectors) + 1} regions, as it has {len(vectors)} learned vectors"
        expected = f"a larger grid that divides into {regions}"
        raise target.error("grid", found=f"{rows} x {rows} codes", expected=expected)
    transformer = transformer._replace(code_embeddings=defer_concatenation([transformer.code_embeddings, vectors]))
    sampling = Sampling(cfg_scale=1.5)  # the published evaluation
    return llamagen_model(transformer, vq, weights=weights, sampling=sampling, order=order)


FAMILY = Family(read_par)


def parallel_order(grid: int, regions: int) -> OrderSpec | None:
    """Return PAR's order; None if a grid cannot be cut into so many regions of at least two cells.

    Args:
        grid: rows and columns of the grid.
        regions: number of regions, a square number; the number of cells of a pass.
    """
    side = isqrt(regions)
    if side**2 != regions or regions > MAX_GROUP or grid % side or grid == side:
        return None
    size = grid // side  # rows and columns of a region
    corners = [row * grid + column for row in range(0, grid, size) for column in range(0, grid, size)]
    offsets = [row * grid + column for row in range(size) for column in range(size)]
    places = [tuple(corner + offset for corner in corners) for offset in offsets]
    first, *others = places
    return OrderSpec(groups=(*((cell,) for cell in first), *others), vectors=regions - 1)
