"""Emu3's image tokenizer: a VQGAN of videos, as far as single pictures go through it.

One grid of codes stands for several frames, and a picture is the first of them. Convolutions in time see only what
comes before, which is nothing: of a decoder's kernel the last slice acts, on one frame. The encoder reads the picture
as a video of equal frames; those it still has stand side by side as channels here. So all convolutions are in two
dimensions. The decoder's norms are scaled and shifted by the codes around each pixel (`about`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.folders import Checkpoint
from .llamagen_vq import CODEBOOK, Levels, LlamaGenVQ, Residual, VQConfig, group_norm, load_vq, rename_vqgan

_TAPS, _BEFORE = 4, 2  # frames that a halving convolution reads, and zero frames before the first
_MOST_FRAMES = 16  # of a grid of codes; the published model has four
_HALVING = "encoder.time_conv."
# Of transformers' layout to the published one, then of both to one without the wrappers of convolutions in time.
_NAMES = (
    (r"\.(?:down|up)_block\.", "."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
    (r"(?<=\d)(?:\.conv){1,2}\.(?=weight|bias)", "."),
    (r"^quant_conv\.conv\.", "quant_conv."),
    (r"^post_quant_conv\.conv\.", "decoder.post_quant_conv."),
)


class _SpatialNorm(nn.Module):
    """A group norm of x, times one linear map of the code vectors, plus another; codes are those nearest to a pixel."""

    def __init__(self, code_width: int, width: int) -> None:
        super().__init__()
        self.norm_layer = group_norm(width)
        self.conv_y, self.conv_b = nn.Conv2d(code_width, width, 1), nn.Conv2d(code_width, width, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        codes = F.interpolate(codes, size=x.shape[-2:], mode="nearest")
        scaled: Tensor = self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)
        return scaled


class _TimeConv(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


def _time_residuals(config: VQConfig) -> nn.Sequential:
    """Their norms use the mean and deviation of every channel that training recorded."""
    width = config.latent_width
    return nn.Sequential(*(Residual(width, width, nn.BatchNorm2d) for _ in range(config.blocks)))


class _VideoEncoder(Levels):
    def __init__(self, config: VQConfig, halvings: int) -> None:
        width, sizes = config.latent_width, (config.encoder_stem, config.encoder_widths, config.latent_width)
        super().__init__(3, *sizes, config.blocks, config.attention, "downsample")
        kept = [width * 2**i for i in reversed(range(halvings))]  # of the first, whose frames are all alike: one
        self.time_conv = nn.Sequential(*map(_TimeConv, [width, *kept], kept))
        self.time_res_stack = _time_residuals(config)

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        latents: Tensor = self.time_res_stack(self.time_conv(super().forward(x)))
        return latents


class _VideoDecoder(Levels):
    def __init__(self, config: VQConfig, doublings: int) -> None:
        width, widths = config.latent_width, config.decoder_widths
        norm = partial(_SpatialNorm, config.code_width)
        super().__init__(width, widths[0], widths, 3, config.blocks + 1, config.attention, "upsample", norm)
        self.post_quant_conv = nn.Conv2d(config.code_width, width, 1)
        self.time_res_stack = _time_residuals(config)
        self.time_conv = nn.Sequential(*(_TimeConv(width, width) for _ in range(doublings)))

    def forward(self, x: Tensor, *about: Tensor) -> Tensor:
        latents, codes = (self.time_conv(self.time_res_stack(one)) for one in (self.post_quant_conv(x), x))
        return super().forward(latents, codes)


class Emu3VQ(LlamaGenVQ):
    """The whole tokenizer; a grid of codes stands for 2^doublings frames."""

    def __init__(self, doublings: int, config: VQConfig) -> None:
        super().__init__(config)
        self.encoder, self.decoder = _VideoEncoder(config, doublings), _VideoDecoder(config, doublings)
        self.post_quant_conv = nn.Identity()  # the decoder reads codes before and after its own


def load_emu3_vq(checkpoint: Checkpoint) -> LlamaGenVQ:
    """The tokenizer with these weights, in the published layout or that of transformers. Raises: CheckpointError."""
    rename_vqgan(checkpoint, names=_NAMES)
    doublings = checkpoint.count("decoder.time_conv.")
    for i in range(min(checkpoint.count(_HALVING), doublings)):
        weight, bias, frames = f"{_HALVING}{i}.weight", f"{_HALVING}{i}.bias", 2 ** (doublings - i)
        shape, _ = checkpoint.shape(weight, 5), checkpoint.shape(bias, 1)
        if shape[2] != _TAPS or frames > _MOST_FRAMES:
            found = f"shape {list(shape)} for {frames} frames"
            expected = f"{_TAPS} taps in time and at most {_MOST_FRAMES} frames"
            raise checkpoint.error(weight, found=found, expected=expected)
        stacked = _stack_frames(checkpoint.weights[weight].float(), frames)
        checkpoint.weights[weight] = stacked if i else torch.stack(stacked.chunk(frames, 1)).sum(0)
        checkpoint.weights[bias] = checkpoint.weights[bias].repeat(frames // 2)
    for name, tensor in checkpoint.weights.items():
        if tensor.ndim == 5:
            checkpoint.weights[name] = tensor[:, :, -1]
        elif tensor.ndim == 2 and name != CODEBOOK:  # transformers' attention multiplies where Emu3's convolves
            checkpoint.weights[name] = tensor[:, :, None, None]
    return load_vq(
        checkpoint, normalize_for_decoder=False, normalize_for_encoder=False, build=partial(Emu3VQ, doublings)
    )


def _stack_frames(weight: Tensor, frames: int) -> Tensor:
    """A convolution `[out, in, taps, 3, 3]` that halves `frames`, as `[frames / 2 * out, frames * in, 3, 3]`."""
    padded = F.pad(weight, (0, 0, 0, 0, frames, frames))  # zeros for the frames that a tap does not read
    taps = [[frames + _BEFORE + i - 2 * j for i in range(frames)] for j in range(frames // 2)]
    return torch.cat([torch.cat([padded[:, :, tap] for tap in row], 1) for row in taps])
