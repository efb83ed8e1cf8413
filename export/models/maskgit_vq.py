"""MaskGIT's VQ image tokenizer, as open-muse and TiTok publish it: convolutions without attention, on pixels 0 .. 1."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from ...engines.contracts import Progress
from ..checkpoints.files import wrap_reader_errors
from ..checkpoints.folders import Checkpoint
from ..progress import ignore_progress
from .llamagen_vq import HALF_LEVEL, ConvStack, LlamaGenVQ, VQTokenizerConfig, make_group_norm
from .vq_checkpoints import load_vqgan


class _Block(nn.Module):
    """Residual block. If it changes the width, it adds a projection of its output instead of its input."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.norm1 = make_group_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm2 = make_group_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        if in_channels != width:
            self.nin_shortcut = nn.Conv2d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        added: Tensor = y + (self.nin_shortcut(y) if hasattr(self, "nin_shortcut") else x)
        return added


class _Level(nn.Module):
    """Blocks of one resolution, which an encoder then halves and a decoder doubles, except after the last level."""

    def __init__(self, in_channels: int, width: int, num_blocks: int, is_encoder: bool, is_last: bool) -> None:
        super().__init__()
        self.res = nn.ModuleList(_Block(in_channels if i == 0 else width, width) for i in range(num_blocks))
        self.halves = is_encoder and not is_last
        if not (is_encoder or is_last):
            self.upsample_conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.res:
            x = block(x)
        if hasattr(self, "upsample_conv"):
            x = self.upsample_conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.avg_pool2d(x, 2) if self.halves else x


class _Network(ConvStack):
    def __init__(self, config: VQTokenizerConfig, resize: str) -> None:
        super().__init__(config, resize)
        self.is_encoder = resize == "downsample"
        widths = config.encoder_widths if self.is_encoder else config.decoder_widths
        inputs = (config.encoder_stem_width if self.is_encoder else widths[0], *widths)
        self.conv_blocks = nn.ModuleList(
            _Level(*channels, config.num_blocks, self.is_encoder, i == len(widths) - 1)
            for i, channels in enumerate(zip(inputs, widths, strict=False))
        )
        coarsest = widths[-1] if self.is_encoder else widths[0]
        self.mid = nn.ModuleList(_Block(coarsest, coarsest) for _ in range(config.num_blocks))
        if self.is_encoder:
            self.conv_in.bias = None
            self.conv_out = nn.Conv2d(coarsest, config.latent_width, 1)

    def forward(self, x: Tensor, *norm_inputs: Tensor) -> Tensor:
        return super().forward((x + 1) / 2 if self.is_encoder else x)


class MaskGITVQ(LlamaGenVQ):
    def __init__(self, config: VQTokenizerConfig) -> None:
        super().__init__(config)
        self.encoder, self.decoder = (_Network(config, resize) for resize in ("downsample", "upsample"))
        self.quant_conv = self.post_quant_conv = nn.Identity()


@wrap_reader_errors
def read_maskgit_vq(path: Path, progress: Progress = ignore_progress) -> LlamaGenVQ:
    """Read a file such as `maskgit-vqgan-imagenet-f16-256.bin`."""
    vq = load_vqgan(Checkpoint(path, "vq", progress), make_vq=MaskGITVQ)
    last = vq.decoder.conv_out  # its pixels become -1 .. 1, and truncated as in the published program
    assert last.bias is not None
    last.weight.data = last.weight.data * 2
    last.bias.data = last.bias.data * 2 - 1 - HALF_LEVEL
    return vq
