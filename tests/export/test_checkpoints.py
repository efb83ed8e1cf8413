"""Tests that read checkpoints of LlamaGen and of drafters from every layout of files."""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import (
    ANOLE,
    C2I,
    DRAFTER,
    LANTERN,
    T2I,
    config_path,
    copy_as_shards,
    copy_checkpoint,
    copy_json,
    copy_weights,
)
from family_readers import read_llamagen_transformer
from goldens import load_golden
from refusals import catch_error
from safetensors.torch import load_file, save_file
from torch import nn

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import Config, read_tokenizer, read_weights
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.checkpoints.hub import fetch_checkpoint
from lantern_rt.export.families.common_llamagen import LlamaGenTransformer, LlamaGenVariant, PublishedModelSize
from lantern_rt.export.graph.conditions import CaptionCondition, ClassCondition
from lantern_rt.export.models.decoder import Decoder
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.llama import read_rope_base

ENDINGS = ("safetensors", "bin")  # file name extensions of weights


def have_same_weights(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def assert_same_transformer(first: LlamaGenTransformer, second: LlamaGenTransformer) -> None:
    assert first.decoder.config == second.decoder.config
    assert torch.equal(first.code_embeddings, second.code_embeddings)
    assert have_same_weights(first.decoder, second.decoder)
    assert have_same_weights(first.condition, second.condition)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return read_llamagen_transformer(T2I, config=config_path(T2I)).decoder


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None])
def test_a_state_dict_is_read_alone_or_in_a_training_checkpoint(tmp_path: Path, wrapper: str | None) -> None:
    weights = {"a.weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3)}
    training_state = {"epoch": 3, "args": argparse.Namespace(lr=1.0)}
    torch.save({wrapper: weights, **training_state} if wrapper else weights, tmp_path / "a.bin")
    result = read_weights(tmp_path / "a.bin")
    assert list(result) == list(weights)
    assert torch.equal(result["a.weight"], weights["a.weight"])


@pytest.mark.parametrize(
    ("prefer_ema", "expected", "warnings"),
    [(None, 1, ["has model and ema; using model, --weights ema selects the other"]), (False, 1, []), (True, 2, [])],
)
def test_the_chosen_weights_of_model_and_ema_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefer_ema: bool | None, expected: int, warnings: list[str]
) -> None:
    torch.save({kind: {"a": torch.full((2,), n)} for kind, n in (("ema", 2.0), ("model", 1.0))}, tmp_path / "a.pt")
    assert read_weights(tmp_path / "a.pt", prefer_ema=prefer_ema)["a"].tolist() == [expected] * 2
    assert [text in message for text, message in zip(warnings, caplog.messages, strict=True)] == [True] * len(warnings)


