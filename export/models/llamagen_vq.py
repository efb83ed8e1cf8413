"""VQ image tokenizers, as LlamaGen has one: an encoder from images to codes, a decoder from codes to images.

Both are convolutional networks; their levels differ in resolution by a factor of two. Their sizes come from the
weights: widths from shapes, numbers of levels and residual blocks from names. The groups of the norms (32) and their
epsilon are constants of the published model.

The tokenizers of Chameleon and Janus are the same modules with other settings (`VQConfig`). In Emu3's decoder, norms
also read the code vectors (`norm_inputs`). Cosmos has no codebook (`fsq_levels`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from ...engines.contracts import Progress
from ...inputs import format_error
from ..checkpoints.deferred import without_weights
from ..checkpoints.files import Config, read_text, refusal, refusing
from ..checkpoints.folders import Checkpoint
from ..progress import silent
from .fsq import code_vectors, nearest_codes

CODEBOOK = "quantize.embedding.weight"
_GROUPS = 32
_EPS = 1e-6
# Patterns of names in taming-transformers, and their replacements by LlamaGen's names.
_VQGAN_PATTERNS = (
    (r"\.(?:down|up)\.(\d+)\.block\.", r".conv_blocks.\1.res."),
    (r"\.(?:down|up)\.(\d+)\.", r".conv_blocks.\1."),
    *((rf"\.mid\.{theirs}\.", f".mid.{i}.") for i, theirs in enumerate(("block_1", "attn_1", "block_2"))),
)

Norm = Callable[[int], nn.Module]  # builds a norm for a number of channels


@dataclass(frozen=True)
class VQConfig:
    """Sizes and settings of the tokenizer.

    Args:
        codes: number of codes.
        code_width: width of a code vector.
        latent_width: channels between the encoder and `quant_conv`, and between `post_quant_conv` and the decoder.
        encoder_stem: channels of the encoder's first convolution.
        encoder_widths: channels of the encoder's levels, from the finest to the coarsest.
        decoder_widths: channels of the decoder's levels, from the coarsest to the finest.
        blocks: residual blocks per encoder level; a decoder level has one more.
        attention: whether cells attend to each other at the coarsest level, in addition to the middle.
        normalize_for_decoder: whether the decoder gets codebook vectors scaled to length 1.
        normalize_for_encoder: whether codebook and latents are scaled to length 1 to find the nearest code.
        fsq_levels: levels of each digit of a code, for finite scalar quantisation instead of a codebook.
        patch: pixels along each side of a patch, which is one pixel of the finest level.
        groups: groups of channels that norms normalise over.
    """

    codes: int
    code_width: int
    latent_width: int
    encoder_stem: int
    encoder_widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    blocks: int
    attention: bool = True
    normalize_for_decoder: bool = True
    normalize_for_encoder: bool = True
    fsq_levels: tuple[int, ...] = ()
    patch: int = 1
    groups: int = _GROUPS

    @property
    def pixels_per_cell(self) -> int:
        """Number of pixels per cell, along each side."""
        return self.patch * int(2 ** (len(self.decoder_widths) - 1))


def group_norm(width: int, groups: int = _GROUPS) -> nn.Module:
    """Build a group norm of `width` channels."""
    return nn.GroupNorm(groups, width, eps=_EPS)


class Residual(nn.Module):
    """A residual block: twice norm, swish and convolution, with a skip connection."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x, *norm_inputs))), *norm_inputs)))
        skipped: Tensor = y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return skipped


class _CellAttention(nn.Module):
    """Attention of all cells to all cells, with one head."""

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


class Resize(nn.Module):
    """A convolution that halves or doubles the resolution.

    For halving, a column and a row of zeros are added at the right and bottom, as in taming-transformers.
    """

    def __init__(self, width: int, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        self.conv = nn.Conv2d(width, width, 3, stride=2) if halves else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1)) if self.halves else F.interpolate(x, scale_factor=2.0, mode="nearest")
        resized: Tensor = self.conv(x)
        return resized


