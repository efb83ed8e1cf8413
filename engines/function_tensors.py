"""Declarations of the inputs and outputs of graphs without a KV cache, for their export and for their loading."""

from __future__ import annotations

from typing import NamedTuple

from ..bundle.conditions import ConditionSpec
from .contracts import TensorSpec

_Declarations = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


def declare_condition_tensors(condition: ConditionSpec, hidden_size: int) -> _Declarations:
    """Declare the inputs, and the outputs, of a condition graph."""
    prefix = condition.prefix
    shapes: dict[str, dict[str, tuple[int | str | None, ...]]] = {
        "class": {"class_ids": ("rows",)},
        "words": {"token_ids": ("rows", prefix)},
        "embeddings": {"caption_embeds": ("rows", prefix, condition.caption_dim), "caption_mask": ("rows", prefix)},
        "text": {"token_ids": ("rows", "tokens"), "token_mask": ("rows", "tokens")},
        "tokens": {"token_ids": ("rows", "tokens"), "uncond_ids": ("rows", "uncond_tokens")},
    }
    dtypes = {"caption_embeds": ("float32",)}
    inputs = [TensorSpec(name, dtypes.get(name, ("int64",)), axes) for name, axes in shapes[condition.kind].items()]
    lengths: tuple[int | str, ...] = ("tokens", "uncond_tokens") if condition.kind == "tokens" else (prefix, prefix)
    if condition.padding is not None:
        lengths = ("tokens", 1)
    outputs = (
        TensorSpec("prefix_embeds", ("float32",), ("rows", lengths[0], hidden_size)),
        TensorSpec("uncond_embeds", ("float32",), ("rows", lengths[1], hidden_size)),
    )
    return tuple(inputs), outputs


class ImageTensors(NamedTuple):
    """Tensors of the graphs `vq_decoder`, from `codes` to `images`, and `vq_encoder`, from `images` to `encoded`."""

    codes: TensorSpec
    images: TensorSpec
    encoded: TensorSpec


def declare_image_tensors(cells: int | None, height: int = 0, width: int = 0, first_codes: int = 0) -> ImageTensors:
    """Declare the tensors for images of `cells` codes and a size in pixels; None: for images of any size.

    `first_codes` of a first grid, which images of any size do not have, are encoded too.
    """
    pixels = ("height", "width") if cells is None else (height, width)
    grid = ("rows", "columns") if cells is None else (cells,)
    return ImageTensors(
        TensorSpec("codes", ("int64",), ("images", *grid)),
        TensorSpec("images", ("float32",), ("images", 3, *pixels)),
        TensorSpec("codes", ("int64",), ("images", "cells" if cells is None else first_codes + cells)),
    )
