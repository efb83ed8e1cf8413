"""Training checkpoints, written completely or not at all, and read without running pickled code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lantern_rt.errors import CheckpointError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a partial file and rename it to `path`, so that an interrupted write keeps the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, which may contain tensors and plain values only.

    Raises:
        CheckpointError: the file does not exist.
    """
    if not path.is_file():
        raise CheckpointError(
            "is not there", field=str(path), remedy="train it, or make the work folder with `restore`"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