class _Level(nn.Module):
    """Residual blocks of one resolution, with attention after each if `attention`, and an optional `Resize`.

    The attribute of the `Resize` has the name `resize`, `downsample` or `upsample`.
    """

    def __init__(self, inputs: int, width: int, blocks: int, attention: bool, resize: str | None, norm: Norm) -> None:
        super().__init__()
        self.res = nn.ModuleList(Residual(inputs if i == 0 else width, width, norm) for i in range(blocks))
        self.attn = nn.ModuleList(_CellAttention(width, norm) for _ in range(blocks if attention else 0))
        self.resize = resize
        if resize:
            setattr(self, resize, Resize(width, halves=resize == "downsample"))

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x, *norm_inputs)
            x = self.attn[i](x, *norm_inputs) if len(self.attn) else x
        return getattr(self, self.resize)(x) if self.resize else x


class ConvStack(nn.Module):
    """The network of an encoder or a decoder.

    Args:
        inputs: number of input channels.
        stem: output channels of the first convolution.
        widths: channels of the levels, in the order in which they run.
        outputs: number of output channels.
        blocks: residual blocks per level.
        attention: whether the coarsest level has attention after each residual block.
        resize: `downsample` for an encoder, whose middle blocks run last, or `upsample` for a decoder.
        norm: function that builds a norm; `forward` passes `norm_inputs` to all norms.
    """

    def __init__(
        self,
        inputs: int,
        stem: int,
        widths: tuple[int, ...],
        outputs: int,
        blocks: int,
        attention: bool,
        resize: str,
        norm: Norm = group_norm,
    ) -> None:
        super().__init__()
        last = len(widths) - 1
        down = resize == "downsample"
        coarsest = last if down else 0
        inner = widths[coarsest]
        self.conv_in = nn.Conv2d(inputs, stem, 3, padding=1)
        mid = nn.ModuleList([Residual(inner, inner, norm), _CellAttention(inner, norm), Residual(inner, inner, norm)])
        levels = nn.ModuleList(
            _Level(before, width, blocks, attention and i == coarsest, resize if i < last else None, norm)
            for i, (before, width) in enumerate(zip((stem, *widths), widths, strict=False))
        )
        self.order = ("conv_blocks", "mid") if down else ("mid", "conv_blocks")
        for name in self.order:
            setattr(self, name, mid if name == "mid" else levels)
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        x = self.conv_in(x)
        for name in self.order:
            for part in getattr(self, name):
                x = part(x, *norm_inputs)
        result: Tensor = self.conv_out(F.silu(self.norm_out(x, *norm_inputs)))
        return result


class LlamaGenVQ(nn.Module):
    """Encoder, codebook and decoder; the codebook is not normalised, as in the checkpoint."""

    codebook: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        latent = config.latent_width
        blocks = config.blocks
        attention = config.attention
        down = config.encoder_widths
        up = config.decoder_widths
        norm = partial(group_norm, groups=config.groups)
        patch = 3 * config.patch**2  # numbers of a patch
        self.encoder = ConvStack(patch, config.encoder_stem, down, latent, blocks, attention, "downsample", norm)
        self.decoder = ConvStack(latent, up[0], up, patch, blocks + 1, attention, "upsample", norm)
        self.quant_conv = nn.Conv2d(latent, config.code_width, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.code_width, latent, 1)
        self.register_buffer("codebook", torch.zeros(config.codes, config.code_width))


class VQDecoder(nn.Module):
    """Module of the graph `vq_decoder`, from codes to images `[images, 3, height, width]`.

    Args:
        vq: the tokenizer.
        grid: rows and columns of codes of all images, whose `codes` are `[images, cells]` in raster order. None for
            images of any size, whose `codes` are `[images, rows, columns]`.
    """

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ, grid: int | None) -> None:
        super().__init__()
        self.post_quant_conv = vq.post_quant_conv
        self.decoder = vq.decoder
        self.grid = grid
        self.fsq_levels = vq.config.fsq_levels
        self.patch = vq.config.patch
        vectors = F.normalize(vq.codebook, dim=-1) if vq.config.normalize_for_decoder else vq.codebook
        self.register_buffer("vectors", None if self.fsq_levels else vectors)

    def forward(self, codes: Tensor) -> Tensor:
        if self.fsq_levels:
            latents = code_vectors(codes, self.fsq_levels)
        elif self.grid is None:
            latents = self.vectors[codes].permute(0, 3, 1, 2)
        else:
            vectors = self.vectors[codes].transpose(1, 2)  # [images, code_width, cells]
            latents = vectors.reshape(-1, self.vectors.shape[1], self.grid, self.grid)
        images: Tensor = self.decoder(self.post_quant_conv(latents))
        return F.pixel_shuffle(images, self.patch) if self.patch > 1 else images


