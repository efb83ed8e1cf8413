"""Prompts and image sizes of Lumina-mGPT, for both of its versions.

A size is a number of patches along each side, and a prompt ends with the tokens of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from .common_chameleon import PROMPT_TOKENS

TEMPLATE = "Generate an image of {size} according to the following prompt:\n{prompt}"
ROW_END = "<reserved08799>"
_PATCH_PIXELS = 32  # pixels along each side of a patch
_MAX_ASPECT = 4  # maximum aspect ratio of an image


def lumina_prompt_layout(start: int, end: int) -> TokenLayout:
    """Return the layout of prompts up to the tokens of an image size. The parameters are token ids."""
    return TokenLayout(template=TEMPLATE, before=(start,), after=(end,), uncond=())


def patch_sizes(side: int) -> list[tuple[int, int]]:
    """Return rows and columns of all image sizes for a square of `side` patches, widest first.

    These are the sizes of the published program: it adds a row while the area is at most that of the square, otherwise
    removes a column. No side is more than four times the other.
    """
    area = side**2
    pairs = [
        (rows, columns)
        for columns in range(2 * side, 0, -1)
        for rows in range(area // (columns + 1), area // columns + 1)
    ]
    return [pair for pair in pairs if min(pair) > 0 and max(pair) <= _MAX_ASPECT * min(pair)]


def count_longest_image(patches: Sequence[tuple[int, int]], patch: int) -> int:
    """Return the number of tokens of the longest image, end-of-row tokens included.

    Args:
        patches: rows and columns of patches of every size.
        patch: codes along each side of a patch.
    """
    return max(patch * rows * (patch * columns + 1) - 1 for rows, columns in patches)


def list_side_tokens(patches: Sequence[tuple[int, int]]) -> list[str]:
    """Return the names of the tokens for numbers of rows and columns up to the largest in `patches`."""
    return [_side_token(side) for side in range(1, 1 + max(max(pair) for pair in patches))]


def lumina_image_size(rows: int, columns: int, token_ids: Mapping[str, int], patch: int) -> Size:
    """Return an image size with its prompt tokens, which are the end of both prefix rows.

    Args:
        token_ids: token ids by name.
        patch: codes along each side of a patch.
    """
    tokens = (PROMPT_TOKENS[-1], _side_token(rows), _side_token(columns))
    return Size(
        name=f"{_PATCH_PIXELS * columns}x{_PATCH_PIXELS * rows}",
        rows=patch * rows,
        columns=patch * columns,
        tokens=tuple(token_ids[name] for name in tokens),
    )


def _side_token(patches: int) -> str:
    return f"<reserved{8800 + patches:05d}>"
