"""Model family Lumina-mGPT: a Chameleon target for images of many sizes, with an end-of-row token after each grid row.

A prompt has `<s>`, a text with the size in pixels and the caption, end of turn, and three size tokens. The size tokens
are begin of image, the number of patch rows and the number of patch columns; a patch has 2 x 2 codes. In the published
program, the model generates the size tokens; here the requested size determines them. The unconditional row has only
the size tokens. The folder has no image tokenizer; like Anole, the model uses Chameleon's VQGAN.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..model import BundleContents
from ..models.vq_checkpoints import read_vqgan
from .common_chameleon import LUMINA, PROMPT_TOKENS, read_chameleon_config, read_token_ids
from .common_lumina import ROW_END, list_lumina_sizes, list_size_token_names, make_lumina_target

_PATCH = 2  # number of grid rows and columns of a patch
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000)  # settings of Lumina-mGPT's published program and of LANTERN


def read_lumina(
    target: Checkpoint,
    vq: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
) -> BundleContents:
    """Read Lumina-mGPT with Chameleon's VQGAN.

    `grid` is the number of grid rows of the square image size: 32, 48 or 64 for the published models. Other image sizes
    have about as many codes.
    """
    if grid is None or grid % _PATCH:
        expected = "32, 48 or 64 for Lumina-mGPT of 512, 768 or 1024 pixels, as its files do not contain the size"
        raise CheckpointError(field="grid", found="nothing" if grid is None else str(grid), expected=expected)
    config = read_chameleon_config(target, LUMINA, "Alpha-VLLM/Lumina-mGPT-7B-768")
    codes, names = read_token_ids(config, (*PROMPT_TOKENS, ROW_END, *list_size_token_names(grid // _PATCH)))
    num_extra_tokens = names[ROW_END] + 1 - codes.stop
    if num_extra_tokens < 1:
        raise target.make_error(ROW_END, found=f"token {names[ROW_END]}", expected="a token after the image tokens")
    model = make_lumina_target(target, config, codes, names, names[PROMPT_TOKENS[0]], grid, _PATCH)
    return model.build_model(
        read_vqgan(vq, target.progress)[0],  # the resolution in vqgan.yaml is that of training and does not matter
        drafter,
        num_extra_tokens,
        sampling=_SAMPLING,
        sizes=list_lumina_sizes(grid, _PATCH, names),
        row_end=names[ROW_END] - codes.start,
    )


FAMILY = ModelFamily(read_lumina, model_types=("chameleon",))
