"""LlamaGen's image tokenizer: codes to pictures, and pictures to codes.

A convolutional encoder and decoder around a codebook whose rows are unit vectors at use. Sizes come from the weights:
width per level from the convolutions, levels and residual blocks from the names. Groups of the norms (32) and their
eps are constants of the published model. Chameleon's and Janus's are the same modules with other choices (`VQConfig`);
Emu3's decoder has other norms, which also read the codes (`about`); Cosmos has codes without a codebook.
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
_GROUPS, _EPS = 32, 1e-6
_VQGAN_NAMES = (  # of taming-transformers, and LlamaGen's
    (r"\.(?:down|up)\.(\d+)\.block\.", r".conv_blocks.\1.res."),
    (r"\.(?:down|up)\.(\d+)\.", r".conv_blocks.\1."),
    *((rf"\.mid\.{theirs}\.", f".mid.{i}.") for i, theirs in enumerate(("block_1", "attn_1", "block_2"))),
)


Norm = Callable[[int], nn.Module]  # of so many channels


@dataclass(frozen=True)
class VQConfig:
    """Sizes of the tokenizer; widths per level as it runs, and residual blocks per encoder level.

    attention: whether cells attend to each other at the coarsest level, besides the middle. normalize_for_decoder,
    normalize_for_encoder: whether codebook rows are unit vectors for images, and for the nearest code (then encoder
    outputs are too). levels: of the digits of codes, where they are not rows. patch: pixels along each side that
    are one at the finest level. groups: of channels that norms are over.
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
    levels: tuple[int, ...] = ()
    patch: int = 1
    groups: int = _GROUPS

    @property
    def pixels_per_cell(self) -> int:
        """Pixels per cell, along each side."""
        return self.patch * int(2 ** (len(self.decoder_widths) - 1))


def group_norm(width: int, groups: int = _GROUPS) -> nn.Module:
    """Over groups of channels and all pixels."""
    return nn.GroupNorm(groups, width, eps=_EPS)


class Residual(nn.Module):
    """Norm, swish, convolution; twice; around a skip connection."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = norm(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x, *about))), *about)))
        skipped: Tensor = y + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return skipped


class _CellAttention(nn.Module):
    """Every cell attends to every cell, one head."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        normed = self.norm(x, *about)
        query, key, value = (conv(normed).flatten(2) for conv in (self.q, self.k, self.v))  # [images, width, cells]
        weights = torch.softmax(query.transpose(1, 2) @ key * x.shape[1] ** -0.5, -1)  # [images, cells, cells]
        mixed = value @ weights.transpose(1, 2)
        attended: Tensor = x + self.proj_out(mixed.view_as(x))
        return attended


class Resize(nn.Module):
    """Half the pixels along each side, after a column and a row of zeros at the right and bottom; or twice as many."""

    def __init__(self, width: int, shrinks: bool) -> None:
        super().__init__()
        self.shrinks = shrinks
        self.conv = nn.Conv2d(width, width, 3, stride=2) if shrinks else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1)) if self.shrinks else F.interpolate(x, scale_factor=2.0, mode="nearest")
        resized: Tensor = self.conv(x)
        return resized


class _Level(nn.Module):
    """Residual blocks of one resolution, each perhaps followed by attention, then perhaps a resize under its name."""

    def __init__(self, inputs: int, width: int, blocks: int, attention: bool, resize: str | None, norm: Norm) -> None:
        super().__init__()
        self.res = nn.ModuleList(Residual(inputs if i == 0 else width, width, norm) for i in range(blocks))
        self.attn = nn.ModuleList(_CellAttention(width, norm) for _ in range(blocks if attention else 0))
        self.resize = resize
        if resize:
            setattr(self, resize, Resize(width, shrinks=resize == "downsample"))

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x, *about)
            x = self.attn[i](x, *about) if len(self.attn) else x
        return getattr(self, self.resize)(x) if self.resize else x


