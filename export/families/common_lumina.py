"""Prompts and image sizes of Lumina-mGPT and Lumina-mGPT 2.0, in rows and columns of patches."""

from __future__ import annotations

from collections.abc import Mapping

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from ..checkpoints.files import Config
from ..checkpoints.folders import Checkpoint
from .common import make_size
from .common_chameleon import PROMPT_TOKENS, ChameleonTarget

TEMPLATE = "Generate an image of {size} according to the following prompt:\n{prompt}"
ROW_END = "<reserved08799>"
_PATCH_PIXELS = 32  # height and width of a patch in pixels
_MAX_ASPECT = 4  # maximum aspect ratio of an image


def make_lumina_target(
    checkpoint: Checkpoint,
    config: Config,
    code_token_ids: range,
    token_ids: Mapping[str, int],
    start_id: int,
    grid_rows: int,
    patch_side: int,
) -> ChameleonTarget:
    """Return the target for images of about the area of a square of `grid_rows`; `start_id` begins prompts."""
    layout = TokenLayout(template=TEMPLATE, before=(start_id,), after=(token_ids[PROMPT_TOKENS[1]],), uncond=())
    sizes = list_lumina_sizes(grid_rows, patch_side, token_ids)
    longest = max(size.rows * (size.columns + 1) - 1 for size in sizes)  # end-of-row tokens included
    # The published program computes rotations for all positions.
    return ChameleonTarget(
        checkpoint, config, code_token_ids, token_ids, layout, grid_rows, longest, has_position_limit=False
    )


def list_lumina_sizes(grid_rows: int, patch_side: int, token_ids: Mapping[str, int]) -> list[Size]:
    return [make_lumina_image_size(*pair, token_ids, patch_side) for pair in list_patch_grids(grid_rows // patch_side)]


def list_patch_grids(square_side: int) -> list[tuple[int, int]]:
    """Return rows and columns of all image sizes with about the area of a square, the widest first.

    The published program uses the same sizes. With c columns and a square of n patches, the numbers of rows are
    n // (c + 1) .. n // c. No image is more than four times as long as it is wide, or the reverse.
    """
    area = square_side**2
    pairs = [
        (rows, columns)
        for columns in range(2 * square_side, 0, -1)
        for rows in range(area // (columns + 1), area // columns + 1)
    ]
    return [pair for pair in pairs if min(pair) > 0 and max(pair) <= _MAX_ASPECT * min(pair)]


def list_size_token_names(square_side: int) -> list[str]:
    """Return the tokens for the numbers 1 to the largest number of rows or columns of patches."""
    return [_size_token_name(side) for side in range(1, 1 + max(map(max, list_patch_grids(square_side))))]


def make_lumina_image_size(rows: int, columns: int, token_ids: Mapping[str, int], patch_side: int) -> Size:
    """Return an image size with the tokens that describe it at the end of a prompt."""
    tokens = (PROMPT_TOKENS[-1], _size_token_name(rows), _size_token_name(columns))
    ids = tuple(token_ids[name] for name in tokens)
    return make_size(patch_side * rows, patch_side * columns, _PATCH_PIXELS // patch_side, tokens=ids)


def _size_token_name(num_patches: int) -> str:
    return f"<reserved{8800 + num_patches:05d}>"
