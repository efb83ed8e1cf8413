"""Checkpoints of Anole and both Lumina-mGPTs: codes by token names, image sizes, norms that several heads share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import ANOLE, ANOLE_DRAFTER, LUMINA, LUMINA2, MOVQGAN, VQGAN, copy_checkpoint, copy_sharded
from family_readers import read_anole, read_lumina, read_lumina2
from goldens import DATA
from refusals import error_of
from safetensors.torch import load_file

from lantern_rt.errors import CheckpointError
from lantern_rt.export.families.common_lumina import list_patch_grids, make_lumina_image_size
from lantern_rt.export.models.decoder import Attention
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.vq_checkpoints import read_vqgan

Read = Callable[[Path], object]  # copies a checkpoint to a folder, changes the copy and reads it
PROTOCOL: dict[str, Any] = json.loads((DATA / "lumina-mgpt/protocol.json").read_text())


def test_a_sharded_folder_is_read_as_the_same_decoder_with_all_files_as_sources(tmp_path: Path) -> None:
    whole = read_anole(ANOLE, VQGAN)
    shards = read_anole(copy_sharded(ANOLE, tmp_path / "shards"), VQGAN)
    for graph, sharded_graph in zip(whole.graphs, shards.graphs, strict=True):
        for name, weight in graph.module.state_dict().items():
            assert torch.equal(weight, sharded_graph.module.state_dict()[name])
    assert torch.equal(whole.code_embeddings, shards.code_embeddings)
    roles = ["target_config", "target_tokenizer", "target_index", *["target"] * 3]
    assert [role for role, _ in shards.sources if role.startswith("target")] == roles


def test_the_output_head_has_only_the_image_tokens() -> None:
    model = read_anole(ANOLE, VQGAN)
    weights = load_file(ANOLE / "model.safetensors")
    assert torch.equal(model.graphs[0].module.state_dict()["head.weight"], weights["lm_head.weight"][4:132])
    assert torch.equal(model.code_embeddings, weights["model.embed_tokens.weight"][4:132])
    layout = model.manifest_fields["condition"].layout
    assert layout is not None
    assert (layout.before, layout.after, layout.uncond) == ((0,), (140, 133), (0, 133))


def test_the_image_size_comes_from_the_yaml_or_the_caller(tmp_path: Path) -> None:
    assert read_vqgan(VQGAN).grid == read_vqgan(VQGAN / "vqgan.ckpt").grid == 8
    (tmp_path / "vqgan.ckpt").write_bytes((VQGAN / "vqgan.ckpt").read_bytes())
    assert read_vqgan(tmp_path).grid is None
    assert read_anole(ANOLE, tmp_path, grid=6).manifest_fields["grid_rows"] == 6


@pytest.mark.parametrize("pixels", [512, 768, 1024])
def test_lumina_sizes_are_the_published_ones_of_each_model(pixels: int) -> None:
    names = {f"<reserved{8800 + n:05d}>": 8804 + n for n in range(65)} | {"<racm3:break>": 8197}
    sizes = [make_lumina_image_size(rows, columns, names, 2) for rows, columns in list_patch_grids(pixels // 32)]
    assert [[*map(int, size.name.split("x"))] for size in sizes] == PROTOCOL["official_sizes"][str(pixels)]
    assert all((16 * size.columns, 16 * size.rows) == (*map(int, size.name.split("x")),) for size in sizes)
    square = next(size for size in sizes if size.rows == size.columns)
    assert square.name == f"{pixels}x{pixels}"
    assert square.tokens == (8197, 8804 + pixels // 32, 8804 + pixels // 32)


def test_lumina_defaults_are_those_of_the_published_solver() -> None:
    sampling = read_lumina(LUMINA, VQGAN, grid=4).manifest_fields["sampling"]
    assert (sampling.cfg_scale, sampling.top_k) == (
        PROTOCOL["cfg"],
        2000,
    )  # the solver's scale, and LANTERN's top-k for images
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


def test_a_single_row_of_a_drafters_norms_applies_to_every_head(tmp_path: Path) -> None:
    def norms(repeats: int) -> Callable[[dict[str, torch.Tensor]], None]:
        return lambda weights: weights.update(
            {name: weight[:1].repeat(repeats, 1) for name, weight in weights.items() if "_norm." in name}
        )

    target: Any = read_anole(ANOLE, VQGAN).graphs[0].module
    one_row, four_rows = (
        read_drafter(
            copy_checkpoint(ANOLE_DRAFTER, tmp_path / str(rows), norms(rows)), target, 176
        ).drafter.state_dict()
        for rows in (1, 4)
    )
    assert one_row.keys() == four_rows.keys()
    assert all(torch.equal(one_row[name], four_rows[name]) for name in one_row)


def test_a_row_of_norms_applies_to_as_many_heads_as_the_model_was_split_for(tmp_path: Path) -> None:
    """Read norms `[model_parallel_size, head width]`, which transformers repeats row by row."""
    generator = torch.Generator().manual_seed(0)

    def split(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "_norm." in name and "self_attn" in name]:
            weights[name] = torch.randn(2, 16, generator=generator).bfloat16()

    target = copy_checkpoint(LUMINA, tmp_path / "target", split)
    weights = load_file(target / "model.safetensors")
    attention = read_lumina(target, VQGAN, grid=4).graphs[0].module.layers[1].attention
    assert isinstance(attention, Attention)
    for part, norm in (("q", attention.query_norm), ("k", attention.key_norm)):
        for kind in ("weight", "bias"):
            rows = weights[f"model.layers.1.self_attn.{part}_norm.{kind}"]
            assert torch.equal(getattr(norm, kind), rows[torch.tensor([0, 0, 1, 1])])


def lumina2(weights: Any = None, config: Any = None, **fields: Any) -> Read:
    return lambda folder: read_lumina2(
        copy_checkpoint(LUMINA2, folder / "target", weights, config, **fields), MOVQGAN, grid=8
    )


def lumina2_file(name: str, old: str, new: str) -> Read:
    def read(folder: Path) -> None:
        target = copy_checkpoint(LUMINA2, folder / "target")
        (target / name).write_text((target / name).read_text().replace(old, new))
        read_lumina2(target, MOVQGAN, grid=8)

    return read


# By name: function that reads the files, end of the field at fault, words of the error.
WRONG_FILES: dict[str, tuple[Read, str, str]] = {
    "half a patch of 4 x 4": (lambda folder: read_lumina2(LUMINA2, MOVQGAN, grid=10), "grid", "10 multiple of 4"),
    "the first Lumina-mGPT": (
        lambda folder: read_lumina2(LUMINA, MOVQGAN, grid=8),
        "tokenizer.json",
        "<s> Qwen's family lumina takes the first",
    ),
    "Anole as Lumina-mGPT 2.0": (
        lumina2(config=lambda c: c.pop("mask_image_logits")),
        "architectures",
        "without mask_image_logits",
    ),
    "no size of its vocabulary": (lumina2(vocab_size=None), "vocab_size", "None text 96 tokens"),
    "no start of a prompt": (lumina2_file("tokenizer_config.json", "eos_token", "end"), "eos_token", "None name"),
    "no token of a size": (lumina2_file("tokenizer.json", "08804>", "04>"), "tokenizer.json", "lacks <reserved08804>"),
    "no MoVQGAN": (lambda folder: read_lumina2(LUMINA2, VQGAN, grid=8), "chameleon-vqgan", "no movqgan_270M.ckpt"),
    "Chameleon's VQGAN as MoVQGAN": (
        lambda folder: read_lumina2(LUMINA2, VQGAN / "vqgan.ckpt", grid=8),
        "vqgan.ckpt",
        "norm_layer no MoVQGAN",
    ),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_files_that_are_not_of_lumina_mgpt_2_are_rejected_by_their_field(tmp_path: Path, case: str) -> None:
    read, field, words = WRONG_FILES[case]
    error = error_of(CheckpointError, read, tmp_path)
    assert error.field.endswith(field)
    message = " ".join((error.problem, error.found, error.expected, error.remedy))
    assert [word for word in words.split() if word not in message] == []
