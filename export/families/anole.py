"""Model family Anole: a Chameleon target for images, a VQGAN, and optionally LANTERN's drafter.

A prompt has these tokens: `<s>`, the text, end of turn, begin of image. The unconditional row has `<s>` and begin of
image.
"""

from __future__ import annotations

from pathlib import Path

from ...bundle.conditions import TokenLayout
from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..model import BundleContents
from ..models.vq_checkpoints import read_vqgan
from .common_chameleon import CHAMELEON, PROMPT_TOKENS, ChameleonTarget, read_chameleon_config, read_token_ids

# LANTERN's settings for Anole: guidance scale 3, the 2000 most probable codes, top-p before top-k.
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000, filter_order="top-p, top-k")


def read_anole(
    target: Checkpoint,
    vq: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
) -> BundleContents:
    """Read Anole with its VQGAN; `grid` defaults to the grid rows that follow from the resolution in vqgan.yaml."""
    config = read_chameleon_config(target, CHAMELEON, "leloy/Anole-7b-v0.1-hf")  # before large files are read
    vqgan, trained_rows = read_vqgan(vq, target.progress)
    rows = grid or trained_rows
    if rows is None:
        raise CheckpointError(
            field="grid", found="nothing, and no .yaml beside the .ckpt", expected="the number of grid rows"
        )
    if trained_rows not in (None, rows):
        expected = f"no grid, or {trained_rows} as in the .yaml of vq"
        raise CheckpointError(field="grid", found=str(rows), expected=expected)
    codes, names = read_token_ids(config, PROMPT_TOKENS)
    start, end, begin = (names[name] for name in PROMPT_TOKENS)
    layout = TokenLayout(before=(start,), after=(end, begin), uncond=(start, begin))
    model = ChameleonTarget(target, config, codes, names, layout, rows)
    return model.build_model(vqgan, drafter, sampling=_SAMPLING)


FAMILY = ModelFamily(read_anole, model_types=("chameleon",))
