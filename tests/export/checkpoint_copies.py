"""The small checkpoints in the published layouts, and copies of them with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from goldens import DATA
from safetensors.torch import load_file, save_file

C2I, T2I, VQ = (
    DATA / name for name in ("llamagen-c2i/c2i_tiny.pt", "llamagen-t2i/t2i_tiny.pt", "llamagen-vq/vq_tiny.pt")
)
DRAFTER = DATA / "lantern-drafter-llamagen"
LANTERN = DATA / "lantern-llamagen-hf"
ANOLE = DATA / "anole/target"
ANOLE_DRAFTER = DATA / "anole/drafter"
VQGAN = DATA / "chameleon-vqgan"
LUMINA = DATA / "lumina-mgpt/model"
EMU3 = DATA / "emu3/model"
LUMINA2 = DATA / "lumina-mgpt-2/model"
MOVQGAN = DATA / "lumina-mgpt-2/movqgan/270M"
JANUS = DATA / "janus-deepseek/deepseek"
JANUS_CONVERTED = DATA / "janus-deepseek/transformers"
GLM_IMAGE = DATA / "glm-image"
EMU35 = DATA / "emu3.5/model"
EMU35_VQ = DATA / "emu3.5/vq"
EMU3_ORIGINAL = DATA / "emu3/original"
SIMPLEAR = DATA / "simplear/model"
COSMOS = DATA / "simplear/cosmos"
Weights = dict[str, torch.Tensor]
Edit = Callable[[Any], object]


def config_of(target: Path) -> Path:
    return target.with_name("config.json")


def changed(path: Path, goal: Path, **changes: Any) -> Path:
    """A copy of a JSON file with some fields changed; None removes one."""
    fields = json.loads(path.read_text()) | changes
    goal.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return goal


def edited(tmp_path: Path, source: Path, edit: Edit) -> Path:
    """A copy of an official file with other weights."""
    weights: Weights = torch.load(source, weights_only=True)["model"]
    edit(weights)
    goal = tmp_path / source.name
    torch.save({"model": weights}, goal)
    return goal


def copied(source: Path, goal: Path, weights: Edit | None = None, config: Edit | None = None, **fields: Any) -> Path:
    """A copy of a folder with other weights, and another configuration; a field of None is removed."""
    shutil.copytree(source, goal, dirs_exist_ok=True)
    if weights is not None:
        old = goal / "pytorch_model.bin"
        new = goal / "model.safetensors"
        tensors = torch.load(old, weights_only=True) if old.is_file() else load_file(new)
        old.unlink(missing_ok=True)
        weights(tensors)
        save_file(tensors, new)
    if config is not None:
        content = json.loads((goal / "config.json").read_text())
        config(content)
        (goal / "config.json").write_text(json.dumps(content))
    changed(goal / "config.json", goal / "config.json", **fields)
    return goal


def sharded(source: Path, goal: Path, ending: str = "safetensors", shards: int = 3) -> Path:
    """A copy of a folder whose weights lie in several files with an index."""
    shutil.copytree(source, goal)
    old = goal / "pytorch_model.bin"
    weights = torch.load(old, weights_only=True) if old.is_file() else load_file(goal / "model.safetensors")
    for name in ("pytorch_model.bin", "model.safetensors"):
        (goal / name).unlink(missing_ok=True)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05}-of-{shards:05}.{ending}"
        part = {key: weights[key] for key in sorted(weights)[i::shards]}
        save_file(part, goal / name) if ending == "safetensors" else torch.save(part, goal / name)
        weight_map |= dict.fromkeys(part, name)
    (goal / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return goal


def published(folder: Path) -> tuple[Path, Path]:
    """Emu3's checkpoint as published: the folders of Emu3-Gen and of Emu3-VisionTokenizer."""
    target = folder / "Emu3-Gen"
    vq = folder / "Emu3-VisionTokenizer"
    weights = load_file(EMU3 / "model.safetensors")
    parts: dict[Path, dict[str, torch.Tensor]] = {target: {}, vq: {}}
    for name, shape, theirs, _ in json.loads((EMU3_ORIGINAL / "weight_names.json").read_text()):
        place = target if theirs.startswith("text_model.") else vq
        parts[place][name] = weights.pop(theirs).reshape(shape)
    assert not weights
    for place, named in parts.items():
        place.mkdir()
        save_file(named, place / "model.safetensors")
    shutil.copyfile(EMU3_ORIGINAL / "llm_config.json", target / "config.json")
    shutil.copyfile(EMU3_ORIGINAL / "vq_config.json", vq / "config.json")
    for name in ("emu3.tiktoken", "emu3_vision_tokens.txt"):
        shutil.copyfile(EMU3_ORIGINAL / name, target / name)
    return target, vq
