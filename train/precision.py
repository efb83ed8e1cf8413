"""What training computes in."""

from __future__ import annotations

import torch


def fast_in_bfloat16(device: str | torch.device) -> bool:
    """Whether products in bfloat16 are much faster: on CUDA devices, and on processors with matrix units for it."""
    kind = torch.device(device).type
    return kind == "cuda" or (kind == "cpu" and torch.cpu._is_amx_tile_supported())


def mixed_precision(device: str | torch.device) -> torch.autocast:
    """Products in bfloat16 where that is fast; else everything in float32."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=fast_in_bfloat16(device))
