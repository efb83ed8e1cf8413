"""Checkpoints of wrapped modules: prefixes of weight names from PyTorch wrappers are removed when a file is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import catch_error
from safetensors.torch import save_file
from torch import Tensor

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.checkpoints.folders import Checkpoint

Weights = dict[str, Tensor]
Wrapper = Callable[[Weights], Weights]  # returns the weights under the names that a wrapper module saves
WEIGHTS = {f"layers.{i}.{name}.weight": torch.full((2,), i + 1.0) for i in range(2) for name in ("key", "value")}


def add_prefix(prefix: str) -> Wrapper:
    return lambda weights: {prefix + name: weight for name, weight in weights.items()}


def add_inner_name(name_part: str) -> Wrapper:
    """Return a function that inserts `name_part` before the last two parts of names, like activation checkpointing."""

    def wrap(weights: Weights) -> Weights:
        parts = {name: name.split(".") for name in weights}
        return {".".join([*path[:-2], name_part, *path[-2:]]): weights[name] for name, path in parts.items()}

    return wrap


def add_average_names(weights: Weights) -> Weights:
    """Return the weights as `torch.optim.swa_utils.AveragedModel` saves them."""
    return {"n_averaged": torch.tensor(7), **add_prefix("module.")(weights)}


WRAPPERS: dict[str, Wrapper] = {
    "compiled": add_prefix("_orig_mod."),
    "data-parallel": add_prefix("module."),
    "DeepSpeed": add_prefix("_forward_module."),
    "FSDP": add_prefix("_fsdp_wrapped_module."),
    "checkpointed layers": add_inner_name("_checkpoint_wrapped_module"),
    "averaged": add_average_names,
    "compiled, data-parallel": add_prefix("module._orig_mod."),
    "data-parallel, compiled": add_prefix("_orig_mod.module."),
    "data-parallel twice": add_prefix("module.module."),
    "all of them": lambda weights: add_prefix("_forward_module.")(
        add_average_names(
            add_prefix("_fsdp_wrapped_module.")(add_inner_name("_checkpoint_wrapped_module._orig_mod")(weights))
        )
    ),
}


def assert_same(weights: Weights, expected: Weights) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_modules_weights_are_read_by_their_unwrapped_names(tmp_path: Path, wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](WEIGHTS)
    torch.save(wrapped, tmp_path / "a.pt")
    torch.save({"model": wrapped, "ema": WRAPPERS[wrapper]({"a.weight": torch.ones(2)})}, tmp_path / "b.pt")
    save_file(wrapped, tmp_path / "a.safetensors")
    for name in ("a.pt", "b.pt", "a.safetensors"):
        assert_same(read_weights(tmp_path / name), WEIGHTS)
    assert_same(read_weights(tmp_path / "b.pt", prefer_ema=True), {"a.weight": torch.ones(2)})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_shards_of_a_wrapped_module_are_read_by_their_index(tmp_path: Path, wrapper: str) -> None:
    weight_map = {}
    for shard in ("key", "value"):
        wrapped = WRAPPERS[wrapper]({name: weight for name, weight in WEIGHTS.items() if shard in name})
        save_file(wrapped, tmp_path / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(wrapped, f"model-{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.read_weights()
    assert_same(checkpoint.weights, WEIGHTS)


def test_two_weights_of_one_unwrapped_name_are_rejected(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2), "module.a.weight": torch.zeros(2)}, tmp_path / "a.pt")
    error = catch_error(CheckpointError, read_weights, tmp_path / "a.pt")
    assert error.field == f"{tmp_path / 'a.pt'}: module.a.weight"
    assert error.problem == "is a second a.weight"
