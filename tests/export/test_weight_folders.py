"""Folders of weights: one file, shards with an index, loose shards; what is missing or too much is listed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llamagen_golden import DATA
from refusals import refused
from safetensors.torch import load_file, save_file

from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import Weights, read_weights
from lantern_rt.export.checkpoints.folders import Checkpoint
from lantern_rt.export.families.llamagen import LlamaGen, read_transformer
from lantern_rt.export.models.eagle import read_drafter

LANTERN = DATA / "lantern-llamagen-hf"
DRAFTER = DATA / "lantern-drafter-llamagen"
C2I = DATA / "llamagen-c2i/c2i_tiny.pt"
Save = Callable[[Weights, Path], None]
FORMATS: dict[str, tuple[str, Save]] = {
    "safetensors": ("model", save_file),
    "bin": ("pytorch_model", lambda weights, path: torch.save(weights, path)),
}


def sharded(source: Path, goal: Path, ending: str = "safetensors", shards: int = 3) -> Path:
    """A copy of a folder whose weights lie in several files with an index."""
    goal.mkdir()
    shutil.copy(source / "config.json", goal)
    (only,) = read_checkpoint(source).files
    weights = read_weights(only)
    stem, save = FORMATS[ending]
    weight_map = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05}-of-{shards:05}.{ending}"
        part = {key: weights[key] for key in sorted(weights)[i::shards]}
        save(part, goal / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (goal / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return goal


def assert_same(one: LlamaGen, two: LlamaGen) -> None:
    assert one.decoder.config == two.decoder.config
    pairs = zip(one.decoder.state_dict().values(), two.decoder.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(one.code_embeddings, two.code_embeddings)
    pairs = zip(one.condition.state_dict().values(), two.condition.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def check_refused(path: Path, *words: str) -> None:
    with refused(CheckpointError, str(path), *words):
        read_transformer(path)


def edited(goal: Path, edit: Callable[[Weights], object], kind: str = "t2i", **config: Any) -> Path:
    """A copy of LANTERN's folder with other weights and fields; None removes a field."""
    goal.mkdir()
    weights = load_file(LANTERN / kind / "model.safetensors")
    edit(weights)
    save_file(weights, goal / "model.safetensors")
    fields = json.loads((LANTERN / kind / "config.json").read_text()) | config
    (goal / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return goal


@pytest.mark.parametrize("kind", ["c2i", "t2i"])
@pytest.mark.parametrize("ending", FORMATS)
def test_shards_with_an_index_read_as_the_single_file(tmp_path: Path, kind: str, ending: str) -> None:
    folder = sharded(LANTERN / kind, tmp_path / "shards", ending)
    found = read_transformer(folder)
    assert_same(found, read_transformer(LANTERN / kind))
    assert [role for role, _ in found.sources] == ["target_index", *["target"] * 3, "config"]


def test_the_single_pytorch_file_reads_as_the_safetensors_file(tmp_path: Path) -> None:
    shutil.copy(LANTERN / "t2i/config.json", tmp_path)
    torch.save(load_file(LANTERN / "t2i/model.safetensors"), tmp_path / "pytorch_model.bin")
    assert_same(read_transformer(tmp_path), read_transformer(LANTERN / "t2i"))


def test_the_file_itself_may_be_given_instead_of_its_folder() -> None:
    assert_same(read_transformer(LANTERN / "t2i/model.safetensors"), read_transformer(LANTERN / "t2i"))


def test_lanterns_layout_reads_as_the_official_file_of_the_same_weights() -> None:
    official = DATA / "llamagen-t2i/t2i_tiny.pt"
    assert_same(read_transformer(LANTERN / "t2i"), read_transformer(official, config=official.with_name("config.json")))


def test_stage_two_is_text_conditional_too(tmp_path: Path) -> None:
    folder = edited(tmp_path / "two", lambda w: None, input_type="t2i2")
    assert_same(read_transformer(folder), read_transformer(LANTERN / "t2i"))


@pytest.mark.parametrize("ending", FORMATS)
def test_a_drafter_in_shards_reads_as_the_single_file(tmp_path: Path, ending: str) -> None:
    target = read_transformer(LANTERN / "t2i").decoder
    folder = sharded(DRAFTER, tmp_path / "shards", ending)
    found, whole = read_drafter(folder, target), read_drafter(DRAFTER, target)
    assert found.drafter.config == whole.drafter.config
    pairs = zip(found.drafter.state_dict().values(), whole.drafter.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [role for role, _ in found.sources] == ["drafter_index", *["drafter"] * 3, "drafter_config"]


def test_missing_shards_of_a_drafter_are_listed(tmp_path: Path) -> None:
    folder = sharded(DRAFTER, tmp_path / "shards", "bin")
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with refused(CheckpointError, "pytorch_model.bin.index.json", "pytorch_model-00002-of-00003.bin; download"):
        read_drafter(folder, read_transformer(LANTERN / "t2i").decoder)


@pytest.mark.parametrize("names", [["a.pt", "b.pt"], ["consolidated.00-of-02.pth", "consolidated.01-of-02.pth"]])
def test_official_shards_without_an_index_are_joined(tmp_path: Path, names: list[str]) -> None:
    weights = torch.load(C2I, weights_only=True)["model"]
    for i, name in enumerate(names):
        torch.save({key: weights[key] for key in sorted(weights)[i::2]}, tmp_path / name)
    torch.save({"state": {}}, tmp_path / "optimizer.00000-of-00001.pth")
    config = C2I.with_name("config.json")
    assert_same(read_transformer(tmp_path, config=config), read_transformer(C2I, config=config))


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_file_consolidated_from_fsdp_is_bare_and_may_have_prefixed_names(tmp_path: Path, prefix: str) -> None:
    weights = torch.load(C2I, weights_only=True)["model"]
    torch.save({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "consolidated.pth")
    config = C2I.with_name("config.json")
    found = read_transformer(tmp_path / "consolidated.pth", config=config)
    assert_same(found, read_transformer(C2I, config=config))


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    folder = sharded(LANTERN / "t2i", tmp_path / "shards")
    for i in (1, 3):
        (folder / f"model-{i:05}-of-00003.safetensors").unlink()
    names = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    check_refused(folder, "model.safetensors.index.json", "missing", *names, "download them")


def test_a_shard_that_is_not_the_one_of_the_index_is_refused(tmp_path: Path) -> None:
    folder = sharded(LANTERN / "t2i", tmp_path / "shards")
    shard = folder / "model-00002-of-00003.safetensors"
    weights = load_file(shard)
    weights["extra"] = weights.pop("model.layers.1.self_attn.v_proj.weight")
    save_file(weights, shard)
    weight = "model.layers.1.self_attn.v_proj.weight"
    check_refused(folder, "model-00002-of-00003.safetensors", f"missing: {weight}; unexpected: extra", "download")


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/model.safetensors", "..", 3])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="expected the name of a file beside it"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_without_weights_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_checkpoint(tmp_path)


def test_a_weight_in_two_loose_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"weight x is in b\.pt and in a file before it"):
        read_checkpoint(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, "no weights", "model.safetensors")


def test_missing_and_unexpected_weights_are_listed_by_the_names_of_the_file(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["model.layers.1.extra"] = weights.pop("model.layers.1.mlp.up_proj.weight")
        del weights["lm_head.weight"]

    names = "lm_head.weight, model.layers.1.mlp.up_proj.weight"
    check_refused(edited(tmp_path / "bad", edit), f"missing: {names}; unexpected: model.layers.1.extra")


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    folder = edited(tmp_path / "bad", lambda w: w.pop("model.layers.2.self_attn.k_proj.weight"))
    check_refused(folder, "missing", "model.layers.2.self_attn.k_proj.weight")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, but the weights have 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but the weights have 3"),
        ({"intermediate_size": 1}, "intermediate_size is 1, but the weights have 256"),
        ({"cls_token_num": 120}, "cls_token_num is 120, but the weights have 8"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a number that divides the width 64"),
        ({"num_attention_heads": None}, "a --config with num_attention_heads"),
        ({"input_type": "c2i"}, "input_type is 'c2i', expected 't2i' or 't2i2'"),
        ({"input_type": "video"}, "input_type is 'video', expected 't2i' or 't2i2'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a positive number"),
        ({"block_size": None}, "the weights do not tell the grid of codes; give --grid 16 (256 pixels)"),
        ({"block_size": 35}, "block_size tells of 35 codes, which is no square grid; correct it"),
    ],
)
def test_a_configuration_that_contradicts_the_weights_is_refused_by_the_names_of_the_file(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    check_refused(edited(tmp_path / "bad", lambda w: None, **config), words)


def test_lanterns_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    shutil.copy(LANTERN / "t2i/model.safetensors", tmp_path)
    check_refused(tmp_path, "no config.json", "give its folder")
