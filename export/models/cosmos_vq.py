"""NVIDIA's Cosmos tokenizer with discrete codes (DV8x16x16), reduced to single images.

The published network is a VQGAN for videos. It reads the bands of two Haar wavelets and uses finite scalar
quantisation. For a single image, most of its operations in time are linear maps of channels:

- Convolutions in time repeat the first frame before it, so the kernel's taps add up.
- Attention in time returns the values, since a frame attends only to itself.
- Wavelets are a matrix product within patches of 4 x 4 pixels.

These maps and the skip connections around resizing are merged into the neighbouring convolutions. The result has the
2D modules of LlamaGen's tokenizer. One 1 x 1 convolution before the second doubling stays separate, because its bias
must not reach the zero padding around the image.
"""

from __future__ import annotations

from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from ...inputs import format_value
from ..checkpoints.folders import Checkpoint
from .fsq import decode_fsq_codes
from .llamagen_vq import LlamaGenVQ, ResizeConv, VQTokenizerConfig, make_group_norm
from .vq_checkpoints import CODEBOOK, load_vq_tokenizer, rename_vqgan_weights

_PATCH = 4  # pixels along each side of a patch, which two wavelets transform
_DEFAULT_LEVELS = (8, 8, 8, 5, 5, 5)  # FSQ levels of the published tokenizer
# Constant tables, and the queries and keys of attention in time, which a single frame does not need.
_UNUSED = ("wavelets", "_arange", "patch_size_buffer", "_basis", "implicit_codebook", "attn_1.1.q.", "attn_1.1.k.")
_PATTERNS = ((r"\.attn_1\.1\.norm\.norm\.", ".attn_1.1.0."), (r"\.(norm\w*)\.norm\.", r".\1."))
Conv = tuple[Tensor, Tensor]  # weight `[out, in, height, width]` and bias `[out]`, float64


