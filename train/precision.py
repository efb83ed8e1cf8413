"""What training computes in."""

from __future__ import annotations

import torch


def fast_in_bfloat16(device: str | torch.device) -> bool:
    """Whether products in bfloat16 are much faster: on CUDA devices, and on processors with instructions for it."""
    kind = torch.device(device).type
    if kind != "cpu":
        return kind == "cuda"
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def mixed_precision(device: str | torch.device) -> torch.autocast:
    """Products in bfloat16 where that is fast; else everything in float32."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=fast_in_bfloat16(device))
