"""Prompts and image sizes of Lumina-mGPT and Lumina-mGPT 2.0, in rows and columns of patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from .common import make_size
from .common_chameleon import PROMPT_TOKENS

TEMPLATE = "Generate an image of {size} according to the following prompt:\n{prompt}"
ROW_END = "<reserved08799>"
_PATCH_PIXELS = 32  # height and width of a patch in pixels
_MAX_ASPECT = 4  # maximum aspect ratio of an image


def make_lumina_prompt_layout(start_id: int, end_id: int) -> TokenLayout:
    """Return the layout of prompts; the tokens of an image size follow."""
    return TokenLayout(template=TEMPLATE, before=(start_id,), after=(end_id,), uncond=())


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


def count_max_image_tokens(patch_grids: Sequence[tuple[int, int]], patch_side: int) -> int:
    """Return the number of tokens of the image with the most tokens, end-of-row tokens included."""
    return max(patch_side * rows * (patch_side * columns + 1) - 1 for rows, columns in patch_grids)


def list_size_token_names(patch_grids: Sequence[tuple[int, int]]) -> list[str]:
    """Return the tokens for the numbers 1 to the largest number of rows or columns."""
    return [_size_token_name(side) for side in range(1, 1 + max(max(pair) for pair in patch_grids))]


def make_lumina_image_size(rows: int, columns: int, token_ids: Mapping[str, int], patch_side: int) -> Size:
    """Return an image size with the tokens that describe it at the end of a prompt."""
    tokens = (PROMPT_TOKENS[-1], _size_token_name(rows), _size_token_name(columns))
    ids = tuple(token_ids[name] for name in tokens)
    return make_size(patch_side * rows, patch_side * columns, _PATCH_PIXELS // patch_side, tokens=ids)


def _size_token_name(num_patches: int) -> str:
    return f"<reserved{8800 + num_patches:05d}>"
