"""LlamaGen's VQ image tokenizer: an encoder from images to codes, and a decoder from codes to images.

Both are convolutional networks with levels, between which the resolution changes by a factor of two. The tokenizers of
Chameleon and Janus are the same modules with other settings (`VQTokenizerConfig`). The norms in Emu3's decoder also
read the code vectors (`norm_inputs`). Cosmos has no codebook (`fsq_levels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fsq import decode_fsq_codes, quantize_fsq_latents

if TYPE_CHECKING:
    from ..checkpoints.folders import Checkpoint

NORM_GROUPS = 32
# Some published programs truncate pixels to integers, but `output.images` rounds them. Subtracting half a level before
# rounding gives the same integers.
HALF_LEVEL = 1 / 255
_EPS = 1e-6

Norm = Callable[[int], nn.Module]  # builds a norm for a number of channels


@dataclass(frozen=True)
class VQTokenizerConfig:
    """Sizes and settings of a VQ tokenizer.

    Args:
        latent_width: channels between the encoder and `quant_conv`, and between `post_quant_conv` and the decoder.
        encoder_stem_width: channels of the encoder's first convolution.
        encoder_widths: channels of the encoder's levels, from the finest to the coarsest.
        decoder_widths: channels of the decoder's levels, from the coarsest to the finest.
        num_blocks: residual blocks per encoder level; a decoder level has one more.
        has_attention: whether the coarsest level has attention between cells, in addition to the middle blocks.
        normalize_for_decoder: whether the decoder gets codebook vectors scaled to length 1.
        normalize_for_encoder: whether codebook and latents are scaled to length 1 to find the nearest code.
        match_by_product: whether a cell gets the code with the largest dot product of latent and codebook vector
            (Emu3.5) instead of the nearest code.
        fsq_levels: number of values of each digit of a code, for finite scalar quantisation; empty with a codebook.
        patch: height and width in pixels of a patch, which the finest level treats as one pixel.
    """

    num_codes: int
    code_width: int
    latent_width: int
    encoder_stem_width: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    num_blocks: int
    has_attention: bool = True
    normalize_for_decoder: bool = True
    normalize_for_encoder: bool = True
    match_by_product: bool = False
    fsq_levels: tuple[int, ...] = ()
    patch: int = 1
    num_groups: int = NORM_GROUPS

    @property
    def pixels_per_cell(self) -> int:
        return self.patch * int(2 ** (len(self.decoder_widths) - 1))


def make_group_norm(width: int, num_groups: int = NORM_GROUPS) -> nn.Module:
    return nn.GroupNorm(num_groups, width, eps=_EPS)


class ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, make_norm: Norm) -> None:
        super().__init__()
        self.norm1 = make_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = make_norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x, *norm_inputs))), *norm_inputs)))
        skipped: Tensor = y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return skipped


class _SpatialAttention(nn.Module):
    """Attention with one head, in which every cell attends to all cells."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        normed = self.norm(x, *norm_inputs)
        query, key, value = (conv(normed).flatten(2) for conv in (self.q, self.k, self.v))  # [images, width, cells]
        weights = torch.softmax(query.transpose(1, 2) @ key * x.shape[1] ** -0.5, -1)  # [images, cells, cells]
        mixed = value @ weights.transpose(1, 2)
        attended: Tensor = x + self.proj_out(mixed.view_as(x))
        return attended


class ResizeConv(nn.Module):
    """Convolution that halves or doubles the resolution.

    To halve it, a column of zeros on the right and a row of zeros at the bottom are added, as in taming-transformers.
    """

    def __init__(self, width: int, is_downsampling: bool) -> None:
        super().__init__()
        self.is_downsampling = is_downsampling
        self.conv = nn.Conv2d(width, width, 3, stride=2) if is_downsampling else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1)) if self.is_downsampling else F.interpolate(x, scale_factor=2.0, mode="nearest")
        resized: Tensor = self.conv(x)
        return resized


class _ResolutionLevel(nn.Module):
    """Level of one resolution: residual blocks, attention after each block if `has_attention`, and resizing.

    As in checkpoints, the convolution that resizes is called `downsample` or `upsample`, the value of `resize`.
    """

    def __init__(
        self, in_channels: int, width: int, num_blocks: int, has_attention: bool, resize: str | None, make_norm: Norm
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(
            ResidualBlock(in_channels if i == 0 else width, width, make_norm) for i in range(num_blocks)
        )
        self.attn = nn.ModuleList(
            _SpatialAttention(width, make_norm) for _ in range(num_blocks if has_attention else 0)
        )
        self.resize = resize
        if resize:
            setattr(self, resize, ResizeConv(width, is_downsampling=resize == "downsample"))

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x, *norm_inputs)
            x = self.attn[i](x, *norm_inputs) if len(self.attn) else x
        return getattr(self, self.resize)(x) if self.resize else x