class VQEncoder(nn.Module):
    """Module of the graph `vq_encoder`, from images to `codes [images, cells]` and the latents before quantisation."""

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ) -> None:
        super().__init__()
        self.encoder = vq.encoder
        self.quant_conv = vq.quant_conv
        self.normalize = vq.config.normalize_for_encoder
        self.fsq_levels = vq.config.fsq_levels
        self.patch = vq.config.patch
        vectors = F.normalize(vq.codebook, dim=-1) if self.normalize else vq.codebook
        self.register_buffer("vectors", None if self.fsq_levels else vectors)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        image = F.pixel_unshuffle(image, self.patch) if self.patch > 1 else image
        latents = self.quant_conv(self.encoder(image))  # [images, code_width, grid, grid]
        if self.fsq_levels:
            return nearest_codes(latents, self.fsq_levels), latents
        cells = F.normalize(latents, dim=1) if self.normalize else latents
        similarity = cells.flatten(2).transpose(1, 2) @ self.vectors.T  # [images, cells, codes]
        if not self.normalize:  # -|cell - code|^2 / 2 without the term of the cell, which all codes share
            similarity = similarity - self.vectors.square().sum(-1) / 2
        return similarity.argmax(-1), latents


@refusing
def read_vq(
    path: Path, progress: Progress = silent, averaged: bool | None = None
) -> tuple[LlamaGenVQ, list[tuple[str, Path]]]:
    """Read a tokenizer with LlamaGen's names of weights.

    Args:
        path: checkpoint file.
        progress: progress callback.
        averaged: whether to prefer averaged weights; see `read_weights`.

    Returns:
        The tokenizer, and its files with their roles.

    Raises:
        CheckpointError: the file cannot be read, or has no such tokenizer.
    """
    checkpoint = Checkpoint(path, "vq", progress, averaged)
    checkpoint.read(keep=lambda name: name != "quantize.codebook_used")  # statistics of training
    if CODEBOOK not in checkpoint.weights:
        problem = f"has no {CODEBOOK}, so it is no LlamaGen VQ tokenizer (vq_ds16_c2i.pt or alike)"
        raise checkpoint.error(problem=problem)
    return load_vq(checkpoint), checkpoint.sources


def load_vq(
    checkpoint: Checkpoint, build: Callable[[VQConfig], LlamaGenVQ] = LlamaGenVQ, groups: int = _GROUPS, **settings: Any
) -> LlamaGenVQ:
    """Load a tokenizer, with sizes from the shapes and names of its weights.

    Args:
        checkpoint: weights with LlamaGen's names.
        build: function that builds the tokenizer without weights.
        groups: groups of channels of its norms.
        settings: other fields of `VQConfig` that shapes and names do not tell.

    Raises:
        CheckpointError: weights are missing, unexpected or of another shape.
    """
    codes, code_width = checkpoint.shape(CODEBOOK)
    latent_width = checkpoint.shape("encoder.conv_out.weight", 4)[0]
    encoder, decoder = (
        tuple(
            checkpoint.shape(f"{part}.conv_blocks.{i}.res.0.conv2.weight", 4)[0]
            for i in range(checkpoint.count(f"{part}.conv_blocks."))
        )
        for part in ("encoder", "decoder")
    )
    stem = checkpoint.shape("encoder.conv_in.weight", 4)[0]
    blocks = checkpoint.count("encoder.conv_blocks.0.res.")
    if not decoder or len(encoder) != len(decoder) or not blocks:
        counts = f"{len(encoder)} encoder and {len(decoder)} decoder levels of {blocks} blocks"
        raise checkpoint.error(found=counts, expected="a LlamaGen VQ tokenizer with as many of both")
    for width in (stem, *encoder, *decoder):
        if width % groups:
            expected = f"a multiple of {groups}, the groups of its norms"
            raise checkpoint.error(found=f"a level of width {width}", expected=expected)
    attention = f"encoder.conv_blocks.{len(encoder) - 1}.attn.0.norm.weight" in checkpoint.weights
    with without_weights():
        sizes = (codes, code_width, latent_width, stem, encoder, decoder, blocks, attention)
        vq = build(VQConfig(*sizes, groups=groups, **settings))
    checkpoint.rename({"codebook": CODEBOOK})
    numbers = ((name, weight) for name, weight in checkpoint.weights.items() if weight.is_floating_point())
    checkpoint.weights |= {name: weight.float() for name, weight in numbers}  # it is small
    checkpoint.load_strict(vq)
    return vq


