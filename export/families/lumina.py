"""Lumina-mGPT: a Chameleon that draws pictures of many sizes, each row of codes followed by an end-of-row token.

A prompt is `<s>`, a text that names the size in pixels and then the caption, end of turn, and what the model would
write itself before the first code: begin of image, rows and columns in patches of 2 x 2 codes, the rows first. The
unconditional row is these last three tokens alone. The files hold no image tokenizer: it is Chameleon's, as Anole's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...bundle.manifest import Size, TokenLayout
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

_TEMPLATE = "Generate an image of {size} according to the following prompt:\n{prompt}"
_ROW_END = "<reserved08799>"
_PATCH, _PATCH_PIXELS = 2, 32  # codes and pixels along each side
_SLENDEREST = 4  # longer sides by shorter ones
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000)  # of its solver; LANTERN's for it, too


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
    """The model of a Lumina-mGPT folder with Chameleon's VQGAN.

    Args:
        target: config.json, tokenizer.json and weights.
        vq: a folder with vqgan.ckpt and vqgan.yaml, or the .ckpt.
        drafter: a folder in LANTERN's layout.
        grid: rows of codes of its square picture, which is the default: 32, 48 or 64 of the published models; other
            sizes have about as many codes.
        lora: merged into the target.

    Raises: CheckpointError, RequestError.
    """
    check_grid(grid)
    if grid is None or grid % _PATCH:
        expected = "32, 48 or 64 for Lumina-mGPT of 512, 768 or 1024 pixels, which its files do not tell"
        raise CheckpointError(field="grid", found="nothing" if grid is None else str(grid), expected=expected)
    patches = patch_sizes(grid // _PATCH)
    longest = max(_PATCH * high * (_PATCH * wide + 1) - 1 for high, wide in patches)
    sides = {side: f"<reserved{8800 + side:05d}>" for side in range(1, 1 + max(max(pair) for pair in patches))}
    tokens = (*PROMPT_TOKENS, _ROW_END, *sides.values())
    model = read_chameleon(target, grid, LUMINA, tokens, _layout, longest, lora, progress)
    names, codes = model.names, model.codes
    behind = names[_ROW_END] + 1 - codes.stop
    if behind < 1:
        raise file_error(target, _ROW_END, found=f"token {names[_ROW_END]}", expected="one behind the image tokens")
    return chameleon_model(
        model,
        read_vqgan(vq, progress),  # its own resolution is that of its training
        drafter,
        progress,
        behind,
        family="lumina",
        sampling=_SAMPLING,
        sizes=[image_size(high, wide, names) for high, wide in patches],
        row_end=names[_ROW_END] - codes.start,
    )


def patch_sizes(side: int) -> list[tuple[int, int]]:
    """Rows and columns of patches of all sizes that belong to a square of `side`, widest first.

    They come as close to its area as they can without exceeding it, if one side grows or the other shrinks by one at a
    time; no side is more than four times the other. These are the published sizes of each model.
    """
    area = side**2
    pairs = [(high, wide) for wide in range(2 * side, 0, -1) for high in range(area // (wide + 1), area // wide + 1)]
    return [pair for pair in pairs if min(pair) > 0 and max(pair) <= _SLENDEREST * min(pair)]


def image_size(high: int, wide: int, names: Mapping[str, int]) -> Size:
    """The size of a picture of so many patches, with the tokens that announce it."""
    announced = (PROMPT_TOKENS[-1], f"<reserved{8800 + high:05d}>", f"<reserved{8800 + wide:05d}>")
    return Size(
        name=f"{_PATCH_PIXELS * wide}x{_PATCH_PIXELS * high}",
        rows=_PATCH * high,
        columns=_PATCH * wide,
        tokens=tuple(names[name] for name in announced),
    )


def _layout(names: Mapping[str, int]) -> TokenLayout:
    start, end, _ = (names[name] for name in PROMPT_TOKENS)
    return TokenLayout(template=_TEMPLATE, before=(start,), after=(end,), uncond=())
