"""Anole: a Chameleon for images, a VQGAN and perhaps LANTERN's drafter.

A prompt is `<s>`, the text, end of turn, begin of image; the unconditional row is `<s>`, begin of image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...bundle.conditions import TokenLayout
from ...engines.contracts import Progress
from ...errors import CheckpointError
from ...methods import Sampling
from ..checkpoints.files import raises_checkpoint_error
from ..checkpoints.folders import Checkpoint
from ..checkpoints.lora import Adapter
from ..family import Family
from ..model import Model
from ..models.vq_checkpoints import read_vqgan
from ..progress import silent
from .common import check_grid
from .common_chameleon import (
    CHAMELEON,
    PROMPT_TOKENS,
    chameleon_config,
    chameleon_model,
    read_chameleon,
    read_vocabulary,
)

# LANTERN's settings for Anole: guidance 3, the 2000 likeliest codes, top-p before top-k.
_SAMPLING = Sampling(cfg_scale=3.0, top_k=2000, filter_order="top-p, top-k")


@raises_checkpoint_error
def read_anole(
    target: Path,
    vq: Path,
    *,
    drafter: Path | None = None,
    grid: int | None = None,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
) -> Model:
    """Read Anole with its VQGAN.

    Args:
        target: folder with config.json, tokenizer.json and weights.
        vq: folder with vqgan.ckpt and vqgan.yaml, or the .ckpt file.
        drafter: folder in LANTERN's layout, None without a drafter.
        grid: grid rows, by default as many as the resolution in vqgan.yaml has.
        lora: adapters to merge into the target.
        progress: progress callback.

    Raises:
        CheckpointError: a file is missing or damaged, or belongs to another model.
        RequestError: `grid` is out of range.
    """
    check_grid(grid)
    checkpoint = Checkpoint(target, progress=progress, adapters=lora)
    config = chameleon_config(checkpoint, CHAMELEON, "leloy/Anole-7b-v0.1-hf")  # before large files are read
    vqgan = read_vqgan(vq, progress)
    rows = grid or vqgan.grid
    if rows is None:
        raise CheckpointError(
            field="grid", found="nothing, and no .yaml beside the .ckpt", expected="the number of grid rows"
        )
    if vqgan.grid not in (None, rows):
        raise CheckpointError(field="grid", found=str(rows), expected=f"{vqgan.grid}, as in the .yaml of vq, or none")
    vocabulary = read_vocabulary(config, PROMPT_TOKENS)
    start, end, begin = (vocabulary.names[name] for name in PROMPT_TOKENS)
    layout = TokenLayout(before=(start,), after=(end, begin), uncond=(start, begin))
    model = read_chameleon(checkpoint, config, vocabulary, layout, grid=rows)
    return chameleon_model(model, vqgan, drafter, progress, family="anole", sampling=_SAMPLING)


FAMILY = Family(read_anole, model_types=("chameleon",))
