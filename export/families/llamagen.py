"""LlamaGen: transformer, image tokenizer, and optionally LANTERN's EAGLE drafter and a text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engines.contracts import Progress
from ...methods import Sampling
from ..checkpoints.lora import Adapter
from ..family import Family
from ..graph.conditions import ClassCondition
from ..model import Model
from ..models.eagle import read_drafter
from ..models.vq_checkpoints import read_vq
from ..progress import silent
from .common import image_model
from .common_llamagen import LlamaGen, read_condition, read_transformer


def read_llamagen(
    target: Path,
    vq: Path,
    *,
    drafter: Path | None = None,
    text_encoder: Path | None = None,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
    lora: Sequence[Adapter] = (),
    progress: Progress = silent,
) -> Model:
    """Read LlamaGen with its VQ tokenizer.

    Args:
        target: official file, or folder with its shards or in LANTERN's layout.
        vq: file of the VQ tokenizer.
        drafter: folder in LANTERN's layout, None without a drafter.
        text_encoder: folder of flan-t5-xl, for bundles that take text prompts; None for text embeddings or classes.
        config: JSON file of the model's arguments; None for config.json in the folder, or beside an official file if it
            has no other fields.
        grid: grid rows, 16 for 256 pixels. It is necessary if the weights, the configuration and the published sizes do
            not determine it, and must not contradict the weights or the configuration.
        weights: `model` or `ema`, for files of target and tokenizer with both; None for the first, with a warning.
        lora: adapters to merge into the target.
        progress: progress callback.

    Raises:
        CheckpointError: a file is missing or damaged, or the files are not of one model.
        RequestError: `grid` or `weights` is out of range.
    """
    transformer = read_transformer(target, config=config, grid=grid, weights=weights, lora=lora, progress=progress)
    image_tokenizer, vq_sources = read_vq(vq, progress, transformer.averaged)
    sources = [*transformer.sources, *vq_sources]
    loaded_drafter = None
    if drafter is not None:
        fields = _drafter_fields(transformer)
        loaded_drafter = read_drafter(
            drafter, transformer.decoder, allowed_values=fields, progress=progress, masks_prefix=False
        )
    is_class_conditional = isinstance(transformer.condition, ClassCondition)
    condition, encoder_sources = read_condition(transformer.condition, text_encoder, progress)
    model = image_model(
        family="llamagen",
        decoder=transformer.decoder,
        code_embeddings=transformer.code_embeddings,
        condition=condition,
        vq=image_tokenizer,
        sampling=Sampling(
            cfg_scale=4.0 if is_class_conditional else 7.5,
            top_k=0 if is_class_conditional else 1000,
            # LANTERN's program and the official program differ
            filter_order="top-p, top-k" if transformer.lantern else "top-k, top-p",
        ),
        sources=[*sources, *encoder_sources],
        drafter=loaded_drafter,
    )
    return replace(model, weights=weights)


FAMILY = Family(read_llamagen)


def _drafter_fields(target: LlamaGen) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of fields in the configuration of the target's drafter."""
    sizes = target.decoder.config
    condition = target.condition
    fields: dict[str, tuple[Any, ...]] = {
        "cls_token_num": (sizes.prefix,),
        "block_size": (sizes.grid**2,),
        "rope_base": (sizes.rope_base,),
        "rope_scaling": (),
    }
    if isinstance(condition, ClassCondition):
        return {"input_type": ("c2i",), "num_classes": (len(condition.table) - 1,), **fields}
    return {"input_type": ("t2i", "t2i2"), "caption_dim": (condition.uncond.shape[1],), **fields}
