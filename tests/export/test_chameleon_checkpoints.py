"""Tests that read checkpoints of Anole, Lumina-mGPT and Lumina-mGPT 2.0: weights, codes, image sizes and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_copies import ANOLE, ANOLE_DRAFTER, LUMINA, VQGAN, copy_as_shards, copy_checkpoint
from family_readers import read_anole, read_lumina
from goldens import DATA
from safetensors.torch import load_file

from lantern_rt.export.families.common_lumina import list_patch_grids, make_lumina_image_size
from lantern_rt.export.models.decoder import Attention
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.vq_checkpoints import read_vqgan

PROTOCOL: dict[str, Any] = json.loads((DATA / "lumina-mgpt/protocol.json").read_text())


def test_shards_give_the_weights_and_sources_of_all_files(tmp_path: Path) -> None:
    model = read_anole(ANOLE, VQGAN)
    sharded_model = read_anole(copy_as_shards(ANOLE, tmp_path / "shards"), VQGAN)
    for graph, sharded_graph in zip(model.graphs, sharded_model.graphs, strict=True):
        for name, weight in graph.module.state_dict().items():
            assert torch.equal(weight, sharded_graph.module.state_dict()[name])
    assert torch.equal(model.code_embeddings, sharded_model.code_embeddings)
    roles = ["target_config", "target_tokenizer", "target_index", *["target"] * 3]
    assert [role for role, _ in sharded_model.sources if role.startswith("target")] == roles


def test_the_output_head_has_only_rows_of_image_tokens() -> None:
    model = read_anole(ANOLE, VQGAN)
    weights = load_file(ANOLE / "model.safetensors")
    assert torch.equal(
        model.graphs[0].module.state_dict()["head.weight"], weights["lm_head.weight"][4:132]
    )  # ids of codes
    assert torch.equal(model.code_embeddings, weights["model.embed_tokens.weight"][4:132])
    layout = model.manifest_fields["condition"].layout
    assert layout is not None
    assert (layout.before, layout.after, layout.uncond) == ((0,), (140, 133), (0, 133))


def test_the_grid_size_is_read_from_the_yaml_or_is_an_argument(tmp_path: Path) -> None:
    assert read_vqgan(VQGAN).grid == read_vqgan(VQGAN / "vqgan.ckpt").grid == 8
    (tmp_path / "vqgan.ckpt").write_bytes((VQGAN / "vqgan.ckpt").read_bytes())
    assert read_vqgan(tmp_path).grid is None
    assert read_anole(ANOLE, tmp_path, grid=6).manifest_fields["grid_rows"] == 6


@pytest.mark.parametrize("pixels", [512, 768, 1024])
def test_image_sizes_of_lumina_mgpt_equal_the_published_sizes(pixels: int) -> None:
    names = {f"<reserved{8800 + n:05d}>": 8804 + n for n in range(65)} | {"<racm3:break>": 8197}
    sizes = [make_lumina_image_size(rows, columns, names, 2) for rows, columns in list_patch_grids(pixels // 32)]
    assert [[*map(int, size.name.split("x"))] for size in sizes] == PROTOCOL["official_sizes"][str(pixels)]
    assert all((16 * size.columns, 16 * size.rows) == (*map(int, size.name.split("x")),) for size in sizes)
    square = next(size for size in sizes if size.rows == size.columns)
    assert square.name == f"{pixels}x{pixels}"
    assert square.tokens == (8197, 8804 + pixels // 32, 8804 + pixels // 32)


def test_default_settings_of_lumina_equal_the_published_settings() -> None:
    sampling = read_lumina(LUMINA, VQGAN, grid=4).manifest_fields["sampling"]
    # The guidance scale is from Lumina-mGPT's solver, top-k for images is from LANTERN.
    assert (sampling.cfg_scale, sampling.top_k) == (PROTOCOL["cfg"], 2000)
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)


def test_a_drafters_norm_with_a_single_row_applies_to_every_head(tmp_path: Path) -> None:
    def repeat_norms(repeats: int) -> Callable[[dict[str, torch.Tensor]], None]:
        """Return a function that replaces each norm's weight by copies of its first row."""
        return lambda weights: weights.update(
            {name: weight[:1].repeat(repeats, 1) for name, weight in weights.items() if "_norm." in name}
        )

    target: Any = read_anole(ANOLE, VQGAN).graphs[0].module
    one_row, four_rows = (
        read_drafter(
            copy_checkpoint(ANOLE_DRAFTER, tmp_path / str(rows), repeat_norms(rows)), target, 176
        ).drafter.state_dict()
        for rows in (1, 4)
    )
    assert one_row.keys() == four_rows.keys()
    assert all(torch.equal(one_row[name], four_rows[name]) for name in one_row)


def test_each_row_of_luminas_norms_applies_to_consecutive_heads(tmp_path: Path) -> None:
    """Read norms `[model_parallel_size, head width]`; transformers applies each row to consecutive heads."""
    generator = torch.Generator().manual_seed(0)

    def replace_norms(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "_norm." in name and "self_attn" in name]:
            weights[name] = torch.randn(2, 16, generator=generator).bfloat16()

    target = copy_checkpoint(LUMINA, tmp_path / "target", replace_norms)
    weights = load_file(target / "model.safetensors")
    attention = read_lumina(target, VQGAN, grid=4).graphs[0].module.layers[1].attention
    assert isinstance(attention, Attention)
    for projection, norm in (("q", attention.query_norm), ("k", attention.key_norm)):
        for kind in ("weight", "bias"):
            rows = weights[f"model.layers.1.self_attn.{projection}_norm.{kind}"]
            assert torch.equal(getattr(norm, kind), rows[torch.tensor([0, 0, 1, 1])])  # two rows for four heads
