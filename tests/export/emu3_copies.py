"""The small Emu3 checkpoint in its other layouts, and both rows of a run through an exported target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_copies import EMU3
from llamagen_golden import DATA, Arrays, Run, manifest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from lantern_rt.export.parity import Sessions

ORIGINAL = DATA / "emu3/original"


def published(folder: Path) -> tuple[Path, Path]:
    """The checkpoint as published: the folders of Emu3-Gen and of Emu3-VisionTokenizer."""
    target, vq = folder / "Emu3-Gen", folder / "Emu3-VisionTokenizer"
    weights = load_file(EMU3 / "model.safetensors")
    parts: dict[Path, dict[str, torch.Tensor]] = {target: {}, vq: {}}
    for name, shape, theirs, _ in json.loads((ORIGINAL / "weight_names.json").read_text()):
        place = target if theirs.startswith("text_model.") else vq
        parts[place][name] = weights.pop(theirs).reshape(shape)
    assert not weights
    for place, named in parts.items():
        place.mkdir()
        save_file(named, place / "model.safetensors")
    shutil.copyfile(ORIGINAL / "llm_config.json", target / "config.json")
    shutil.copyfile(ORIGINAL / "vq_config.json", vq / "config.json")
    for name in ("emu3.tiktoken", "emu3_vision_tokens.txt"):
        shutil.copyfile(ORIGINAL / name, target / name)
    return target, vq


def embed(bundle: Path, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
    tokens = np.array([ids], np.int64)
    return Sessions(bundle / "condition.onnx").run({"token_ids": tokens, "uncond_ids": tokens[:, :1]})["prefix_embeds"]


class Sides:
    """Both rows, each on a cache of its own, behind its prompt; uncond None: without guidance."""

    def __init__(self, bundle: Path, cond: Sequence[int], uncond: Sequence[int] | None) -> None:
        spec = manifest(bundle).target
        sizes = (spec.num_kv_heads, spec.head_dim, spec.num_layers)
        prompts = [cond] if uncond is None else [cond, uncond]
        self.bundle, self.runs = bundle, [Run(bundle / "target.onnx", *sizes, 1) for _ in prompts]
        self.outputs = [run.step(input_embeds=embed(bundle, ids)) for run, ids in zip(self.runs, prompts, strict=True)]

    def step(self, tokens: NDArray[np.int64], depth: NDArray[np.int64] | None = None, **visible: Any) -> list[Arrays]:
        """Feed tokens to both rows; depth: of the nodes of a tree."""
        embeds = embed(self.bundle, tokens)
        places = [None if depth is None else run.length + depth for run in self.runs]
        return [
            run.step(input_embeds=embeds, positions=at, **visible) for run, at in zip(self.runs, places, strict=True)
        ]