class ConvStack(nn.Module):
    """Convolutional network of an encoder (`downsample`) or a decoder (`upsample`).

    The middle blocks of an encoder run last, those of a decoder first. `forward` passes `norm_inputs` to all norms.
    """

    def __init__(self, config: VQTokenizerConfig, resize: str, make_norm: Norm | None = None) -> None:
        super().__init__()
        make_norm = make_norm or partial(make_group_norm, num_groups=config.num_groups)
        pixels = 3 * config.patch**2  # numbers of a patch
        down = resize == "downsample"
        widths = config.encoder_widths if down else config.decoder_widths
        stem_width = config.encoder_stem_width if down else widths[0]
        num_blocks = config.num_blocks if down else config.num_blocks + 1
        last = len(widths) - 1
        coarsest = last if down else 0
        width = widths[coarsest]
        self.conv_in = nn.Conv2d(pixels if down else config.latent_width, stem_width, 3, padding=1)
        mid = nn.ModuleList(
            [
                ResidualBlock(width, width, make_norm),
                _SpatialAttention(width, make_norm),
                ResidualBlock(width, width, make_norm),
            ]
        )
        levels = nn.ModuleList(
            _ResolutionLevel(
                *channels, num_blocks, config.has_attention and i == coarsest, resize if i < last else None, make_norm
            )
            for i, channels in enumerate(zip((stem_width, *widths), widths, strict=False))
        )
        self.order = ("conv_blocks", "mid") if down else ("mid", "conv_blocks")
        for name in self.order:
            setattr(self, name, mid if name == "mid" else levels)
        self.norm_out = make_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.latent_width if down else pixels, 3, padding=1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        x = self.conv_in(x)
        for name in self.order:
            for part in getattr(self, name):
                x = part(x, *norm_inputs)
        result: Tensor = self.conv_out(F.silu(self.norm_out(x, *norm_inputs)))
        return result


class LlamaGenVQ(nn.Module):
    """VQ image tokenizer: encoder, codebook and decoder. The codebook is that of the checkpoint, not normalised."""

    checkpoint: Checkpoint  # the files that the weights came from
    codebook: Tensor

    def __init__(self, config: VQTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = ConvStack(config, "downsample")
        self.decoder = ConvStack(config, "upsample")
        self.quant_conv: nn.Module = nn.Conv2d(config.latent_width, config.code_width, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.code_width, config.latent_width, 1)
        self.register_buffer("codebook", torch.zeros(config.num_codes, config.code_width))


class VQDecoder(nn.Module):
    """Module of the graph `vq_decoder`, from codes to images `[images, 3, height, width]`.

    Codes are `[images, cells]` if all images have the `grid_size`, otherwise `[images, rows, columns]`.
    """

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ, grid_size: int | None) -> None:
        super().__init__()
        self.post_quant_conv = vq.post_quant_conv
        self.decoder = vq.decoder
        self.config = vq.config
        self.grid_size = grid_size
        vectors = F.normalize(vq.codebook, dim=-1) if vq.config.normalize_for_decoder else vq.codebook
        self.register_buffer("vectors", None if vq.config.fsq_levels else vectors)

    def forward(self, codes: Tensor) -> Tensor:
        if self.config.fsq_levels:
            latents = decode_fsq_codes(codes, self.config.fsq_levels)
        elif self.grid_size is None:
            latents = self.vectors[codes].permute(0, 3, 1, 2)
        else:
            vectors = self.vectors[codes].transpose(1, 2)  # [images, code_width, cells]
            latents = vectors.reshape(-1, self.vectors.shape[1], self.grid_size, self.grid_size)
        images: Tensor = self.decoder(self.post_quant_conv(latents))
        return F.pixel_shuffle(images, self.config.patch) if self.config.patch > 1 else images


class VQEncoder(nn.Module):
    """Module of the graph `vq_encoder`, from images to `codes [images, cells]` and the latents before quantisation."""

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ) -> None:
        super().__init__()
        self.encoder = vq.encoder
        self.quant_conv = vq.quant_conv
        self.config = vq.config
        vectors = F.normalize(vq.codebook, dim=-1) if vq.config.normalize_for_encoder else vq.codebook
        self.register_buffer("vectors", None if vq.config.fsq_levels else vectors)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        image = F.pixel_unshuffle(image, config.patch) if config.patch > 1 else image
        latents = self.quant_conv(self.encoder(image))  # [images, code_width, grid, grid]
        if config.fsq_levels:
            return quantize_fsq_latents(latents, config.fsq_levels), latents
        cells = F.normalize(latents, dim=1) if config.normalize_for_encoder else latents
        similarity = cells.flatten(2).transpose(1, 2) @ self.vectors.T  # [images, cells, codes]
        if not (config.normalize_for_encoder or config.match_by_product):
            # This gives -|cell - code|^2 / 2 up to a term of the cell that all codes share.
            similarity = similarity - self.vectors.square().sum(-1) / 2
        return similarity.argmax(-1), latents
