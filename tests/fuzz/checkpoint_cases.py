"""Checkpoints in official layouts, damaged: their bytes, their fields, and tensors of every odd kind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mutations import CONTROL, VALUES, damage, damage_json, damage_safetensors
from torch import Tensor

from lantern_rt.export.families.llamagen import read_llamagen

DATA = Path(__file__).parents[1] / "data"
ODD: tuple[Callable[[Tensor], Any], ...] = (
    lambda one: one.to(torch.float8_e4m3fn),
    lambda one: one.to(torch.complex64),
    lambda one: one.to(torch.bool),
    lambda one: one.to(torch.int64),
    lambda one: one.to(torch.float64),
    lambda one: one.to_sparse(),
    lambda one: torch.quantize_per_tensor(one.float(), 0.1, 0, torch.qint8),
    lambda one: torch.nested.nested_tensor([one, one]),
    lambda one: one.to("meta"),
    lambda one: one.flatten()[:1].expand(2**20),
    lambda one: torch.empty(0),
    lambda one: one.flatten()[0],
    lambda one: one[None],
    lambda one: one.T if one.dim() == 2 else one.flip(0),
    lambda one: torch.full_like(one, float("nan")),
    lambda one: torch.full_like(one, 1e30),
    lambda one: torch.nn.Parameter(one),
    lambda one: one.numpy().tolist(),
    lambda one: None,
    lambda one: {"a": one},
)


def damaged_checkpoint(folder: Path, rng: random.Random) -> Callable[[], object]:
    """Writes a checkpoint into `folder`; gives the call that reads it, with all that belongs to it."""
    vq = DATA / "llamagen-vq/vq_tiny.pt"
    if rng.random() < 0.4:
        target = Path(shutil.copytree(DATA / "lantern-llamagen-hf/c2i", folder / "target"))
        hurt = rng.choice((target / "config.json", target / "model.safetensors"))
        if hurt.suffix == ".json":
            hurt.write_bytes(_damaged_json(hurt, rng))
        else:
            hurt.write_bytes(damage_safetensors(hurt.read_bytes(), rng))
        return partial(read_llamagen, target, vq)
    name = rng.choice(("llamagen-c2i/c2i_tiny.pt", "llamagen-t2i/t2i_tiny.pt"))
    target, config = folder / "target.pt", folder / "config.json"
    shutil.copy(DATA / name, target)
    shutil.copy((DATA / name).with_name("config.json"), config)
    drafter = Path(shutil.copytree(DATA / "lantern-drafter-llamagen", folder / "drafter")) if "t2i" in name else None
    own = [target, target, target, config, *([drafter / "config.json"] if drafter else ())]
    hurt = rng.choice([*own, *([drafter / "pytorch_model.bin"] if drafter else ())])
    if hurt.suffix == ".json":
        hurt.write_bytes(_damaged_json(hurt, rng))
    elif rng.random() < 0.3:
        hurt.write_bytes(damage(hurt.read_bytes(), rng))
    else:
        _damage_weights(hurt, rng)
    return partial(read_llamagen, target, vq, drafter=drafter, config=config)


def _damaged_json(path: Path, rng: random.Random) -> bytes:
    return damage_json(path.read_text(), rng)


def _damage_weights(path: Path, rng: random.Random) -> None:
    content = torch.load(path, weights_only=True)
    weights = content.get("model", content)
    name = rng.choice(sorted(weights))
    kind = rng.random()
    if kind < 0.7:
        weights[name] = rng.choice(ODD)(weights[name])
    elif kind < 0.8:
        weights[rng.choice((CONTROL, "x" * 100_000, 3, None, ("a",)))] = weights.pop(name)
    elif kind < 0.9:
        del weights[name]
    else:
        content = rng.choice((*VALUES, [weights], weights[name], torch.nn.Linear(2, 2)))
    torch.save(content, path)
