"""Paths of small checkpoints in their published layouts, and functions that copy a checkpoint with changes."""

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
PROLOGUE = DATA / "prologue/ar"
PROLOGUE_VQ = DATA / "prologue/tokenizer"
PROLOGUE_CONFIG = DATA / "prologue/config.json"
GEAR = DATA / "gear-t2i/gear-t2i-gpic-1b.pt"
QWEN3 = DATA / "gear-t2i/text_encoder"
GEAR_FILES: dict[str, Any] = {
    "vq": DATA / "gear-t2i/gear-vq.pt",
    "text_encoder": QWEN3,
    "config": DATA / "gear-t2i/config.json",
}
RAR = DATA / "rar/rar_tiny.bin"
MASKGIT_VQ = DATA / "rar/maskgit-vqgan-imagenet-f16-256.bin"
Weights = dict[str, torch.Tensor]
Edit = Callable[[Any], object]  # function that changes weights or a configuration in place


def config_path(target: Path) -> Path:
    return target.with_name("config.json")


def copy_json(path: Path, output_path: Path, **changes: Any) -> Path:
    """Copy a JSON object and change fields; the value None removes a field. Return the path of the copy."""
    fields = json.loads(path.read_text()) | changes
    output_path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return output_path


def copy_weights(folder: Path, source: Path, change_weights: Edit) -> Path:
    """Copy a checkpoint file in LlamaGen's official layout and change the weights; return the path of the copy."""
    weights: Weights = torch.load(source, weights_only=True)["model"]
    change_weights(weights)
    output_path = folder / source.name
    torch.save({"model": weights}, output_path)
    return output_path


def copy_gear(folder: Path, change_weights: Edit = lambda weights: None, **arguments: Any) -> Path:
    """Copy GEAR-T2I's file with changed weights and training arguments; the value None removes an argument."""
    content = torch.load(GEAR, weights_only=True)
    change_weights(content["ema"])
    fields = content["args"] | arguments
    content["args"] = {name: value for name, value in fields.items() if value is not None}
    torch.save(content, folder / GEAR.name)
    return folder / GEAR.name


def copy_checkpoint(
    source: Path, output_path: Path, weights: Edit | None = None, config: Edit | None = None, **fields: Any
) -> Path:
    """Copy the folder of a checkpoint with changes; a field of `config.json` with the value None is removed."""
    shutil.copytree(source, output_path, dirs_exist_ok=True)
    if weights is not None:
        old_file = output_path / "pytorch_model.bin"
        new_file = output_path / "model.safetensors"
        tensors = torch.load(old_file, weights_only=True) if old_file.is_file() else load_file(new_file)
        old_file.unlink(missing_ok=True)
        weights(tensors)
        save_file(tensors, new_file)
    if config is not None:
        config_fields = json.loads((output_path / "config.json").read_text())
        config(config_fields)
        (output_path / "config.json").write_text(json.dumps(config_fields))
    copy_json(output_path / "config.json", output_path / "config.json", **fields)
    return output_path


def copy_as_shards(source: Path, output_path: Path, ending: str = "safetensors", shards: int = 3) -> Path:
    """Copy a checkpoint and split its weights into several files with an index; return the folder of the copy."""
    shutil.copytree(source, output_path)
    old_file = output_path / "pytorch_model.bin"
    weights = (
        torch.load(old_file, weights_only=True) if old_file.is_file() else load_file(output_path / "model.safetensors")
    )
    for name in ("pytorch_model.bin", "model.safetensors"):
        (output_path / name).unlink(missing_ok=True)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    weight_map = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05}-of-{shards:05}.{ending}"
        shard = {key: weights[key] for key in sorted(weights)[i::shards]}
        save_file(shard, output_path / name) if ending == "safetensors" else torch.save(shard, output_path / name)
        weight_map |= dict.fromkeys(shard, name)
    (output_path / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return output_path


def copy_published_emu3(folder: Path) -> tuple[Path, Path]:
    """Write the small Emu3 in the layout that BAAI published; return the folders of decoder and image tokenizer."""
    target = folder / "Emu3-Gen"
    vq = folder / "Emu3-VisionTokenizer"
    weights = load_file(EMU3 / "model.safetensors")
    weights_by_folder: dict[Path, dict[str, torch.Tensor]] = {target: {}, vq: {}}
    for name, shape, converted_name, _ in json.loads((EMU3_ORIGINAL / "weight_names.json").read_text()):
        output_folder = target if converted_name.startswith("text_model.") else vq
        weights_by_folder[output_folder][name] = weights.pop(converted_name).reshape(shape)
    assert not weights
    for output_folder, folder_weights in weights_by_folder.items():
        output_folder.mkdir()
        save_file(folder_weights, output_folder / "model.safetensors")
    shutil.copyfile(EMU3_ORIGINAL / "llm_config.json", target / "config.json")
    shutil.copyfile(EMU3_ORIGINAL / "vq_config.json", vq / "config.json")
    for name in ("emu3.tiktoken", "emu3_vision_tokens.txt"):
        shutil.copyfile(EMU3_ORIGINAL / name, target / name)
    return target, vq
