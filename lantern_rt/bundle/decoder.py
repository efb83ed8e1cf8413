"""Manifest entry of the architecture of target and drafter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..methods import FrozenModel
from .numbers import Count, SmallCount

EXPORT_AGAIN = "export the bundle again"
PrefixRotation = Literal["zero", "identity"]
RopeStyle = Literal["interleaved", "half"]
Rotary = Literal["grid", "sequence", "grids"]
Positive = Annotated[float, Field(gt=0, le=3.5e38)]


class Architecture(FrozenModel):
    """Parts and conventions of a decoder. They are needed to write graphs for GPUs and to train drafters.

    Args:
        intermediate_size: hidden width of the feed-forward networks.
        norm_eps: epsilon of the RMS norms.
        num_heads: number of query heads, new in format 3.7; None: `hidden_size / head_dim`.
        head_norm_eps: epsilon of the norms of queries and keys in each head; None: they are not normalised.
        rms_head_norm: whether these norms are RMS norms (Qwen3), new in format 3.7; otherwise they are layer norms.
        attention_scale: factor of the products of queries and keys; 1 if weights of the graph include the factor.
        rotary: `grid` rotates by row and column of a cell (LlamaGen), `sequence` by the position (Llama, Chameleon),
            `grids` by time, row and column in two grids (GLM-Image).
        rope_style: pairs of numbers that are rotated: `interleaved` (2i, 2i + 1) or `half` (i, i + head_dim / 2).
        rope_base: base of the rotary frequencies.
        prefix_rotation: rotation of a prompt's positions before a grid: `identity`, or `zero`, which multiplies their
            queries and keys by 0 (LlamaGen).
        input_norm: whether the first layer normalises its input; LANTERN's drafters for LlamaGen do not.
        final_norm: whether hidden states are normalised after the last layer.
        post_norms: whether the outputs of attention and feed-forward network are also normalised (GLM-Image).
        head_hidden: width of the head's hidden layer (Janus); 0: a linear head.
        two_heads: whether a second head gives logits for the cell below a code (NAR). Only this head uses the last
            layer.
    """

    intermediate_size: Count
    norm_eps: Positive
    num_heads: SmallCount | None = None
    head_norm_eps: Positive | None = None
    rms_head_norm: bool = False
    attention_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    rotary: Rotary
    rope_style: RopeStyle
    rope_base: Positive
    prefix_rotation: PrefixRotation
    input_norm: bool = True
    final_norm: bool = True
    post_norms: bool = False
    head_hidden: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    two_heads: bool = False
