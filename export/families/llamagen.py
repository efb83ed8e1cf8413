"""Model family LlamaGen: transformer, image tokenizer, and optionally LANTERN's EAGLE drafter and a text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...methods import Sampling
from ..checkpoints.folders import Checkpoint
from ..family import ModelFamily
from ..graph.conditions import ClassCondition
from ..model import BundleContents
from ..models.eagle import read_drafter
from .common_llamagen import LlamaGenTransformer, build_llamagen_model, read_llamagen_transformer


def read_llamagen(
    target: Checkpoint,
    vq: Path,
    *,
    drafter: Path | None = None,
    text_encoder: Path | None = None,
    config: Path | None = None,
    grid: int | None = None,
    weights: str | None = None,
) -> BundleContents:
    """Read LlamaGen with its VQ tokenizer.

    Args:
        target: official file, or folder with its shards or in LANTERN's layout.
        text_encoder: folder of flan-t5-xl, for a bundle that takes text prompts; None: text embeddings or class ids.
        config: JSON file of the model's arguments. None: config.json in the folder. For an official file, a config.json
            beside the file is read if all of its fields are arguments of the model.
        grid: number of grid rows; 16 rows are 256 pixels. None: the number that the weights, the configuration or the
            published sizes determine. A number that contradicts them is an error.
        weights: set of weights to read, `model` or `ema`. None: if the file has both, `model` with a warning.
    """
    transformer = read_llamagen_transformer(target, config=config, grid=grid, weights=weights)
    loaded_drafter = None
    if drafter is not None:
        fields = _list_allowed_drafter_values(transformer)
        loaded_drafter = read_drafter(
            drafter, transformer.decoder, allowed_config_values=fields, progress=target.progress, masks_prefix=False
        )
    is_class_conditional = isinstance(transformer.condition, ClassCondition)
    return build_llamagen_model(
        transformer,
        vq,
        weights=weights,
        text_encoder=text_encoder,
        sampling=Sampling(
            cfg_scale=4.0 if is_class_conditional else 7.5,
            top_k=0 if is_class_conditional else 1000,
            # LANTERN's program and the official program apply the two filters in a different sequence.
            filter_order="top-p, top-k" if transformer.is_lantern_layout else "top-k, top-p",
        ),
        drafter=loaded_drafter,
    )


FAMILY = ModelFamily(read_llamagen)


def _list_allowed_drafter_values(target: LlamaGenTransformer) -> dict[str, tuple[Any, ...]]:
    """Return the values that fields of a drafter's config.json may have if it belongs to the target."""
    sizes = target.decoder.config
    condition = target.condition
    fields: dict[str, tuple[Any, ...]] = {
        "cls_token_num": (sizes.prefix,),
        "block_size": (sizes.grid**2,),
        "rope_base": (sizes.rope_base,),
    }
    if isinstance(condition, ClassCondition):
        return {"input_type": ("c2i",), "num_classes": (len(condition.table) - 1,), **fields}
    return {"input_type": ("t2i", "t2i2"), "caption_dim": (condition.first.shape[1],), **fields}
