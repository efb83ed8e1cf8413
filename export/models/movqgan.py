"""MoVQGAN: an image tokenizer in whose decoder the code vectors determine the scale and shift of each norm.

Emu3's tokenizer is a MoVQGAN for videos, in which one grid of codes stands for several frames. Here it is reduced to
single images, so that all convolutions are in 2D. Only the first frame is decoded. Convolutions in time would read
earlier frames, which are zero, so only the last slice of each kernel is used. The encoder encodes the image as a video
of equal frames, which are groups of channels here until the last convolution in time has merged them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import Progress
from ..checkpoints.files import make_file_error, wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..progress import ignore_progress
from .llamagen_vq import ConvStack, LlamaGenVQ, ResidualBlock, VQTokenizerConfig, make_group_norm
from .vq_checkpoints import CODEBOOK, load_vq_tokenizer, rename_vqgan_weights

_TAPS = 4  # number of frames that a convolution in time reads to halve the number of frames
_PADDING = 2  # number of zero frames before the first frame
_MAX_FRAMES = 16  # maximum number of frames per grid of codes; the published model has 4
_HALVING = "encoder.time_conv."
_MOVQGAN = "movqgan_270M.ckpt"
_POST_QUANT = (r"^post_quant_conv\.(?:conv\.)?", "decoder.post_quant_conv.")
# Patterns and replacements: first from the layout of transformers to the published layout, then to names without the
# modules that wrap convolutions in time in both layouts.
_PATTERNS = (
    (r"\.(?:down|up)_block\.", "."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
    (r"(?<=\d)(?:\.conv){1,2}\.(?=weight|bias)", "."),
    (r"^quant_conv\.conv\.", "quant_conv."),
    _POST_QUANT,
)


class _SpatialNorm(nn.Module):
    """Group norm whose scale and shift at each pixel are linear maps of the code vector of the pixel's cell."""

    def __init__(self, code_width: int, width: int) -> None:
        super().__init__()
        self.norm_layer = make_group_norm(width)
        self.conv_y = nn.Conv2d(code_width, width, 1)
        self.conv_b = nn.Conv2d(code_width, width, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        codes = F.interpolate(codes, size=x.shape[-2:], mode="nearest")
        scaled: Tensor = self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)
        return scaled


class _TemporalConv(nn.Conv2d):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


def _make_temporal_residual_blocks(config: VQTokenizerConfig) -> nn.Sequential:
    width = config.latent_width
    return nn.Sequential(*(ResidualBlock(width, width, nn.BatchNorm2d) for _ in range(config.num_blocks)))


class _VideoEncoder(ConvStack):
    def __init__(self, config: VQTokenizerConfig, num_halvings: int) -> None:
        super().__init__(config, "downsample")
        width = config.latent_width
        outputs = [width * 2**i for i in reversed(range(num_halvings))]  # channels: `width` of each remaining frame
        inputs = [width, *outputs]  # all input frames of the first convolution are equal, so it reads one of them
        self.time_conv = nn.Sequential(*map(_TemporalConv, inputs, outputs))
        self.time_res_stack = _make_temporal_residual_blocks(config)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        latents: Tensor = self.time_res_stack(self.time_conv(super().forward(x)))
        return latents


