"""Floating-point precision of training."""

from __future__ import annotations

import torch


def is_bfloat16_fast(device: str | torch.device) -> bool:
    """Return whether bfloat16 matmuls are much faster than float32: on CUDA, and on CPUs with bfloat16 instructions."""
    kind = torch.device(device).type
    if kind != "cpu":
        return kind == "cuda"
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def mixed_precision(device: str | torch.device) -> torch.autocast:
    """Return a context manager for matmuls in bfloat16 if they are fast on the device, otherwise in float32."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=is_bfloat16_fast(device))
