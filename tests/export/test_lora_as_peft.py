"""LoRA adapters saved by the installed PEFT: each configuration field is followed as in PEFT, or rejected by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.lora import read_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings inside PEFT

# Fields that change how an adapter is merged, with values that differ from PEFT's defaults.
FOLLOWED_FIELDS: dict[str, list[dict[str, Any]]] = {
    "r": [{"r": 3}],
    "lora_alpha": [{"lora_alpha": 5}, {"lora_alpha": 0.25}],
    "lora_dropout": [{"lora_dropout": 0.5}],
    "use_rslora": [{"use_rslora": True}, {"use_rslora": True, "rank_pattern": {"o_proj": 4}}],
    "rank_pattern": [{"rank_pattern": {"o_proj": 4}}, {"rank_pattern": {r"layers\.1\.o_proj": 4, "q_proj": 2}}],
    "target_modules": [{"target_modules": "all-linear"}, {"target_modules": r".*\.0\.q_proj"}],
    "exclude_modules": [{"exclude_modules": ["o_proj"]}],
    "layers_to_transform": [{"layers_to_transform": 1}],
    "layers_pattern": [{"layers_to_transform": [0], "layers_pattern": "layers"}],
    "init_lora_weights": [{"init_lora_weights": value} for value in (False, "gaussian", "orthogonal", "mica")],
}
# Fields that only describe an adapter, so that any value is accepted.
DESCRIPTIVE_FIELDS: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "Model", "parent_library": "library"},
    "base_model_name_or_path": "owner/model",
    "eva_config": {"rho": 2.0},
    "inference_mode": True,
    "peft_version": "99.0",
    "revision": "main",
    "task_type": "CAUSAL_LM",
}
UNSAVED_FIELD = "runtime_config"  # PEFT does not write this field


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(12, 16, bias=False)
        self.o_proj = nn.Linear(16, 12, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(8, 12)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(2))})
        self.lm_head = nn.Linear(12, 8, bias=False)


@pytest.fixture(scope="module")
def peft() -> Any:
    """Return the module `peft`, imported only for tests that use it, as the import takes seconds."""
    return pytest.importorskip("peft")


def save_adapter(peft: Any, folder: Path, **fields: Any) -> dict[str, Tensor]:
    """Save an adapter with random weights, and return the model's weights after PEFT merged the adapter."""
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "o_proj"]} | fields)
    model = peft.get_peft_model(Model(), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    merged: dict[str, Tensor] = model.merge_and_unload().state_dict()
    assert any((weight != merged[name]).any() for name, weight in Model().state_dict().items())
    return merged


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def merge_adapter(folder: Path) -> dict[str, Tensor]:
    weights = Model().state_dict()
    read_adapter(folder, 1.0).merge(weights, lambda name: True)
    return {name: compute_deferred_tensor(weight) for name, weight in weights.items()}


def find_merge_error(folder: Path) -> CheckpointError | None:
    """Return the error with which an adapter is rejected; None if the adapter is merged."""
    try:
        merge_adapter(folder)
    except CheckpointError as error:
        return error
    return None


def test_default_and_missing_fields_are_merged_as_in_peft(peft: Any, tmp_path: Path) -> None:
    expected = save_adapter(peft, tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} - saved.keys() == {UNSAVED_FIELD}
    torch.testing.assert_close(merge_adapter(tmp_path), expected, rtol=0, atol=1e-6)
    for name in saved.keys() - {"peft_type"}:  # files of older PEFT releases lack fields
        fewer_fields = {field: value for field, value in saved.items() if field != name}
        (tmp_path / "adapter_config.json").write_text(json.dumps(fewer_fields))
        torch.testing.assert_close(merge_adapter(tmp_path), expected, rtol=0, atol=1e-6)


def test_other_fields_are_merged_as_in_peft_or_rejected(peft: Any, tmp_path: Path) -> None:
    for i, values in enumerate(values for name in FOLLOWED_FIELDS for values in FOLLOWED_FIELDS[name]):
        expected = save_adapter(peft, tmp_path / str(i), **values)
        torch.testing.assert_close(merge_adapter(tmp_path / str(i)), expected, rtol=0, atol=1e-6, msg=str(values))
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    folder = tmp_path / "default"
    expected = save_adapter(peft, tmp_path / "default")
    default = json.loads((folder / "adapter_config.json").read_text())
    for name in sorted(names - FOLLOWED_FIELDS.keys()):
        for value in (
            [DESCRIPTIVE_FIELDS[name]] if name in DESCRIPTIVE_FIELDS else (True, 17, ["other"], {"other": 1}, "other")
        ):
            edit_config(folder, **{**default, name: value})
            if name in DESCRIPTIVE_FIELDS:
                torch.testing.assert_close(merge_adapter(folder), expected, rtol=0, atol=1e-6)
            else:
                error = find_merge_error(folder)
                assert error is not None, (name, value)
                assert error.field == f"{folder / 'adapter_config.json'}: {name}"
                assert error.remedy == "merge it with PEFT, and export the result"
        (folder / "adapter_config.json").write_text(json.dumps(default))


@pytest.mark.parametrize(
    "values",
    [
        {"alpha_pattern": {"o_proj": 3}},
        {"use_dora": True},
        {"lora_bias": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [1]}},
        {"target_modules": [], "target_parameters": ["lm_head.weight"]},
        {"target_modules": ["embed_tokens"]},
        {"bias": "all"},
    ],
    ids=str,
)
def test_adapters_with_unsupported_peft_options_are_rejected(peft: Any, tmp_path: Path, values: dict[str, Any]) -> None:
    model = peft.get_peft_model(Model(), peft.LoraConfig(**{"target_modules": ["q_proj"]} | values))
    model.save_pretrained(tmp_path)
    assert find_merge_error(tmp_path) is not None


def test_weights_of_another_rank_than_configured_are_rejected(peft: Any, tmp_path: Path) -> None:
    save_adapter(peft, tmp_path, r=3)
    edit_config(tmp_path, r=2, rank_pattern={"o_proj": 3})
    assert find_merge_error(tmp_path) is None
    edit_config(tmp_path, rank_pattern={})
    error = find_merge_error(tmp_path)
    assert error is not None
    assert error.expected.endswith("of ranks [2]")
