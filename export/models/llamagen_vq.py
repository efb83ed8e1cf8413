"""LlamaGen's image tokenizer: codes to pictures, and pictures to codes.

A convolutional encoder and decoder around a codebook whose rows are unit vectors at use. Sizes come from the
weights: width per level from the convolutions, levels and residual blocks from the names. Groups of the norms
(32) and their eps are constants of the published model. Chameleon's and Janus's tokenizers are the same modules
with other choices (`VQConfig`); `vqgan.py` reads them.

Does not know transformers, prompts or how codes are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import CheckpointError
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Weights, count_blocks, fill, read_weights, shape_of

_GROUPS, _EPS = 32, 1e-6


@dataclass(frozen=True)
class VQConfig:
    """Sizes of the tokenizer; widths per level as it runs, and residual blocks per encoder level.

    `attention`: whether cells attend to each other at the coarsest level, besides the middle. `unit_decoding`,
    `unit_encoding`: whether codebook rows are unit vectors when pictures are made from codes, and when the
    nearest code is looked for (then encoder outputs are too).
    """

    codes: int
    code_width: int
    latent_width: int
    encoder_stem: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int
    attention: bool = True
    unit_decoding: bool = True
    unit_encoding: bool = True

    @property
    def scale(self) -> int:
        """Pixels per cell, along each side."""
        return int(2 ** (len(self.decoder_widths) - 1))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, width, eps=_EPS)


class _Residual(nn.Module):
    """Norm, swish, convolution; twice; around a skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = _norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        skipped: Tensor = y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return skipped


class _CellAttention(nn.Module):
    """Every cell attends to every cell, one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key, value = (conv(normed).flatten(2) for conv in (self.q, self.k, self.v))  # [images, width, cells]
        weights = torch.softmax(query.transpose(1, 2) @ key * x.shape[1] ** -0.5, -1)  # [images, cells, cells]
        mixed = value @ weights.transpose(1, 2)
        attended: Tensor = x + self.proj_out(mixed.view_as(x))
        return attended


class _Halve(nn.Module):
    """Half the pixels along each side; one column and row of zeros at the right and bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return halved


class _Double(nn.Module):
    """Twice the pixels along each side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return doubled


class _Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention at the coarsest one, then a resize."""

    def __init__(self, inputs: int, width: int, blocks: int, coarsest: bool, resize: str | None) -> None:
        super().__init__()
        self.res = nn.ModuleList(_Residual(inputs if i == 0 else width, width) for i in range(blocks))
        self.attn = nn.ModuleList(_CellAttention(width) for _ in range(blocks if coarsest else 0))
        if resize == "downsample":
            self.downsample = _Halve(width)
        elif resize == "upsample":
            self.upsample = _Double(width)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


def _mid(width: int) -> nn.ModuleList:
    return nn.ModuleList([_Residual(width, width), _CellAttention(width), _Residual(width, width)])


class _Encoder(nn.Module):
    """Pictures `[images, 3, height, width]` to latents."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = config.encoder_widths
        self.conv_in = nn.Conv2d(3, config.encoder_stem, 3, padding=1)
        last = len(widths) - 1
        self.conv_blocks = nn.ModuleList(
            _Level(
                widths[i - 1] if i else config.encoder_stem,
                width,
                config.blocks,
                coarsest=i == last and config.attention,
                resize="downsample" if i < last else None,
            )
            for i, width in enumerate(widths)
        )
        self.mid = _mid(widths[-1])
        self.norm_out, self.conv_out = _norm(widths[-1]), nn.Conv2d(widths[-1], config.latent_width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in (*self.conv_blocks, *self.mid):
            x = part(x)
        latents: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return latents


class _Decoder(nn.Module):
    """Latents to pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = config.decoder_widths  # coarsest level first, as it runs
        self.conv_in = nn.Conv2d(config.latent_width, widths[0], 3, padding=1)
        self.mid = _mid(widths[0])
        last = len(widths) - 1
        self.conv_blocks = nn.ModuleList(
            _Level(
                widths[max(i - 1, 0)],
                width,
                config.blocks + 1,
                coarsest=i == 0 and config.attention,
                resize="upsample" if i < last else None,
            )
            for i, width in enumerate(widths)
        )
        self.norm_out, self.conv_out = _norm(widths[-1]), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for part in (*self.mid, *self.conv_blocks):
            x = part(x)
        pictures: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return pictures


class LlamaGenVQ(nn.Module):
    """The whole tokenizer. `codebook` holds raw rows, as the checkpoint has them."""

    codebook: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = _Encoder(config), _Decoder(config)
        self.quant_conv = nn.Conv2d(config.latent_width, config.code_width, 1)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.latent_width, 1)
        self.register_buffer("codebook", torch.zeros(config.codes, config.code_width))