class _SkipConnection(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self[1](self[0](x))
        return added


class CosmosVQ(LlamaGenVQ):
    def __init__(self, config: VQTokenizerConfig) -> None:
        super().__init__(config)
        for half, width in ((self.encoder, config.encoder_widths[-1]), (self.decoder, config.decoder_widths[0])):
            mid = cast(nn.ModuleList, half.mid)
            mid[1] = nn.Sequential(mid[1], _SkipConnection(make_group_norm(width, 1), nn.Conv2d(width, width, 1)))
        width = config.decoder_widths[1]
        levels = cast(nn.ModuleList, self.decoder.conv_blocks)
        levels[1].upsample = nn.Sequential(nn.Conv2d(width, width, 1), ResizeConv(width, is_downsampling=False))


def load_cosmos_vq(checkpoint: Checkpoint) -> LlamaGenVQ:
    """Load the Cosmos tokenizer from a folder with its encoder and decoder.

    The FSQ levels (numbers of values of the digits of a code) come from the weights, or else from config.json, or else
    they are those of the published tokenizer.
    """
    checkpoint.read_weights(name_filter=lambda name: not any(part in name for part in _UNUSED))
    stored = [checkpoint.weights.pop(f"{part}quantizer._levels", None) for part in ("", "inv_quant.")]
    levels = next((tuple(table.flatten().tolist()) for table in stored if table is not None), None)
    if levels is None:  # NVIDIA's config.json has no levels, and is not valid JSON because of an extra comma
        has_config = (checkpoint.path / "config.json").is_file()
        levels = tuple(checkpoint.read_config_file().get("levels", _DEFAULT_LEVELS) if has_config else _DEFAULT_LEVELS)
    if not all(type(level) is int and 1 < level < 256 for level in levels) or prod(levels) >= 1 << 20:
        expected = "FSQ levels of 2 to 255, and fewer than 2^20 codes"
        raise checkpoint.make_error("quantizer._levels", found=format_value(levels), expected=expected)
    _fold_3d_convolutions(checkpoint)
    checkpoint.weights[CODEBOOK] = decode_fsq_codes(torch.arange(prod(levels)), levels)
    rename_vqgan_weights(checkpoint, patterns=_PATTERNS)
    return load_vq_tokenizer(
        checkpoint,
        CosmosVQ,
        1,
        normalize_for_decoder=False,
        normalize_for_encoder=False,
        fsq_levels=levels,
        patch=_PATCH,
    )


def _fold_3d_convolutions(checkpoint: Checkpoint) -> None:
    """Replace 3D convolutions, wavelets and skip connections in the checkpoint by 2D convolutions for one frame."""
    weights = checkpoint.weights

    def pop_conv(name: str) -> Conv:
        """Remove a 3D convolution, and return it in 2D: all frames are equal, so its taps in time can be added."""
        parts = (f"{name}.conv3d.weight", 5), (f"{name}.conv3d.bias", 1)
        weight, bias = (weights.pop(part).double() for part, sizes in parts if checkpoint.get_shape(part, sizes))
        return weight.sum(2), bias

    def store_conv(name: str, base_conv: Conv, *pointwise_convs: Conv) -> None:
        """Store one convolution that equals `base_conv` followed by the 1 x 1 convolutions `pointwise_convs`."""
        weight, bias = base_conv
        for matrix, added in pointwise_convs:
            rows = matrix.flatten(1)  # [out, in]
            weight = torch.einsum("oi,i...->o...", rows, weight)
            bias = rows @ bias + added
        weights[f"{name}.weight"] = weight.float()
        weights[f"{name}.bias"] = bias.float()

    for name in [name.removesuffix(".0.conv3d.weight") for name in weights if name.endswith(".0.conv3d.weight")]:
        store_conv(name, pop_conv(f"{name}.0"), pop_conv(f"{name}.1"))  # the kernel in space, then the kernel in time
    for attention in ("encoder.mid.attn_1.1", "decoder.mid.attn_1.1"):
        store_conv(f"{attention}.1", pop_conv(f"{attention}.v"), pop_conv(f"{attention}.proj_out"))
    for i in range(2):  # the published code resizes twice, whatever the number of levels
        down = f"encoder.down.{i}.downsample"
        halve, time, mix = (pop_conv(f"{down}.conv{number}") for number in (1, 2, 3))
        halve = _add_skip_kernel(halve, slice(2), 1 / 4)  # the skip: the mean of 2 x 2 pixels
        store_conv(f"{down}.conv", halve, *([] if i else [_add_skip_kernel(time)]), mix)
        up = f"decoder.up.{i + 1}.upsample"
        time, double, mix = (pop_conv(f"{up}.conv{number}") for number in (1, 2, 3))
        store_conv(f"{up}.conv" if i else f"{up}.1.conv", _add_skip_kernel(double, slice(1, 2)), mix)
        if i == 0:
            store_conv(f"{up}.0", _add_skip_kernel(time))
    for name in [name.removesuffix(".conv3d.weight") for name in weights if name.endswith(".conv3d.weight")]:
        store_conv(name, pop_conv(name))
    to_bands, to_pixels = compute_haar_matrices()
    name = "encoder.conv_in.weight"
    weights[name] = torch.einsum("oi...,ip->op...", weights[name].double(), to_bands).float()
    name = "decoder.conv_out"
    last = (weights[f"{name}.weight"].double(), weights[f"{name}.bias"].double())
    store_conv(name, last, (to_pixels, torch.zeros(1)))


def _add_skip_kernel(conv: Conv, taps: slice = slice(None), factor: float = 1.0) -> Conv:
    """Make a convolution add `factor` times its input to its output; `taps` are rows and columns of the kernel."""
    weight, bias = conv
    weight[:, :, taps, taps] += factor * torch.eye(len(weight))[:, :, None, None]
    return weight, bias


def compute_haar_matrices() -> tuple[Tensor, Tensor]:
    """Compute the matrices that convert a patch's pixels to the bands of two Haar wavelets, and back.

    Pixels are ordered by colour, then row, then column, like the result of `pixel_unshuffle`. Bands are ordered by the
    band of the second wavelet, then by the band of the first wavelet, then by colour. Within a wavelet, bands are
    ordered by time, then row, then column; the low band comes before the high band.

    Returns:
        Two float64 matrices. The first, `[bands, pixels]`, converts an image that is repeated as equal frames; its
        bands that are high in time are 0. The second, `[pixels, bands]`, converts bands to the last frame.
    """
    haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()  # [low and high band, even and odd pixel]
    equal_frames, last_frame = (
        torch.einsum("Yh,yk,Xw,xj,a,b,cd->cYyXxahwbkjd", *[haar] * 4, time, time, torch.eye(3).double()).reshape(
            3 * _PATCH**2, -1
        )
        for time in (torch.tensor([1.0, 0.0]).double(), haar[1])
    )
    return equal_frames.T / _PATCH**2, last_frame