class Levels(nn.Module):
    """Pictures `[images, channels, height, width]` to latents, or back; widths: of the levels as they run.

    norm: makes all norms; what `forward` is given beside x is for them.
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
        last, down = len(widths) - 1, resize == "downsample"
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
        self.norm_out, self.conv_out = norm(widths[-1]), nn.Conv2d(widths[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        x = self.conv_in(x)
        for name in self.order:
            for part in getattr(self, name):
                x = part(x, *about)
        result: Tensor = self.conv_out(F.silu(self.norm_out(x, *about)))
        return result


class LlamaGenVQ(nn.Module):
    """The whole tokenizer. `codebook` holds raw rows, as the checkpoint has them."""

    codebook: Tensor

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config, latent, blocks, attention = config, config.latent_width, config.blocks, config.attention
        down, up, norm = config.encoder_widths, config.decoder_widths, partial(group_norm, groups=config.groups)
        patch = 3 * config.patch**2  # numbers of one
        self.encoder = Levels(patch, config.encoder_stem, down, latent, blocks, attention, "downsample", norm)
        self.decoder = Levels(latent, up[0], up, patch, blocks + 1, attention, "upsample", norm)
        self.quant_conv = nn.Conv2d(latent, config.code_width, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(config.code_width, latent, 1)
        self.register_buffer("codebook", torch.zeros(config.codes, config.code_width))


class VQDecoder(nn.Module):
    """The graph `vq_decoder`: `codes [images, cells]` in raster order -> pictures `[images, 3, height, width]`.

    grid: rows and columns of all pictures; without, each call's: `codes [images, rows, columns]`.
    """

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ, grid: int | None) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder, self.grid = vq.post_quant_conv, vq.decoder, grid
        self.levels, self.patch = vq.config.levels, vq.config.patch
        vectors = F.normalize(vq.codebook, dim=-1) if vq.config.normalize_for_decoder else vq.codebook
        self.register_buffer("vectors", None if self.levels else vectors)

    def forward(self, codes: Tensor) -> Tensor:
        if self.levels:
            latents = code_vectors(codes, self.levels)
        elif self.grid is None:
            latents = self.vectors[codes].permute(0, 3, 1, 2)
        else:
            vectors = self.vectors[codes].transpose(1, 2)  # [images, code_width, cells]
            latents = vectors.reshape(-1, self.vectors.shape[1], self.grid, self.grid)
        pictures: Tensor = self.decoder(self.post_quant_conv(latents))
        return F.pixel_shuffle(pictures, self.patch) if self.patch > 1 else pictures


class VQEncoder(nn.Module):
    """The graph `vq_encoder`: pictures -> `codes [images, cells]` and the latents before quantisation."""

    vectors: Tensor

    def __init__(self, vq: LlamaGenVQ) -> None:
        super().__init__()
        self.encoder, self.quant_conv, self.unit = vq.encoder, vq.quant_conv, vq.config.normalize_for_encoder
        self.levels, self.patch = vq.config.levels, vq.config.patch
        vectors = F.normalize(vq.codebook, dim=-1) if self.unit else vq.codebook
        self.register_buffer("vectors", None if self.levels else vectors)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        image = F.pixel_unshuffle(image, self.patch) if self.patch > 1 else image
        latents = self.quant_conv(self.encoder(image))  # [images, code_width, grid, grid]
        if self.levels:
            return nearest_codes(latents, self.levels), latents
        cells = F.normalize(latents, dim=1) if self.unit else latents
        likeness = cells.flatten(2).transpose(1, 2) @ self.vectors.T  # [images, cells, codes]
        if not self.unit:  # nearest: |cell - code|^2 without the |cell|^2 that all codes share
            likeness = likeness - self.vectors.square().sum(-1) / 2
        return likeness.argmax(-1), latents


@refusing
def read_vq(
    path: Path, progress: Progress = silent, averaged: bool | None = None
) -> tuple[LlamaGenVQ, list[tuple[str, Path]]]:
    """The tokenizer in a checkpoint file, and its files with roles; averaged: as of `read_weights`.

    Raises: CheckpointError.
    """
    checkpoint = Checkpoint(path, "vq", progress, averaged)
    checkpoint.read(keep=lambda name: name != "quantize.codebook_used")  # a record of training
    if CODEBOOK not in checkpoint.weights:
        problem = f"has no {CODEBOOK}, so it is no LlamaGen VQ tokenizer (vq_ds16_c2i.pt or alike)"
        raise checkpoint.error(problem=problem)
    return load_vq(checkpoint), checkpoint.sources


def load_vq(
    checkpoint: Checkpoint, build: Callable[[VQConfig], LlamaGenVQ] = LlamaGenVQ, groups: int = _GROUPS, **choices: Any
) -> LlamaGenVQ:
    """The tokenizer with these weights, which bear LlamaGen's names. Raises: CheckpointError.

    choices: of `VQConfig`, besides groups.
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
        found = f"{len(encoder)} encoder and {len(decoder)} decoder levels of {blocks} blocks"
        raise checkpoint.error(found=found, expected="a LlamaGen VQ tokenizer with as many of both")
    for width in (stem, *encoder, *decoder):
        if width % groups:
            expected = f"a multiple of {groups}, the groups of its norms"
            raise checkpoint.error(found=f"a level of width {width}", expected=expected)
    attention = f"encoder.conv_blocks.{len(encoder) - 1}.attn.0.norm.weight" in checkpoint.weights
    with without_weights():
        sizes = (codes, code_width, latent_width, stem, encoder, decoder, blocks, attention)
        vq = build(VQConfig(*sizes, groups=groups, **choices))
    checkpoint.rename({"codebook": CODEBOOK})
    numbers = ((name, weight) for name, weight in checkpoint.weights.items() if weight.is_floating_point())
    checkpoint.weights |= {name: weight.float() for name, weight in numbers}  # it is small
    checkpoint.load_strict(vq)
    return vq


