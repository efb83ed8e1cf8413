"""Checkpoints of SimpleAR: valid variants are read, invalid files are rejected."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from checkpoint_copies import COSMOS, SIMPLEAR, copy_checkpoint
from family_readers import read_simplear
from safetensors.torch import save_file
from tokenizers import Tokenizer

from lantern_rt.export.checkpoints.deferred import compute_deferred_tensor
from lantern_rt.export.checkpoints.files import read_weights
from lantern_rt.export.families.simplear import list_image_sizes

EMBED = "model.embed_tokens.weight"


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
