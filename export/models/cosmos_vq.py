"""NVIDIA's Cosmos tokenizer of discrete codes (DV8x16x16), as far as single pictures go through it.

It is a VQGAN of videos on the bands of two Haar wavelets, with finite scalar quantisation. Convolutions in time repeat
the first frame before it, so on a single one their taps add up: they are products of channels, which here become part
of the convolutions beside them, as do wavelets (a product within patches of 4 x 4 pixels) and the resizing of levels
with its skips. A frame that attends to itself alone gives its values. What is left is LlamaGen's modules in two
dimensions, and one product of channels before the second doubling, whose bias ends at the picture's edges.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.folders import Checkpoint
from .fsq import code_table
from .llamagen_vq import CODEBOOK, LlamaGenVQ, VQConfig, group_norm, load_vq, rename_vqgan

_PATCH, _COLOURS = 4, 3  # of two wavelets; of a picture
_LEVELS = 3  # of both halves: the published code doubles and halves 4 x 4 times
_DIGITS = (8, 8, 8, 5, 5, 5)  # of a code of the published tokenizer
_UNUSED = ("wavelets", "_arange", "patch_size_buffer", "_basis", "implicit_codebook")
_NAMES = ((r"\.(norm\w*)\.norm\.", r".\1."),)
Conv = tuple[Tensor, Tensor]  # weight `[out, in, height, width]` and bias, float64


class _FrameValues(nn.Module):
    """What attention in time adds for a single frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = group_norm(width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.conv(self.norm(x))
        return added


class _TimeThenDouble(nn.Module):
    """A product of channels, then twice as many pixels along each side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time, self.conv = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.conv(F.interpolate(self.time(x), scale_factor=2.0, mode="nearest"))
        return doubled


class CosmosVQ(LlamaGenVQ):
    """The whole tokenizer, for pictures; both halves work on patches of them."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        for half, width in ((self.encoder, config.encoder_widths[-1]), (self.decoder, config.decoder_widths[0])):
            mid = cast(nn.ModuleList, half.mid)
            mid[1] = nn.Sequential(mid[1], _FrameValues(width))
        cast(nn.ModuleList, self.decoder.conv_blocks)[1].upsample = _TimeThenDouble(config.decoder_widths[1])


def load_cosmos_vq(checkpoint: Checkpoint) -> LlamaGenVQ:
    """The tokenizer in a folder with its encoder and decoder. Raises: CheckpointError."""
    checkpoint.read(keep=lambda name: not name.endswith(_UNUSED))
    found = [checkpoint.weights.pop(f"{part}quantizer._levels", None) for part in ("", "inv_quant.")]
    levels = next((tuple(int(n) for n in one.tolist()) for one in found if one is not None), _DIGITS)
    width = checkpoint.shape("quant_conv.conv3d.weight", 5)[0]
    counts = [checkpoint.count(prefix) for prefix in ("encoder.down.", "decoder.up.")]
    if counts != [_LEVELS, _LEVELS]:
        raise checkpoint.error(found=f"{counts} levels", expected=f"a Cosmos tokenizer with {_LEVELS} of both")
    if len(levels) != width or not 1 < min(levels) <= max(levels) < 256:
        raise checkpoint.error("quantizer._levels", found=str(levels), expected=f"{width} numbers of levels")
    _fold(checkpoint)
    checkpoint.weights[CODEBOOK] = code_table(levels)
    rename_vqgan(checkpoint, names=_NAMES)
    return load_vq(checkpoint, CosmosVQ, 1, unit_decoding=False, unit_encoding=False, levels=levels, patch=_PATCH)


def _fold(checkpoint: Checkpoint) -> None:
    """Make plain convolutions of what a single frame makes linear."""
    weights = checkpoint.weights

    def take(name: str) -> Conv:
        """A convolution; on equal frames its taps in time add up."""
        parts = (f"{name}.conv3d.weight", 5), (f"{name}.conv3d.bias", 1)
        weight, bias = (weights[part].double() for part, sizes in parts if checkpoint.shape(part, sizes))
        for part, _ in parts:
            del weights[part]
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
    for half in ("encoder", "decoder"):
        at = f"{half}.mid.attn_1.1"
        put(f"{at}.conv", take(f"{at}.v"), take(f"{at}.proj_out"))
        for part in ("q", "k"):
            take(f"{at}.{part}")  # one frame gets all its attention whatever they are
    for i, (down, up) in enumerate((f"encoder.down.{i}.downsample", f"decoder.up.{i + 1}.upsample") for i in range(2)):
        space, time, mix = (take(f"{down}.conv{number}") for number in (1, 2, 3))
        put(f"{down}.conv", _skipping(space, slice(2), 1 / 4), *([_skipping(time)] if i == 0 else []), mix)
        time, space, mix = (take(f"{up}.conv{number}") for number in (1, 2, 3))
        put(f"{up}.conv", _skipping(space, slice(1, 2)), mix)
        if i == 0:
            put(f"{up}.time", _skipping(time))
    for name in [name.removesuffix(".conv3d.weight") for name in weights if name.endswith(".conv3d.weight")]:
        put(name, take(name))
    inner, outer = "encoder.conv_in", "decoder.conv_out"
    to_bands, to_pixels = haar_bands()
    if (found := weights[f"{inner}.weight"].shape[1]) != len(to_bands):
        raise checkpoint.error(
            f"{inner}.weight", found=f"{found} inputs", expected=f"{len(to_bands)}, bands of a patch"
        )
    weights[f"{inner}.weight"] = torch.einsum("oi...,ip->op...", weights[f"{inner}.weight"].double(), to_bands).float()
    put(outer, (weights[f"{outer}.weight"].double(), weights[f"{outer}.bias"].double()), (to_pixels, torch.zeros(1)))


def _skipping(conv: Conv, places: slice = slice(None), share: float = 1.0) -> Conv:
    """A convolution with what it reads at some places of its kernel added, times `share`."""
    weight, bias = conv
    weight = weight.clone()
    weight[:, :, places, places] += share * torch.eye(len(weight))[:, :, None, None]
    return weight, bias


def haar_bands() -> tuple[Tensor, Tensor]:
    """Both transforms between a patch's pixels and its bands, `[bands, pixels]` and `[pixels, bands]`, float64.

    Pixels are ordered as `pixel_unshuffle` has them: colour, row, column. Bands: of the second wavelet, of the first
    one (each by time, row, column; 0 is low), colour. A picture is the last of equal frames: bands that are high in
    time are 0 of one, and change its sign.
    """
    sign, colours = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.eye(_COLOURS).double()
    last, equal = torch.tensor([1.0, -1.0]).double(), torch.tensor([1.0, 0.0]).double()

    def bands(time: Tensor) -> Tensor:
        axes = "Yh,yk,Xw,xj,a,b,cd->cYyXxahwbkjd"
        return torch.einsum(axes, sign, sign, sign, sign, time, time, colours).reshape(_COLOURS * _PATCH**2, -1)

    return bands(equal).T / _PATCH**2, bands(last)
