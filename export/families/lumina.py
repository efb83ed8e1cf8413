"""Lumina-mGPT: a Chameleon for images of many sizes, with an end-of-row token after every grid row.

A prompt is `<s>`, a text with the size in pixels and the caption, end of turn, and three size tokens. The size tokens
are begin of image, then the number of rows and of columns in patches of 2 x 2 codes. The published program lets the
model generate them; here the requested size determines them. The unconditional row consists of the size tokens. The
folder has no image tokenizer; like Anole, the model uses Chameleon's VQGAN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...bundle.conditions import TokenLayout
from ...bundle.manifest import Size
from ...engines.contracts import Progress
from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.files import file_error, raises_checkpoint_error
from ..checkpoints.lora import Adapter
from ..model import Model
from ..models.vq_checkpoints import read_vqgan
from ..progress import silent
from .anole import LUMINA, PROMPT_TOKENS, chameleon_model, read_chameleon
from .common import check_grid

TEMPLATE = "Generate an image of {size} according to the following prompt:\n{prompt}"
ROW_END = "<reserved08799>"
_PATCH = 2  # codes along each side of a patch
_PATCH_PIXELS = 32  # pixels along each side of a patch
_MAX_ASPECT = 4  # maximum aspect ratio of an image
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000)  # settings of Lumina-mGPT's published program and of LANTERN


@raises_checkpoint_error
def read_lumina(
    target: Path,
    vq: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
) -> Model:
    """Read Lumina-mGPT with Chameleon's VQGAN.

    Args:
        target: folder with config.json, tokenizer.json and weights.
        vq: folder with vqgan.ckpt and vqgan.yaml, or the .ckpt file.
        drafter: folder in LANTERN's layout, None without a drafter.
        grid: grid rows of the square image size, an even number: 32, 48 or 64 for the published models. Other sizes
            have about as many codes.
        lora: adapters to merge into the target.
        progress: progress callback.

    Raises:
        CheckpointError: `grid` is missing or odd, or a file is missing, damaged or of another model.
        RequestError: `grid` is out of range.
    """
    check_grid(grid)
    if grid is None or grid % _PATCH:
        expected = "32, 48 or 64 for Lumina-mGPT of 512, 768 or 1024 pixels, as its files do not contain the size"
        raise CheckpointError(field="grid", found="nothing" if grid is None else str(grid), expected=expected)
    patches = patch_sizes(grid // _PATCH)
    tokens = (*PROMPT_TOKENS, ROW_END, *side_tokens(patches))
    model = read_chameleon(target, grid, LUMINA, tokens, _layout, longest_image(patches), lora, progress)
    names = model.names
    codes = model.codes
    extra_tokens = names[ROW_END] + 1 - codes.stop
    if extra_tokens < 1:
        raise file_error(target, ROW_END, found=f"token {names[ROW_END]}", expected="a token after the image tokens")
    return chameleon_model(
        model,
        read_vqgan(vq, progress),  # the resolution in vqgan.yaml is the one of training and does not matter here
        drafter,
        progress,
        extra_tokens,
        family="lumina",
        sampling=_SAMPLING,
        sizes=[image_size(rows, columns, names) for rows, columns in patches],
        row_end=names[ROW_END] - codes.start,
    )


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


def longest_image(patches: Sequence[tuple[int, int]], patch: int = _PATCH) -> int:
    """Return the number of tokens of the longest image, end-of-row tokens included.

    Args:
        patches: rows and columns of patches of every size.
        patch: codes along each side of a patch.
    """
    return max(patch * rows * (patch * columns + 1) - 1 for rows, columns in patches)


def side_tokens(patches: Sequence[tuple[int, int]]) -> list[str]:
    """Return the names of the tokens for numbers of rows and columns up to the largest in `patches`."""
    return [_side_token(side) for side in range(1, 1 + max(max(pair) for pair in patches))]


def image_size(rows: int, columns: int, token_ids: Mapping[str, int], patch: int = _PATCH) -> Size:
    """Return an image size with its prompt tokens, which are the end of both prefix rows.

    Args:
        rows: rows of patches.
        columns: columns of patches.
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


def _layout(names: Mapping[str, int]) -> TokenLayout:
    start, end, _ = (names[name] for name in PROMPT_TOKENS)
    return TokenLayout(template=TEMPLATE, before=(start,), after=(end,), uncond=())
