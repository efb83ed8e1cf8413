"""What training computes in."""

from __future__ import annotations

import torch


def mixed_precision(device: str | torch.device) -> torch.autocast:
    """Products in bfloat16 on a CUDA device; everything in float32 on any other."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")