class VQGAN(NamedTuple):
    """A tokenizer that was read from its files.

    Args:
        vq: the tokenizer.
        grid: rows of codes of its training images, None without vqgan.yaml.
        sources: its files with their roles.
    """

    vq: LlamaGenVQ
    grid: int | None
    sources: list[tuple[str, Path]]


@refusing
def read_vqgan(path: Path, progress: Progress = silent) -> VQGAN:
    """Read a tokenizer in the layout of taming-transformers.

    Args:
        path: folder with vqgan.ckpt and vqgan.yaml, or a .ckpt file.
        progress: progress callback.

    Raises:
        CheckpointError: a file cannot be read, or has no such tokenizer.
    """
    file = path / "vqgan.ckpt" if path.is_dir() else path
    if not file.is_file():
        raise refusal(path, found="no .ckpt", expected="a folder with vqgan.ckpt and vqgan.yaml, or a .ckpt file")
    checkpoint = Checkpoint(file, "vq", progress)
    checkpoint.read(keep=lambda name: not name.startswith("loss."))  # networks of the training loss
    if CODEBOOK not in checkpoint.weights or not checkpoint.count("encoder.down."):
        problem = f"has no {CODEBOOK} with encoder.down.0, so it is no VQGAN in taming-transformers' layout"
        raise checkpoint.error(problem=problem)
    rename_vqgan(checkpoint)
    vq = load_vq(checkpoint, normalize_for_decoder=False, normalize_for_encoder=False)
    settings = file.with_suffix(".yaml")
    if not settings.is_file():
        return VQGAN(vq, None, checkpoint.sources)
    return VQGAN(vq, _read_grid(settings, vq.config), [*checkpoint.sources, ("vq_config", settings)])


def rename_vqgan(
    checkpoint: Checkpoint, coarsest_first: bool = False, patterns: Sequence[tuple[str, str]] = ()
) -> None:
    """Rename weights from the names of taming-transformers to LlamaGen's.

    Args:
        checkpoint: the weights.
        coarsest_first: whether the decoder's levels are numbered in the order in which they run. In taming-transformers
            the order is reversed.
        patterns: regular expressions and replacements that first translate other names to taming-transformers'.
    """
    last = max(map(checkpoint.count, ("decoder.up.", "decoder.up_block.up."))) - 1
    file_names: dict[str, str] = {}  # by new name
    for name in checkpoint.weights:
        new = name
        for pattern, replacement in (*patterns, *_VQGAN_PATTERNS):
            new = re.sub(pattern, replacement, new)
        if new.startswith("decoder.conv_blocks.") and not coarsest_first:
            new = re.sub(r"conv_blocks\.(\d+)", lambda match: f"conv_blocks.{last - int(match[1])}", new)
        file_names[new] = name
    checkpoint.rename(file_names)


def _read_grid(path: Path, config: VQConfig) -> int:
    text = read_text(path)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("aliases, which may repeat each other without end")
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise refusal(path, found=format_error(error), expected="YAML") from error
    parameters = Config(path, content).section("model", "params")
    parameters.agree(n_embed=config.codes, embed_dim=config.code_width)
    sizes = parameters.section("ddconfig")
    sizes.agree(z_channels=config.latent_width, ch=config.encoder_stem, num_res_blocks=config.blocks)
    pixels = sizes.whole("resolution")
    if pixels is None or pixels % config.pixels_per_cell:
        raise sizes.error("resolution", expected=f"a multiple of {config.pixels_per_cell} pixels")
    return pixels // config.pixels_per_cell
