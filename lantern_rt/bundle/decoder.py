"""Manifest entry for the architecture of the target or the drafter model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..methods import ExtendedModel
from .numbers import Count, SmallCount

EXPORT_AGAIN = "export the bundle again"
PrefixRotation = Literal["zero", "identity"]
RopeStyle = Literal["interleaved", "half"]
Rotary = Literal["grid", "sequence", "grids", "learned"]
Activation = Literal["silu", "gelu-tanh"]
Positive = Annotated[float, Field(gt=0, le=3.5e38)]


class Architecture(ExtendedModel):
    """Architecture of a decoder model, the target or the drafter, from which graphs for GPUs are written.

    Args:
        head_norm_eps: epsilon of the norms of queries and keys in each head; None: queries and keys have no norms.
        rms_head_norm: whether the norms of queries and keys are RMS norms (Qwen3) instead of layer norms.
        attention_scale: factor that multiplies the products of queries and keys; 1 if the weights include the factor.
        rotary: coordinates by which queries and keys are rotated. `grid`: row and column of a cell (LlamaGen);
            `sequence`: position in the sequence (Llama, Chameleon); `grids`: time, row and column in two grids
            (GLM-Image); `learned`: nothing is rotated, and inputs contain learned vectors of positions (RAR).
        rope_style: pairs of numbers that are rotated together: `interleaved` is (2i, 2i + 1), `half` is (i, i +
            head_dim / 2).
        prefix_rotation: rotation of queries and keys at the prompt's positions, if `rotary` is `grid`. `identity`: no
            change; `zero`: queries and keys are multiplied by 0 (LlamaGen).
        input_norm: whether the first layer normalises its input; False for LANTERN's drafters for LlamaGen.
        post_norms: whether the outputs of attention and feed-forward network are also normalised (GLM-Image).
        head_hidden: width of the hidden layer in the output head (Janus); 0: the output head is linear.
        two_heads: whether a second output head gives logits for the cell below a code (NAR). Only the second head uses
            the last layer.
        conditions: number of classes, and the absence of a class, on which adaptive norms and gates of layers depend
            (RAR); 0: layers depend on hidden states only.
        activation: activation of the gate in the feed-forward network; `gelu-tanh` is the approximation of GELU.
    """

    added_fields = frozenset({"conditions", "activation"})

    intermediate_size: Count
    norm_eps: Positive
    num_heads: SmallCount
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
    conditions: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    activation: Activation = "silu"
