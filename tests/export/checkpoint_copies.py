"""The small checkpoints in the published layouts, and copies of them with something changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llamagen_golden import DATA
from safetensors.torch import save_file

C2I, T2I, VQ = (
    DATA / name for name in ("llamagen-c2i/c2i_tiny.pt", "llamagen-t2i/t2i_tiny.pt", "llamagen-vq/vq_tiny.pt")
)
DRAFTER = DATA / "lantern-drafter-llamagen"
Weights = dict[str, torch.Tensor]


def config_of(target: Path) -> Path:
    return target.with_name("config.json")


def changed(path: Path, goal: Path, **changes: Any) -> Path:
    """A copy of a JSON file with some fields changed; None removes one."""
    fields = json.loads(path.read_text()) | changes
    goal.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return goal


def edited(tmp_path: Path, source: Path, edit: Any) -> Path:
    weights: Weights = torch.load(source, weights_only=True)["model"]
    edit(weights)
    goal = tmp_path / source.name
    torch.save({"model": weights}, goal)
    return goal


def drafter_copy(folder: Path, edit: Any = None, **config: Any) -> Path:
    weights: Weights = torch.load(DRAFTER / "pytorch_model.bin", weights_only=True)
    if edit:
        edit(weights)
    save_file(weights, folder / "model.safetensors")
    changed(DRAFTER / "config.json", folder / "config.json", **config)
    return folder
