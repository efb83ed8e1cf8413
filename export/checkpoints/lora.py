"""LoRA adapters of PEFT, merged into a checkpoint's weights.

The merged weight is `W + scale * alpha / rank * B A`, with the adapter's matrices A and B. Only adapters of linear
layers are merged. An adapter with other changes, or for weights that the checkpoint does not have, raises an error.
Fused projections (`wqkv`) accept only adapters of the fused layer.
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
from .deferred import compute_deferred_tensor, defer_tensor
from .files import Weights, format_names, make_file_error, read_config, read_weights, wrap_reader_errors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Adapter of a linear layer, whose prefix `read_weights` removes. PEFT uses other names for embeddings and ignores this
# name there.
_NAME = re.compile(r"((?:.+\.)?(?![^.]*embed)[^.]+)\.lora_([AB])\.weight")
# Prefixes of names that are ignored, because libraries nest the model differently.
_OUTER = re.compile(r"(?:(?:model|text_model|language_model|module|_orig_mod)\.)*")
_REMEDY = "merge it with PEFT, and export the result"
# Fields with origin, layers and training of an adapter, which do not change merging, and fields that are read below.
_FREE = {"auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern"}
_FREE |= {"layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "rank_pattern", "revision"}
_FREE |= {"target_modules", "task_type", "use_rslora"}
# Values of other fields for which PEFT merges like this module. Fields that are not listed must be off.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (
        True,
        False,
        "gaussian",
        "eva",
        "orthogonal",
        "mica",
        None,
    ),  # other values change the base model
    "megatron_core": ("megatron.core", None),
    "qalora_group_size": (16, None),
}


@dataclass(frozen=True)
class LoraAdapter:
    """LoRA adapter with its scale."""

    path: Path
    # Roles and paths of the adapter's files. The role of the weights contains the scale, such as `lora:0.8`.
    sources: Sequence[tuple[str, Path]]
    # Matrix A `[rank, inputs]`, matrix B `[outputs, rank]` and the factor of the product B A, by name of the weight to
    # which the product is added.
    low_rank_updates: Mapping[str, tuple[Tensor, Tensor, float]]

    def merge(self, weights: Weights, name_filter: Callable[[str], bool]) -> None:
        """Replace each adapted weight by a deferred tensor: the sum of the weight and the adapter's product.

        Adapters of weights that the reader does not need, by `name_filter`, are ignored.
        """
        base_names = {_strip_model_prefix(name): name for name in weights}
        merged = set[str]()
        for name, (lora_a, lora_b, factor) in self.low_rank_updates.items():
            base_name = base_names.get(_strip_model_prefix(name))
            if base_name is None and not name_filter(name):
                continue
            if base_name is None:
                layer = re.search(r"layers\.\d+\.", name)
                candidates = [key for key in weights if layer is None or layer[0] in key]
                expected = f"one of {format_names(candidates)}"
                raise make_file_error(self.path, name, "the target has no such weight", expected=expected)
            weight = weights[base_name]
            shape = [len(lora_b), lora_a.shape[1]]
            if list(weight.shape) != shape:
                raise make_file_error(
                    self.path, name, found=f"shape {shape}", expected=f"{list(weight.shape)}, the target's"
                )
            if base_name in merged:
                raise make_file_error(self.path, name, "is in the file twice, under two names", remedy=_REMEDY)
            merged.add(base_name)
            # Upper bound of the product's values, in float32 like the sum.
            bound = float(abs(factor) * lora_a.float().norm(dim=0).max() * lora_b.float().norm(dim=1).max())
            if not bound < torch.finfo(weight.dtype).max:
                problem = f"adds numbers up to {bound:.1e}, which makes infinite weights"
                raise make_file_error(self.path, name, problem, remedy="give a smaller scale, or correct lora_alpha")
            weights[base_name] = defer_tensor(
                partial(_add_low_rank_product, weight, lora_a, lora_b, factor), shape, weight.dtype
            )
        if not merged:
            raise make_file_error(
                self.path, problem="adapts no layer that generates images", remedy="leave the adapter out"
            )


def split_folder_and_scale(text: str) -> tuple[str, float]:
    """Split `FOLDER` or `FOLDER:scale`; the default scale is 1. Raises: CheckpointError."""
    folder, _, number = text.rpartition(":")
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0
    if not folder or not math.isfinite(scale):
        raise CheckpointError(
            field="lora", found=format_value(text), expected="FOLDER or FOLDER:scale, such as style/:0.8"
        )
    return folder, scale


@wrap_reader_errors
def read_adapter(folder: Path, scale: float) -> LoraAdapter:
    """Read the adapter in a folder that PEFT saved, whose product is multiplied by `scale`."""
    config = read_config(folder / CONFIG)
    path = folder / WEIGHTS
    for name, allowed in _PLAIN.items():
        config.check_value(name, *allowed, remedy=_REMEDY)
    for name, value in config.values.items():
        if name not in _FREE and name not in _PLAIN and value not in (None, False, [], {}):
            raise config.make_error(name, expected="PEFT's default", remedy=_REMEDY)
    if not path.is_file():
        raise make_file_error(path, problem="no such file", remedy="load the adapter with PEFT and save it again")
    alpha = config.get_number("lora_alpha", 8.0)
    ranks = [config.get_integer("r") or 8]
    if config.get("rank_pattern"):
        ranks += config.get_section("rank_pattern").values.values()
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, weight in read_weights(path).items():
        match = _NAME.fullmatch(name)
        if match is None or weight.ndim != 2 or not weight.is_floating_point():
            raise make_file_error(path, name, expected="lora_A and lora_B of linear layers alone", remedy=_REMEDY)
        matrices.setdefault(f"{match[1]}.weight", {})[match[2]] = weight
    low_rank_updates = {}
    for name, pair in matrices.items():
        if pair.keys() != {"A", "B"} or pair["B"].shape[1] != len(pair["A"]) or len(pair["A"]) not in ranks:
            shapes = " and ".join(f"lora_{letter} {list(weight.shape)}" for letter, weight in sorted(pair.items()))
            expected = f"lora_A [rank, inputs] and lora_B [outputs, rank], of ranks {format_value(ranks)}"
            raise make_file_error(path, name, found=shapes, expected=expected)
        rank = len(pair["A"])
        factor = scale * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        low_rank_updates[name] = pair["A"], pair["B"], factor
    return LoraAdapter(path, [(f"lora:{scale}", path), ("lora_config", config.path)], low_rank_updates)


def _strip_model_prefix(name: str) -> str:
    return _OUTER.sub("", name, count=1)


def _add_low_rank_product(weight: Tensor, lora_a: Tensor, lora_b: Tensor, factor: float) -> Tensor:
    return (compute_deferred_tensor(weight).float() + factor * (lora_b.float() @ lora_a.float())).to(weight.dtype)
