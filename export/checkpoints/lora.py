"""LoRA adapters of PEFT, merged into a checkpoint's weights: `W + scale * alpha / rank * B A`.

Only what adds to a linear layer is merged: an adapter that changes more, or a weight that is not there, is refused by
name. Queries, keys and values that a checkpoint fuses (`wqkv`) take the adapter of the fused layer and no other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...inputs import format_value
from .deferred import computed, deferred
from .files import Weights, listing, read_config, read_weights, refusal, refusing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Of a linear layer. PEFT calls those of embeddings otherwise, and ignores this name there.
_NAME = re.compile(r"base_model\.model\.((?:.+\.)?(?![^.]*embed)[^.]+)\.lora_([AB])\.weight")
_OUTER = re.compile(r"(?:(?:model|text_model|language_model|module|_orig_mod)\.)*")  # as libraries nest it differently
_REMEDY = "merge it with PEFT, and export the result"
# Fields that tell where an adapter comes from, where it applies and how it was trained, or that are read below.
_FREE = {"auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"}
_FREE |= {"layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "rank_pattern", "revision"}
_FREE |= {"target_modules", "task_type", "use_rslora"}
# Values of other fields with which PEFT merges as is done here. Fields of no name here are off, or refused.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", None),  # others change the model, too
    "megatron_core": ("megatron.core", None),
    "qalora_group_size": (16, None),
}


@dataclass(frozen=True)
class Adapter:
    """What a folder adds to weights.

    Args:
        path: its file of weights.
        sources: its files with roles, that of the weights with the scale: `lora:0.8`.
        parts: by the names of weights: A `[rank, inputs]`, B `[outputs, rank]`, and the factor of their product.
    """

    path: Path
    sources: Sequence[tuple[str, Path]]
    parts: Mapping[str, tuple[Tensor, Tensor, float]]

    def merge(self, weights: Weights, keep: Callable[[str], bool]) -> None:
        """Replace weights by what they become, computed when used, in their own type.

        keep: whether the reader wants a weight of this name; what is added to others is left out.
        Raises: CheckpointError: a weight is not there, has another shape, or would be infinite, or none is wanted.
        """
        places = {_inner(name): name for name in weights}
        merged = set[str]()
        for name, (first, second, factor) in self.parts.items():
            place = places.get(_inner(name))
            if place is None and not keep(name):
                continue
            if place is None:
                layer = re.search(r"layers\.\d+\.", name)
                near = [one for one in weights if layer is None or layer[0] in one]
                raise refusal(self.path, name, "the target has no such weight", expected=f"one of {listing(near)}")
            weight, shape = weights[place], [len(second), first.shape[1]]
            if list(weight.shape) != shape:
                raise refusal(self.path, name, found=f"shape {shape}", expected=f"{list(weight.shape)}, the target's")
            if place in merged:
                raise refusal(self.path, name, "is in the file twice, under two names", remedy=_REMEDY)
            merged.add(place)
            # No number of their product is larger; in float32, as the sum.
            bound = float(abs(factor) * first.float().norm(dim=0).max() * second.float().norm(dim=1).max())
            if not bound < torch.finfo(weight.dtype).max:
                problem = f"adds numbers up to {bound:.1e}, which makes infinite weights"
                raise refusal(self.path, name, problem, remedy="give a smaller scale, or correct lora_alpha")
            weights[place] = deferred(partial(_sum, weight, first, second, factor), shape, weight.dtype)
        if not merged:
            raise refusal(self.path, problem="adapts no layer that generates images", remedy="leave it out")


def split_scale(text: str) -> tuple[str, float]:
    """Place and scale of `FOLDER[:scale]`. Raises: CheckpointError."""
    place, _, number = text.rpartition(":")
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0
    if not place or not math.isfinite(scale):
        raise CheckpointError(
            field="lora", found=format_value(text), expected="FOLDER or FOLDER:scale, such as style/:0.8"
        )
    return place, scale


@refusing
def read_adapter(folder: Path, scale: float) -> Adapter:
    """The adapter in a folder of PEFT. Raises: CheckpointError: it is none, or does more than add to linear layers."""
    config, path = read_config(folder / CONFIG), folder / WEIGHTS
    for name, allowed in _PLAIN.items():
        config.expect(name, *allowed, remedy=_REMEDY)
    for name, value in config.values.items():
        if name not in _FREE and name not in _PLAIN and value not in (None, False, [], {}):
            raise config.error(name, expected="PEFT's default", remedy=_REMEDY)
    if not path.is_file():
        raise refusal(path, problem="no such file", remedy="load the adapter with PEFT and save it again: it writes it")
    alpha = config.number("lora_alpha", 8.0)
    ranks = [config.whole("r") or 8]
    if config.get("rank_pattern"):
        ranks += config.section("rank_pattern").values.values()
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, weight in read_weights(path).items():
        match = _NAME.fullmatch(name)
        if match is None or weight.ndim != 2 or not weight.is_floating_point():
            raise refusal(path, name, expected="lora_A and lora_B of linear layers alone", remedy=_REMEDY)
        matrices.setdefault(f"{match[1]}.weight", {})[match[2]] = weight
    parts = {}
    for name, pair in matrices.items():
        if pair.keys() != {"A", "B"} or pair["B"].shape[1] != len(pair["A"]) or len(pair["A"]) not in ranks:
            found = " and ".join(f"lora_{one} {list(weight.shape)}" for one, weight in sorted(pair.items()))
            expected = f"lora_A [rank, inputs] and lora_B [outputs, rank], of ranks {format_value(ranks)}"
            raise refusal(path, name, found=found, expected=expected)
        rank = len(pair["A"])
        factor = scale * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        parts[name] = pair["A"], pair["B"], factor
    return Adapter(path, [(f"lora:{scale}", path), ("lora_config", config.path)], parts)


def _inner(name: str) -> str:
    return _OUTER.sub("", name, count=1)


def _sum(weight: Tensor, first: Tensor, second: Tensor, factor: float) -> Tensor:
    return (computed(weight).float() + factor * (second.float() @ first.float())).to(weight.dtype)