def test_a_missing_ema_average_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"ema": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "b.pt")
    assert [read_weights(path)["a"].tolist() for path in sorted(tmp_path.iterdir())] == [[1, 1]] * 2
    assert caplog.messages == []
    read_weights(tmp_path / "b.pt", prefer_ema=True)
    assert caplog.messages == [f"{tmp_path / 'b.pt'}: has no ema; using its only weights"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_have_the_dtype_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {"a": torch.ones(2, dtype=dtype)}
    torch.save(weights, tmp_path / "a.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "a.safetensors")
    assert all(read_weights(path)["a"].dtype is dtype for path in tmp_path.iterdir())


def test_reading_progress_counts_megabytes_of_all_files(tmp_path: Path) -> None:
    for i in range(3):
        torch.save({str(i): torch.zeros(500_000)}, tmp_path / f"{i}.pt")
    reports: list[tuple[str, int, int]] = []
    Checkpoint(tmp_path, progress=lambda *report: reports.append(report)).read_weights()
    amounts = [done for _, done, _ in reports]
    assert {(stage, total) for stage, _, total in reports} == {(f"reading {tmp_path.name} (MB)", 7)}
    assert amounts == sorted(amounts)
    assert {0, 3, 5, 7} <= set(amounts)


def test_rotary_frequencies_that_old_versions_saved_are_not_read(tmp_path: Path) -> None:
    def add_frequencies(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    copy = copy_checkpoint(ANOLE, tmp_path / "anole", add_frequencies)
    for folder in (copy, copy_as_shards(copy, tmp_path / "shards")):
        checkpoint = Checkpoint(folder)
        checkpoint.read_weights()
        assert checkpoint.weights.keys() == load_file(ANOLE / "model.safetensors").keys()


PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500.0},
        {"rope_theta": 500, "rope_scaling": None},
        {"rope_parameters": PLAIN, "rope_theta": 700.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 700.0},
        {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_parameters": PLAIN, "rope_scaling": {"type": "default"}},
        {"rope_scaling": LINEAR},
        {"rope_parameters": LINEAR},
        {"rope_parameters": PLAIN, "rope_scaling": LINEAR},
        {"rope_parameters": LINEAR, "rope_scaling": PLAIN},
    ],
    ids=str,
)
def test_rotary_settings_are_those_of_transformers_or_rejected(fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.LlamaConfig.from_dict(copy.deepcopy(fields)).rope_parameters
    config = Config(Path("config.json"), fields)
    if expected["rope_type"] == "default":
        assert read_rope_base(config) == expected["rope_theta"]
    else:
        assert catch_error(CheckpointError, read_rope_base, config).expected == "plain positions (default)"


# ---------------------------------------------------------------- LlamaGen


def test_sizes_of_the_decoder_are_read_from_the_weights(target: Decoder) -> None:
    result = read_llamagen_transformer(C2I, config=config_path(C2I))
    sizes = result.decoder.config
    assert (sizes.hidden_size, sizes.num_layers, sizes.intermediate_size, sizes.vocab_size) == (64, 3, 256, 128)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.grid, sizes.prefix) == (4, 4, 4, 1)
    assert isinstance(result.condition, ClassCondition)
    assert result.condition.table.shape == (11, 64)
    condition = read_llamagen_transformer(T2I, config=config_path(T2I)).condition
    assert (target.config.grid, target.config.prefix) == (6, 8)
    assert isinstance(condition, CaptionCondition)
    np.testing.assert_array_equal(condition.uncond, load_golden("llamagen-t2i")["uncond_embedding"])


def test_the_grid_comes_from_weights_configuration_or_argument(tmp_path: Path) -> None:
    config_without_block_size = copy_json(config_path(C2I), tmp_path / "config.json", block_size=None)
    # 1 position of the prefix and 5 x 5 of the codes
    target_with_positions = copy_weights(tmp_path, C2I, lambda w: w.update(freqs_cis=torch.zeros(1 + 25, 8, 2)))
    assert read_llamagen_transformer(C2I, config=config_path(C2I), grid=4).decoder.config.grid == 4
    assert read_llamagen_transformer(target_with_positions, config=config_without_block_size).decoder.config.grid == 5
    assert read_llamagen_transformer(C2I, config=config_without_block_size, grid=7).decoder.config.grid == 7


def test_published_models_need_no_options_for_heads_and_grid(tmp_path: Path) -> None:
    config_without_block_size = copy_json(config_path(C2I), tmp_path / "config.json", block_size=None, n_head=None)
    variant = LlamaGenVariant(published_sizes=(PublishedModelSize(3, 64, 8, (24,)),))  # layers, width, heads, grids
    sizes = read_llamagen_transformer(C2I, config=config_without_block_size, variant=variant).decoder.config
    assert (sizes.num_heads, sizes.grid) == (8, 24)


def test_every_layout_of_files_gives_the_same_transformer(tmp_path: Path) -> None:
    expected = read_llamagen_transformer(LANTERN / "t2i")
    (tmp_path / "bin").mkdir()
    shutil.copy(LANTERN / "t2i/config.json", tmp_path / "bin")
    torch.save(load_file(LANTERN / "t2i/model.safetensors"), tmp_path / "bin/pytorch_model.bin")
    for checkpoint in (
        tmp_path / "bin",
        LANTERN / "t2i/model.safetensors",
        copy_checkpoint(LANTERN / "t2i", tmp_path / "stage two", input_type="t2i2"),
    ):
        assert_same_transformer(read_llamagen_transformer(checkpoint), expected)
    assert_same_transformer(read_llamagen_transformer(T2I, config=config_path(T2I)), expected)


@pytest.mark.parametrize("model", ["c2i", "t2i"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_indexed_shards_give_the_transformer_of_a_single_file(tmp_path: Path, model: str, ending: str) -> None:
    result = read_llamagen_transformer(copy_as_shards(LANTERN / model, tmp_path / "shards", ending))
    assert_same_transformer(result, read_llamagen_transformer(LANTERN / model))
    assert [role for role, _ in result.decoder.checkpoint.sources] == ["target_config", "target_index", *["target"] * 3]


def test_hidden_files_of_macos_are_not_read_as_weights(tmp_path: Path) -> None:
    shutil.copy(C2I, tmp_path)
    (tmp_path / f"._{C2I.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X        ")
    assert read_llamagen_transformer(tmp_path, config=config_path(C2I)).decoder.checkpoint.sources[0] == (
        "target",
        tmp_path / C2I.name,
    )


def test_a_matching_configuration_beside_a_file_is_read(tmp_path: Path) -> None:
    sources = read_llamagen_transformer(C2I).decoder.checkpoint.sources
    assert sources == [("target", C2I), ("target_config", config_path(C2I))]
    path = Path(shutil.copy(C2I, tmp_path))
    copy_json(config_path(C2I), tmp_path / "config.json", architectures=["T5EncoderModel"])
    assert "n_head" in catch_error(CheckpointError, read_llamagen_transformer, path).remedy


def test_both_configurations_are_sources(tmp_path: Path) -> None:
    folder = LANTERN / "c2i"
    other_config = Path(shutil.copy(folder / "config.json", tmp_path / "other.json"))
    sources = read_llamagen_transformer(folder, config=other_config).decoder.checkpoint.sources
    weights = ("target", folder / "model.safetensors")
    assert sources == [("target_config", folder / "config.json"), weights, ("config", other_config)]


@pytest.mark.parametrize("names", [["a.pt", "b.pt"], ["consolidated.00-of-02.pth", "consolidated.01-of-02.pth"]])
def test_shards_without_an_index_give_the_same_transformer(tmp_path: Path, names: list[str]) -> None:
    weights = torch.load(C2I, weights_only=True)["model"]
    for i, name in enumerate(names):
        torch.save({key: weights[key] for key in sorted(weights)[i::2]}, tmp_path / name)
    torch.save({"state": {}}, tmp_path / "optimizer.00000-of-00001.pth")
    config = config_path(C2I)
    assert_same_transformer(
        read_llamagen_transformer(tmp_path, config=config), read_llamagen_transformer(C2I, config=config)
    )


# ---------------------------------------------------------------- drafters


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_layout_of_files_gives_the_same_drafter(tmp_path: Path, target: Decoder, ending: str) -> None:
    drafter = read_drafter(DRAFTER, target)
    for folder in (
        copy_checkpoint(DRAFTER, tmp_path / "safetensors", lambda weights: None),
        copy_as_shards(DRAFTER, tmp_path / "shards", ending),
    ):
        copy = read_drafter(folder, target)
        assert copy.drafter.config == drafter.drafter.config
        assert have_same_weights(drafter.drafter, copy.drafter)
    assert [role for role, _ in copy.drafter.checkpoint.sources] == [
        "drafter_config",
        "drafter_index",
        *["drafter"] * 3,
    ]
    assert (drafter.drafter.config.prefix, drafter.drafter.config.input_norm) == (7, False)


def test_a_drafter_without_bias_and_with_an_input_norm_is_read(tmp_path: Path, target: Decoder) -> None:
    def change_weights(weights: dict[str, torch.Tensor]) -> None:
        del weights["fc.bias"]
        weights["layers.0.input_layernorm.weight"] = torch.ones(64)

    drafter = read_drafter(copy_checkpoint(DRAFTER, tmp_path, change_weights), target).drafter
    assert drafter.fc.bias is None
    assert drafter.config.input_norm


def test_a_signal_handlers_timeout_ends_reading(
    tmp_path: Path, interrupt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    monkeypatch.setattr("lantern_rt.export.checkpoints.files.load_file", interrupt)
    with pytest.raises(TimeoutError):
        read_weights(path)
    monkeypatch.setattr("lantern_rt.export.checkpoints.files.parse_tokenizer", interrupt)
    with pytest.raises(TimeoutError):
        read_tokenizer(path, 8)


def test_a_signal_handlers_timeout_ends_a_fetch(
    tmp_path: Path, interrupt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", interrupt)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "file"))
    with pytest.raises(TimeoutError):
        fetch_checkpoint("hf:owner/name/file")
