"""NVIDIA's Cosmos tokenizer of discrete codes (DV8x16x16), as far as single pictures go through it.

It is a VQGAN of videos on the bands of two Haar wavelets, with finite scalar quantisation. Convolutions in time repeat
the first frame before it, so on a single one their taps add up: they are products of channels, which here become part
of the convolutions beside them, as do wavelets (a product within patches of 4 x 4 pixels) and the resizing of levels
with its skips. A frame that attends to itself alone gives its values. What is left is LlamaGen's modules in two
dimensions, and one product of channels before the second doubling, whose bias ends at the picture's edges.
"""

from __future__ import annotations

from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from ...inputs import format_value
from ..checkpoints.folders import Checkpoint
from .fsq import code_vectors
from .llamagen_vq import CODEBOOK, LlamaGenVQ, Resize, VQConfig, group_norm, load_vq, rename_vqgan

_PATCH = 4  # pixels along each side, of two wavelets
_DIGITS = (8, 8, 8, 5, 5, 5)  # of a code of the published tokenizer
# Tables that the code has itself, and which frame to attend to, where there is one.
_UNUSED = ("wavelets", "_arange", "patch_size_buffer", "_basis", "implicit_codebook", "attn_1.1.q.", "attn_1.1.k.")
_NAMES = ((r"\.attn_1\.1\.norm\.norm\.", ".attn_1.1.0."), (r"\.(norm\w*)\.norm\.", r".\1."))
Conv = tuple[Tensor, Tensor]  # weight `[out, in, height, width]` and bias, float64


class _Skip(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self[1](self[0](x))
        return added


class CosmosVQ(LlamaGenVQ):
    """The whole tokenizer, for pictures; both halves work on patches of them."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        for half, width in ((self.encoder, config.encoder_widths[-1]), (self.decoder, config.decoder_widths[0])):
            mid, time = cast(nn.ModuleList, half.mid), _Skip(group_norm(width, 1), nn.Conv2d(width, width, 1))
            mid[1] = nn.Sequential(mid[1], time)
        width, levels = config.decoder_widths[1], cast(nn.ModuleList, self.decoder.conv_blocks)
        levels[1].upsample = nn.Sequential(nn.Conv2d(width, width, 1), Resize(width, shrinks=False))


def load_cosmos_vq(checkpoint: Checkpoint) -> LlamaGenVQ:
    """The tokenizer in a folder with its encoder and decoder. Raises: CheckpointError."""
    checkpoint.read(keep=lambda name: not any(part in name for part in _UNUSED))
    listed = checkpoint.config().get("levels", _DIGITS) if (checkpoint.place / "config.json").is_file() else _DIGITS
    found = [checkpoint.weights.pop(f"{part}quantizer._levels", None) for part in ("", "inv_quant.")]
    levels = next((tuple(own.flatten().tolist()) for own in found if own is not None), tuple(listed))
    if not all(type(level) is int and 1 < level < 256 for level in levels) or prod(levels) >= 1 << 20:
        raise checkpoint.error("quantizer._levels", found=format_value(levels), expected="levels of a code's digits")
    _fold(checkpoint)
    checkpoint.weights[CODEBOOK] = code_vectors(torch.arange(prod(levels)), levels)
    rename_vqgan(checkpoint, names=_NAMES)
    return load_vq(
        checkpoint, CosmosVQ, 1, normalize_for_decoder=False, normalize_for_encoder=False, levels=levels, patch=_PATCH
    )


def _fold(checkpoint: Checkpoint) -> None:
    """Make plain convolutions of what a single frame makes linear."""
    weights = checkpoint.weights

    def take(name: str) -> Conv:
        """A convolution; on equal frames its taps in time add up."""
        parts = (f"{name}.conv3d.weight", 5), (f"{name}.conv3d.bias", 1)
        weight, bias = (weights.pop(part).double() for part, sizes in parts if checkpoint.shape(part, sizes))
        return weight.sum(2), bias

    def put(name: str, first: Conv, *then: Conv) -> None:
        """A convolution, and products of channels behind it."""
        weight, bias = first
        for matrix, added in then:
            rows = matrix.flatten(1)  # [out, in]
            weight, bias = torch.einsum("oi,i...->o...", rows, weight), rows @ bias + added
        weights[f"{name}.weight"], weights[f"{name}.bias"] = weight.float(), bias.float()

    for name in [name.removesuffix(".0.conv3d.weight") for name in weights if name.endswith(".0.conv3d.weight")]:
        put(name, take(f"{name}.0"), take(f"{name}.1"))
    for at in ("encoder.mid.attn_1.1", "decoder.mid.attn_1.1"):
        put(f"{at}.1", take(f"{at}.v"), take(f"{at}.proj_out"))
    for i in range(2):  # the published code halves pixels twice, whatever the levels
        down, up = f"encoder.down.{i}.downsample", f"decoder.up.{i + 1}.upsample"
        halve, time, mix = (take(f"{down}.conv{number}") for number in (1, 2, 3))
        halve = _skipping(halve, slice(2), 1 / 4)  # the mean of the pixels that become one
        put(f"{down}.conv", halve, *([] if i else [_skipping(time)]), mix)
        time, double, mix = (take(f"{up}.conv{number}") for number in (1, 2, 3))
        put(f"{up}.conv" if i else f"{up}.1.conv", _skipping(double, slice(1, 2)), mix)
        if i == 0:
            put(f"{up}.0", _skipping(time))
    for name in [name.removesuffix(".conv3d.weight") for name in weights if name.endswith(".conv3d.weight")]:
        put(name, take(name))
    inner, outer = "encoder.conv_in", "decoder.conv_out"
    to_bands, to_pixels = haar_bands()
    weights[f"{inner}.weight"] = torch.einsum("oi...,ip->op...", weights[f"{inner}.weight"].double(), to_bands).float()
    put(outer, (weights[f"{outer}.weight"].double(), weights[f"{outer}.bias"].double()), (to_pixels, torch.zeros(1)))


def _skipping(conv: Conv, places: slice = slice(None), share: float = 1.0) -> Conv:
    """A convolution with what it reads at some places of its kernel added, times `share`."""
    weight, bias = conv
    weight[:, :, places, places] += share * torch.eye(len(weight))[:, :, None, None]
    return weight, bias


def haar_bands() -> tuple[Tensor, Tensor]:
    """Both transforms between a patch's pixels and its bands, `[bands, pixels]` and `[pixels, bands]`, float64.

    Pixels are ordered by colour, row, column, as `pixel_unshuffle` has them; bands by the second wavelet, the first one
    (each by time, row, column; 0 is low), colour. A picture is the last of equal frames, in which nothing is high in
    time.
    """
    sign = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    axes, fixed = "Yh,yk,Xw,xj,a,b,cd->cYyXxahwbkjd", (*[sign] * 4,)
    to_equal, of_last = (
        torch.einsum(axes, *fixed, time, time, torch.eye(3).double()).reshape(3 * _PATCH**2, -1)
        for time in (torch.tensor([1.0, 0.0]).double(), sign[1])
    )
    return to_equal.T / _PATCH**2, of_last
