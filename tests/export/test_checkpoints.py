"""Bad checkpoints end with one clear line; good ones are read whole."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import C2I, DRAFTER, T2I, VQ, Weights, changed, config_of, drafter_copy, edited
from llamagen_golden import golden
from safetensors.torch import save_file

from lantern_rt.bundle.manifest import file_sha256
from lantern_rt.errors import CheckpointError
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.families.llamagen import read_transformer
from lantern_rt.export.graph.conditions import CaptionCondition, ClassCondition
from lantern_rt.export.models.decoder import Decoder
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.llamagen_vq import read_vq


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_state_dict_is_found_bare_and_wrapped(tmp_path: Path, wrapper: str | None, suffix: str) -> None:
    weights = {"a.weight": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3)}
    path = tmp_path / f"weights{suffix}"
    torch.save({wrapper: weights, "epoch": 3} if wrapper else weights, path)
    found = read_weights(path)
    assert list(found) == list(weights)
    assert torch.equal(found["a.weight"], weights["a.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_weights_keep_the_type_they_are_stored_in(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    weights = {"a": torch.ones(2, dtype=dtype)}
    if name.endswith(".pt"):
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    assert read_weights(tmp_path / name)["a"].dtype is dtype


def test_training_arguments_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1.0)}, tmp_path / "a.pt")
    assert list(read_weights(tmp_path / "a.pt")) == ["a"]


def test_the_old_file_format_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "a.pt")["a"].tolist() == [1, 1]


def bad_files(folder: Path) -> dict[str, Path]:
    whole = C2I.read_bytes()
    contents: dict[str, bytes] = {
        "short.pt": whole[: len(whole) // 2],
        "empty.pt": b"",
        "text.bin": b"<html>not found</html>",
        "short.safetensors": b"\x10\x00\x00\x00\x00\x00\x00\x00{",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    torch.save({"model": Payload()}, folder / "code.pt")
    torch.save([torch.ones(2)], folder / "list.pt")
    torch.save({"model": {"a": torch.ones(2), "b": "text"}}, folder / "text.pt")
    torch.save({"model": {}}, folder / "nothing.pt")
    torch.save({"good": torch.ones(3), "layers.7.bad": torch.tensor([1.0, float("nan")])}, folder / "nan.pt")
    save_file({"layers.7.bad": torch.tensor([float("inf")])}, folder / "inf.safetensors")
    return {name: folder / name for name in [*contents, *(p.name for p in folder.iterdir()), "absent.pt"]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short.pt", "cut short"),
        ("empty.pt", "cut short"),
        ("text.bin", "not a PyTorch checkpoint"),
        ("short.safetensors", "not a safetensors file"),
        ("code.pt", "calls code"),
        ("list.pt", "expected a state dict, found a list"),
        ("text.pt", "found a str under 'b'"),
        ("nothing.pt", "expected a state dict"),
        ("nan.pt", "layers.7.bad has NaN"),
        ("inf.safetensors", "layers.7.bad has NaN or infinite"),
        ("absent.pt", "no such file"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_weights(bad_files(tmp_path)[name])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_digest_is_that_of_the_file() -> None:
    assert file_sha256(C2I) == hashlib.sha256(C2I.read_bytes()).hexdigest()


def test_sizes_come_from_the_weights() -> None:
    found = read_transformer(C2I, config=config_of(C2I))
    sizes = found.decoder.config
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_heads, sizes.num_kv_heads, sizes.intermediate_size) == (
        64,
        3,
        4,
        4,
        256,
    )
    assert (sizes.vocab_size, sizes.grid, sizes.prefix) == (128, 4, 1)
    assert isinstance(found.condition, ClassCondition)
    assert found.condition.table.shape == (11, 64)
    found = read_transformer(T2I, config=config_of(T2I))
    assert (found.decoder.config.grid, found.decoder.config.prefix) == (6, 8)
    assert isinstance(found.condition, CaptionCondition)
    assert found.condition.uncond.shape == (8, 32)
    np.testing.assert_array_equal(found.condition.uncond, golden("llamagen-t2i")["uncond_embedding"])


def test_the_safetensors_copy_reads_the_same(tmp_path: Path) -> None:
    save_file(torch.load(C2I, weights_only=True)["model"], tmp_path / "model.safetensors")
    one, two = (read_transformer(p, config=config_of(C2I)).decoder for p in (C2I, tmp_path / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_a_name_that_contradicts_the_weights_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 3 layers of width 64, but GPT-B has 12 of 768"):
        read_transformer(C2I, model="GPT-B")
    with pytest.raises(CheckpointError, match="'GPT-9' is unknown; expected one of GPT-B"):
        read_transformer(C2I, model="GPT-9")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 128}, "dim is 128, but the weights have 64"),
        ({"num_classes": 1000}, "num_classes is 1000, but the weights have 10"),
        ({"model_type": "t2i"}, "model_type is 't2i'"),
        ({"n_head": 5}, "n_head is 5, expected a number that divides the width 64"),
        ({"n_head": "four"}, "n_head is 'four'"),
        ({"n_head": 32}, "n_head is 32, expected .* a multiple of 4"),
        ({"n_kv_head": 2}, "key heads do not explain"),
        ({"block_size": 17}, "no square grid; correct it"),
        ({"norm_eps": 0}, "norm_eps is 0"),
    ],
)
def test_a_configuration_that_contradicts_the_weights_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_transformer(C2I, config=changed(config_of(C2I), tmp_path / "config.json", **changes))


def test_missing_and_unexpected_weights_are_listed(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["layers.1.extra"] = weights.pop("layers.1.attention.wo.weight")
        weights["norm.weight"] = torch.ones(63)

    with pytest.raises(CheckpointError) as caught:
        read_transformer(edited(tmp_path, C2I, edit), config=config_of(C2I))
    message = str(caught.value)
    assert "missing: layers.1.attention.wo.weight" in message
    assert "unexpected: layers.1.extra" in message
    assert "norm.weight has shape [63], expected [64]" in message


def test_a_missing_layer_is_noticed(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith("layers.1.")]:
            del weights[name]

    with pytest.raises(CheckpointError, match=r"n_layer is 3, but the weights have 1"):
        read_transformer(edited(tmp_path, C2I, edit), config=config_of(C2I))


@pytest.mark.parametrize(
    ("path", "kind"), [(VQ, "a VQ tokenizer; give it as --vq"), (DRAFTER / "pytorch_model.bin", "an EAGLE drafter")]
)
def test_a_checkpoint_of_another_family_is_named(path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"found {kind}.*expected a LlamaGen transformer"):
        read_transformer(path, model="GPT-B")


def test_a_transformer_is_no_image_tokenizer() -> None:
    with pytest.raises(CheckpointError, match=r"no quantize\.embedding\.weight"):
        read_vq(C2I)


def test_an_image_tokenizer_with_a_missing_level_is_refused(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith("encoder.conv_blocks.4.")]:
            del weights[name]

    with pytest.raises(CheckpointError, match="4 encoder levels, 5 decoder levels"):
        read_vq(edited(tmp_path, VQ, edit))


@pytest.fixture(scope="module")
def target() -> Decoder:
    return read_transformer(T2I, config=config_of(T2I)).decoder


def test_a_drafter_is_read_from_either_format(tmp_path: Path, target: Decoder) -> None:
    one, two = read_drafter(DRAFTER, target), read_drafter(drafter_copy(tmp_path), target)
    pairs = zip(one.drafter.state_dict().values(), two.drafter.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [path.name for _, path in one.sources] == ["pytorch_model.bin", "config.json"]
    assert [path.name for _, path in two.sources] == ["model.safetensors", "config.json"]
    assert one.drafter.config.prefix == 7
    assert not one.drafter.config.input_norm


def test_a_drafter_without_bias_and_with_an_input_norm_is_read(tmp_path: Path, target: Decoder) -> None:
    def edit(weights: Weights) -> None:
        del weights["fc.bias"]
        weights["layers.0.input_layernorm.weight"] = torch.ones(64)

    drafter = read_drafter(drafter_copy(tmp_path, edit), target).drafter
    assert drafter.fc.bias is None
    assert drafter.config.input_norm


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"intermediate_size": 256}, "intermediate_size is 256, but the weights have 128"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, expected a number that divides"),
        ({"hidden_size": 65}, "hidden_size is 65"),
    ],
)
def test_a_drafter_that_contradicts_its_configuration_is_refused(
    tmp_path: Path, target: Decoder, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_drafter(drafter_copy(tmp_path, **config), target)


def test_a_drafter_with_unknown_weights_is_refused(tmp_path: Path, target: Decoder) -> None:
    def edit(weights: Weights) -> None:
        weights["norm.weight"] = torch.ones(64)

    with pytest.raises(CheckpointError, match=r"unexpected: norm\.weight"):
        read_drafter(drafter_copy(tmp_path, edit), target)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path, target: Decoder) -> None:
    def edit(weights: Weights) -> None:
        weights["embed_tokens.weight"] = torch.ones(64, 64)

    with pytest.raises(CheckpointError, match="64 codes of width 64, the target 128 of 64"):
        read_drafter(drafter_copy(tmp_path, edit), target)


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path, target: Decoder) -> None:
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json and weights"):
        read_drafter(tmp_path, target)
    changed(DRAFTER / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"found no weights, expected one of model\.safetensors, "):
        read_drafter(tmp_path, target)