class _MoVQDecoder(ConvStack):
    """Decoder that reads the code vectors twice: through `post_quant_conv`, and in its norms."""

    def __init__(self, config: VQTokenizerConfig) -> None:
        super().__init__(config, "upsample", partial(_SpatialNorm, config.code_width))
        self.post_quant_conv = nn.Conv2d(config.code_width, config.latent_width, 1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        return super().forward(self.post_quant_conv(x), x)


class _VideoDecoder(_MoVQDecoder):
    def __init__(self, config: VQTokenizerConfig, num_doublings: int) -> None:
        super().__init__(config)
        width = config.latent_width
        self.time_res_stack = _make_temporal_residual_blocks(config)
        self.time_conv = nn.Sequential(*(_TemporalConv(width, width) for _ in range(num_doublings)))

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        latents, codes = (self.time_conv(self.time_res_stack(value)) for value in (self.post_quant_conv(x), x))
        return ConvStack.forward(self, latents, codes)


class MoVQ(LlamaGenVQ):
    def __init__(self, config: VQTokenizerConfig) -> None:
        super().__init__(config)
        self.decoder = _MoVQDecoder(config)
        self.post_quant_conv = nn.Identity()  # moved into the decoder


class Emu3VQ(MoVQ):
    """Emu3's image tokenizer. An image is the first of `2 ** num_doublings` video frames that share a grid of codes."""

    def __init__(self, num_doublings: int, config: VQTokenizerConfig) -> None:
        super().__init__(config)
        self.encoder = _VideoEncoder(config, num_doublings)
        self.decoder = _VideoDecoder(config, num_doublings)


@wrap_reader_errors
def read_movqgan(path: Path, progress: Progress = ignore_progress) -> LlamaGenVQ:
    """Read a MoVQGAN from its .ckpt file, or from a folder with `movqgan_270M.ckpt`."""
    file = path / _MOVQGAN if path.is_dir() else path
    if not file.is_file():
        raise make_file_error(path, found=f"no {_MOVQGAN}", expected=f"a folder with {_MOVQGAN}, or a .ckpt file")
    checkpoint = Checkpoint(file, "vq", progress)
    checkpoint.read_weights(name_filter=lambda name: not name.startswith("loss."))  # networks of the training loss
    if CODEBOOK not in checkpoint.weights or not any(".norm_layer." in name for name in checkpoint.weights):
        expected = f"{CODEBOOK} and norms with norm_layer, as in a MoVQGAN"
        raise checkpoint.make_error(found=checkpoint.format_names(), expected=expected)
    rename_vqgan_weights(checkpoint, patterns=[_POST_QUANT])
    return _load_unnormalized_vq(checkpoint, MoVQ)


def load_emu3_vq(checkpoint: Checkpoint) -> LlamaGenVQ:
    """Load Emu3's image tokenizer from weights in the published layout or in the layout of transformers."""
    rename_vqgan_weights(checkpoint, patterns=_PATTERNS)
    num_doublings = checkpoint.count_layers("decoder.time_conv.")
    for i in range(min(checkpoint.count_layers(_HALVING), num_doublings)):
        weight = f"{_HALVING}{i}.weight"
        bias = f"{_HALVING}{i}.bias"
        frames = 2 ** (num_doublings - i)
        shape = checkpoint.get_shape(weight, 5)
        checkpoint.get_shape(bias, 1)
        if shape[2] != _TAPS or frames > _MAX_FRAMES:
            expected = f"{_TAPS} taps in time and at most {_MAX_FRAMES} frames"
            raise checkpoint.make_error(weight, found=f"shape {list(shape)} for {frames} frames", expected=expected)
        stacked = _stack_frames_as_channels(checkpoint.weights[weight].float(), frames)
        checkpoint.weights[weight] = stacked if i else torch.stack(stacked.chunk(frames, 1)).sum(0)
        checkpoint.weights[bias] = checkpoint.weights[bias].repeat(frames // 2)
    for name, tensor in checkpoint.weights.items():
        if tensor.ndim == 5:
            checkpoint.weights[name] = tensor[:, :, -1]
        elif tensor.ndim == 2 and name != CODEBOOK:  # attention in transformers has linear layers, here convolutions
            checkpoint.weights[name] = tensor[:, :, None, None]
    return _load_unnormalized_vq(checkpoint, partial(Emu3VQ, num_doublings))


def _load_unnormalized_vq(checkpoint: Checkpoint, make_vq: Callable[[VQTokenizerConfig], LlamaGenVQ]) -> LlamaGenVQ:
    return load_vq_tokenizer(checkpoint, make_vq, normalize_for_decoder=False, normalize_for_encoder=False)


def _stack_frames_as_channels(weight: Tensor, frames: int) -> Tensor:
    """Convert a 3D convolution that halves the number of frames to a 2D convolution with frames as channels.

    The kernel `[out, in, taps, 3, 3]` becomes `[frames / 2 * out, frames * in, 3, 3]`.
    """
    padded = F.pad(weight, (0, 0, 0, 0, frames, frames))  # zeros for the frames that an output frame does not read
    taps = [[frames + _PADDING + i - 2 * j for i in range(frames)] for j in range(frames // 2)]
    return torch.cat([torch.cat([padded[:, :, tap] for tap in row], 1) for row in taps])