class VQGAN(NamedTuple):
    """A tokenizer, the rows of codes of its pictures where its configuration has them, and its files with roles."""

    vq: LlamaGenVQ
    grid: int | None
    sources: list[tuple[str, Path]]


@refusing
def read_vqgan(path: Path, progress: Progress = silent) -> VQGAN:
    """The tokenizer in taming-transformers' layout: a folder with vqgan.ckpt and vqgan.yaml, or a .ckpt of such.

    Raises: CheckpointError.
    """
    file = path / "vqgan.ckpt" if path.is_dir() else path
    if not file.is_file():
        raise refusal(path, found="no .ckpt", expected="a folder with vqgan.ckpt and vqgan.yaml, or a .ckpt file")
    checkpoint = Checkpoint(file, "vq", progress)
    checkpoint.read(keep=lambda name: not name.startswith("loss."))  # of training
    if CODEBOOK not in checkpoint.weights or not checkpoint.count("encoder.down."):
        problem = f"has no {CODEBOOK} with encoder.down.0, so it is no VQGAN in taming-transformers' layout"
        raise checkpoint.error(problem=problem)
    rename_vqgan(checkpoint)
    vq = load_vq(checkpoint, normalize_for_decoder=False, normalize_for_encoder=False)
    settings = file.with_suffix(".yaml")
    if not settings.is_file():
        return VQGAN(vq, None, checkpoint.sources)
    return VQGAN(vq, _read_grid(settings, vq.config), [*checkpoint.sources, ("vq_config", settings)])


def rename_vqgan(checkpoint: Checkpoint, coarsest_first: bool = False, names: Sequence[tuple[str, str]] = ()) -> None:
    """Give weights LlamaGen's names.

    Args:
        checkpoint: with weights as taming-transformers names them.
        coarsest_first: whether the decoder's levels are numbered as they run, unlike taming's.
        names: patterns, and what of taming's names replaces them, for files with names of their own.
    """
    last = max(map(checkpoint.count, ("decoder.up.", "decoder.up_block.up."))) - 1
    ours: dict[str, str] = {}
    for name in checkpoint.weights:
        new = name
        for pattern, replacement in (*names, *_VQGAN_NAMES):
            new = re.sub(pattern, replacement, new)
        if new.startswith("decoder.conv_blocks.") and not coarsest_first:
            new = re.sub(r"conv_blocks\.(\d+)", lambda match: f"conv_blocks.{last - int(match[1])}", new)
        ours[new] = name
    checkpoint.rename(ours)


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
