"""Checkpoints of SimpleAR: valid variants are read, invalid files are rejected."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import COSMOS, SIMPLEAR, copy_checkpoint
from family_readers import read_simplear
from refusals import catch_error
from safetensors.torch import save_file
from tokenizers import Tokenizer

from lantern_rt.errors import LanternError
from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.families.simplear import list_image_sizes

# Function of an empty folder that copies a checkpoint to the folder, changes the copy and reads the copy.
Reader = Callable[[Path], object]
EMBED = "model.embed_tokens.weight"


def make_simplear_reader(weights: Any = None, config: Any = None, **fields: Any) -> Reader:
    """Return a function that reads an edited copy of SimpleAR from an empty folder."""
    return lambda folder: read_simplear(
        copy_checkpoint(SIMPLEAR, folder / "target", weights, config, **fields), COSMOS, grid=4
    )


def read_without_image_start(folder: Path) -> None:
    target = copy_checkpoint(SIMPLEAR, folder / "target")
    content = (target / "tokenizer.json").read_text()
    (target / "tokenizer.json").write_text(content.replace("<|soi|>", "<|sot|>"))
    read_simplear(target, COSMOS, grid=4)


def read_without_image_encoder(folder: Path) -> None:
    (folder / "cosmos").mkdir()
    shutil.copy(COSMOS / "decoder.jit", folder / "cosmos")
    read_simplear(SIMPLEAR, folder / "cosmos", grid=4)


def test_tokenizer_options_do_not_change_the_prompt_layout(tmp_path: Path) -> None:
    target = copy_checkpoint(SIMPLEAR, tmp_path / "target")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(2)
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(target / "tokenizer.json"))
    actual, expected = (
        read_simplear(folder, COSMOS, grid=4).manifest_fields["condition"] for folder in (target, SIMPLEAR)
    )
    assert actual.layout == expected.layout


# By name: function that reads the checkpoint, last part of the invalid field's name, words of the message.
INVALID_CHECKPOINTS: dict[str, tuple[Reader, str, str]] = {
    "other model type than Qwen2": (make_simplear_reader(model_type="qwen3"), "model_type", "'qwen3' 'qwen2'"),
    "sliding-window attention": (make_simplear_reader(use_sliding_window=True), "use_sliding_window", "True False"),
    "key bias of the wrong shape": (
        make_simplear_reader(lambda w: w.update({"model.layers.1.self_attn.k_proj.bias": torch.zeros(112)})),
        "model.layers.1.self_attn.{q,k,v}_proj.bias",
        "(112,), (112,), (16,)",
    ),
    "untied output head that is missing": (
        make_simplear_reader(tie_word_embeddings=False),
        "lm_head.weight",
        "missing weight",
    ),
    "fewer code embeddings than codes": (
        make_simplear_reader(lambda w: w.update({EMBED: w[EMBED][:-1]})),
        "vq",
        "576 codes 575",
    ),
    "tokenizer without a token for the start of an image": (
        read_without_image_start,
        "tokenizer.json",
        "lacks <|soi|>",
    ),
    "image tokenizer without an encoder": (read_without_image_encoder, "cosmos", "no weights"),
}


@pytest.mark.parametrize("case", INVALID_CHECKPOINTS)
def test_invalid_simplear_checkpoints_are_rejected_by_field(tmp_path: Path, case: str) -> None:
    read, field, words = INVALID_CHECKPOINTS[case]
    error = catch_error(LanternError, read, tmp_path)
    assert error.field.endswith(field)
    assert [word for word in words.split() if word not in str(error)] == []


def test_an_untied_head_and_a_tokenizer_in_safetensors_are_read(tmp_path: Path) -> None:
    for part in ("encoder", "decoder"):
        weights = read_weights(COSMOS / f"{part}.jit")
        save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / f"{part}.safetensors")
    untied = copy_checkpoint(
        SIMPLEAR, tmp_path / "target", lambda w: w.update({"lm_head.weight": w[EMBED] + 1}), tie_word_embeddings=False
    )
    tied = read_simplear(SIMPLEAR, COSMOS, grid=4)
    untied_model = read_simplear(untied, tmp_path, grid=4)
    tied_head, untied_head = (model.graphs[0].module.state_dict()["head.weight"] for model in (tied, untied_model))
    assert torch.equal(compute_deferred_tensor(tied_head) + 1, compute_deferred_tensor(untied_head))
    for graph, untied_graph in zip(tied.graphs[1:], untied_model.graphs[1:], strict=True):
        weights = untied_graph.module.state_dict()
        stored_weights = graph.module.state_dict().items()
        assert all(
            torch.equal(compute_deferred_tensor(weights[name]), compute_deferred_tensor(weight))
            for name, weight in stored_weights
        )
    assert tied.manifest_fields["sampling"].repetition_penalty == 1.1  # the value in generation_config.json


def test_an_invalid_config_of_the_image_tokenizer_is_ignored(tmp_path: Path) -> None:
    shutil.copytree(COSMOS, tmp_path / "cosmos")
    (tmp_path / "cosmos/config.json").write_text(
        '{"architectures": ["CosmosTokenizer"],}'
    )  # NVIDIA publishes this file with an invalid comma
    model = read_simplear(SIMPLEAR, tmp_path / "cosmos", grid=4)
    assert np.array_equal(model.codebook, read_simplear(SIMPLEAR, COSMOS, grid=4).codebook)


def test_image_sizes_have_about_the_same_area_or_are_squares() -> None:
    names = [size.name for size in list_image_sizes(64, 16)]
    assert names[0] == "1024x1024"
    assert "1360x768" in names
    assert names[-3:] == ["768x768", "512x512", "256x256"]