class VQDecoder(nn.Module):
    """The graph `vq_decoder`: `codes [images, cells]` in raster order -> pictures `[images, 3, height, width]`."""

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ, grid: int) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder, self.grid = vq.post_quant_conv, vq.decoder, grid
        self.register_buffer("vectors", F.normalize(vq.codebook, dim=-1) if vq.config.unit_decoding else vq.codebook)

    def latents(self, codes: Tensor) -> Tensor:
        """Code vectors of the cells `[images, code_width, grid, grid]`."""
        vectors = self.vectors[codes].transpose(1, 2)  # [images, code_width, cells]
        return vectors.reshape(-1, self.vectors.shape[1], self.grid, self.grid)

    def forward(self, codes: Tensor) -> Tensor:
        pictures: Tensor = self.decoder(self.post_quant_conv(self.latents(codes)))
        return pictures


class VQEncoder(nn.Module):
    """The graph `vq_encoder`: pictures -> `codes [images, cells]` and the latents before quantisation."""

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ) -> None:
        super().__init__()
        self.encoder, self.quant_conv, self.unit = vq.encoder, vq.quant_conv, vq.config.unit_encoding
        self.register_buffer("vectors", F.normalize(vq.codebook, dim=-1) if self.unit else vq.codebook)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        latents = self.quant_conv(self.encoder(image))  # [images, code_width, grid, grid]
        cells = F.normalize(latents, dim=1) if self.unit else latents
        likeness = cells.flatten(2).transpose(1, 2) @ self.vectors.T  # [images, cells, codes]
        if not self.unit:  # nearest: |cell - code|^2 without the |cell|^2 that all codes share
            likeness = likeness - self.vectors.square().sum(-1) / 2
        return likeness.argmax(-1), latents


def read_vq(path: Path) -> LlamaGenVQ:
    """The tokenizer in a checkpoint file."""
    weights = read_weights(path)
    weights.pop("quantize.codebook_used", None)  # a usage record of training
    if "quantize.embedding.weight" not in weights:
        raise CheckpointError(
            f"{path}: has no quantize.embedding.weight, so it is no LlamaGen VQ tokenizer (vq_ds16_c2i.pt or alike)"
        )
    return fill_vq(weights, path)


def fill_vq(
    weights: Weights,
    path: Path,
    shown: Mapping[str, str] | None = None,
    unit_decoding: bool = True,
    unit_encoding: bool = True,
) -> LlamaGenVQ:
    """The tokenizer with these weights, which bear LlamaGen's names; `shown` maps them to the file's, for messages."""
    config = replace(_infer(weights, path), unit_decoding=unit_decoding, unit_encoding=unit_encoding)
    with without_weights():
        vq = LlamaGenVQ(config)
    named = {name: weight.float() for name, weight in weights.items()}  # the whole tokenizer is small
    named["codebook"] = named.pop("quantize.embedding.weight")
    fill(vq, named, path, {**(shown or {}), "codebook": "quantize.embedding.weight"})
    return vq


def _infer(weights: Weights, path: Path) -> VQConfig:
    codes, code_width = shape_of(weights, "quantize.embedding.weight", 2, path)
    latent_width = shape_of(weights, "post_quant_conv.weight", 4, path)[0]
    widths = {
        part: tuple(
            shape_of(weights, f"{part}.conv_blocks.{i}.res.0.conv2.weight", 4, path)[0]
            for i in range(count_blocks(weights, f"{part}.conv_blocks."))
        )
        for part in ("encoder", "decoder")
    }
    stem = shape_of(weights, "encoder.conv_in.weight", 4, path)[0]
    blocks = count_blocks(weights, "encoder.conv_blocks.0.res.")
    if not widths["decoder"] or len(widths["encoder"]) != len(widths["decoder"]) or not blocks:
        raise CheckpointError(
            f"{path}: {len(widths['encoder'])} encoder levels, {len(widths['decoder'])} decoder levels of {blocks} "
            "blocks; expected a LlamaGen VQ tokenizer with as many of both"
        )
    if odd := [w for w in (stem, *widths["encoder"], *widths["decoder"]) if w % _GROUPS]:
        raise CheckpointError(f"{path}: level width {odd[0]} is no multiple of {_GROUPS}, the groups of its norms")
    attention = f"encoder.conv_blocks.{len(widths['encoder']) - 1}.attn.0.norm.weight" in weights
    return VQConfig(codes, code_width, latent_width, stem, widths["encoder"], widths["decoder"], blocks, attention)
