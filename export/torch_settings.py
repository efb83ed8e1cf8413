"""Settings of PyTorch that hold for the whole process, and which the calling program may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

# mypy does not see these attributes.
_PRECISION_SETTINGS = [getattr(torch.backends.mkldnn, operation) for operation in ("matmul", "conv")]


@contextmanager
def default_torch_settings(flush_denormal: bool = False) -> Iterator[None]:
    """Set PyTorch as in a new process, because results depend on it, and restore the settings at the end."""
    dtype = torch.get_default_dtype()
    precisions = [setting.fp32_precision for setting in _PRECISION_SETTINGS]
    flushed = (torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1).item() == 0.0  # there is no getter
    # The context of a device slows every operation down, so it is left out where the device is right already.
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    try:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(flush_denormal)
        for setting in _PRECISION_SETTINGS:
            setting.fp32_precision = "ieee"
        with device, torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_flush_denormal(flushed)
        for setting, precision in zip(_PRECISION_SETTINGS, precisions, strict=True):
            setting.fp32_precision = precision
