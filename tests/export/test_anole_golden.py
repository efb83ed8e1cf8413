"""Anole and Lumina-mGPT: Anole's graphs compared with recordings, and weights, codes and image sizes of checkpoints.

The arrays of the target are from transformers, of the drafter from LANTERN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import ANOLE, ANOLE_DRAFTER, LUMINA, VQGAN, copy_checkpoint
from family_readers import read_anole, read_lumina
from goldens import DATA, Arrays, GraphRunner, assert_close, embed_tokens, load_golden
from numpy.typing import NDArray
from safetensors.torch import load_file

from lantern_rt.export.families.common_lumina import list_patch_grids, make_lumina_image_size
from lantern_rt.export.models.decoder import Attention
from lantern_rt.export.models.eagle import read_drafter
from lantern_rt.export.models.vq_checkpoints import read_vqgan

CODES = slice(4, 132)  # ids of the image tokens


@pytest.fixture(scope="module")
def target() -> Arrays:
    return load_golden("anole/target")


@pytest.fixture(scope="module")
def drafter() -> Arrays:
    return load_golden("anole/drafter")


def make_padding_masks(mask: NDArray[np.uint8], length: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tokens `[rows, length]` are no padding, and the attention mask `[rows, length, length]`."""
    is_real_token = np.ones((len(mask), length), bool)
    is_real_token[:, : mask.shape[1]] = mask > 0
    return is_real_token, np.tri(length, dtype=bool) & is_real_token[:, None] | np.eye(length, dtype=bool)


def test_sequences_have_the_outputs_of_transformers(anole_bundle: Path, target: Arrays) -> None:
    embeds = embed_tokens(anole_bundle, target["input_ids"])
    assert_close(embeds, target["hidden_states"][0], 0)
    out = GraphRunner(anole_bundle, rows=2).step(input_embeds=embeds)
    assert_close(out["logits"], target["logits_raw"][:, :, CODES])
    assert_close(out["hidden_states"], target["hidden_states"][-1])
    forbidden = target["logits_restricted"] == np.finfo(np.float32).min  # transformers hides tokens with this value
    assert np.flatnonzero(forbidden.all((0, 1))).tolist() == list(range(CODES.start, CODES.stop))


def test_padded_and_unpadded_prompts_have_the_outputs_of_transformers(anole_bundle: Path, target: Arrays) -> None:
    ids = target["cfg_input_ids"]
    positions = target["cfg_position_ids"]
    is_real_token, visible = make_padding_masks(target["cfg_attention_mask"], ids.shape[1])
    out = GraphRunner(anole_bundle, rows=2).step(
        visible, positions=positions, input_embeds=embed_tokens(anole_bundle, ids)
    )
    assert_close(out["hidden_states"][is_real_token], target["cfg_hidden"][is_real_token])
    assert_close(out["logits"][is_real_token], target["cfg_logits_raw"][is_real_token][:, CODES])
    for row, is_real_token_of_row in enumerate(is_real_token):
        assert positions[row][is_real_token_of_row].tolist() == list(range(is_real_token_of_row.sum()))
        out = GraphRunner(anole_bundle).step(input_embeds=embed_tokens(anole_bundle, ids[row, is_real_token_of_row]))
        assert_close(out["hidden_states"][0], target["cfg_hidden"][row, is_real_token_of_row])
        assert_close(out["logits"][0], target["cfg_logits_raw"][row, is_real_token_of_row][:, CODES])


def test_codes_have_their_tokens_embeddings_and_published_neighbours(anole_bundle: Path) -> None:
    assert_close(np.load(anole_bundle / "code_embeddings.npy"), embed_tokens(anole_bundle, range(4, 132))[0], 0)
    published = np.load(DATA / "chameleon-vqgan/top_127_indices.npy")
    np.testing.assert_array_equal(np.load(anole_bundle / "neighbors.npz")["indices"], published)


def test_the_drafter_has_the_recorded_outputs_keys_and_values(anole_bundle: Path, drafter: Arrays) -> None:
    length = int(drafter["fwd_len"])
    is_real_token, visible = make_padding_masks(drafter["prompt_mask"], length)
    out = GraphRunner(anole_bundle, "drafter", 2).step(
        visible,
        positions=drafter["fwd_position_ids"],
        input_ids=drafter["token_ids"][:, 1 : length + 1],
        target_hidden=drafter["target_hidden"][:, :length],
    )
    assert_close(out["hidden_states"][is_real_token], drafter["fwd_hidden"][is_real_token])
    assert_close(out["logits"][is_real_token], drafter["fwd_logits"][is_real_token][:, CODES])
    for part in ("key", "value"):
        cache = out[f"new_key_values.0.{part}"].transpose(1, 0, 2, 3)  # [rows, slots, heads, head_dim]
        assert_close(cache[is_real_token], drafter[f"fwd_{part}s"].transpose(0, 2, 1, 3)[is_real_token])


PROTOCOL: dict[str, Any] = json.loads((DATA / "lumina-mgpt/protocol.json").read_text())


def test_the_grid_size_is_read_from_the_yaml_or_is_an_argument(tmp_path: Path) -> None:
    assert read_vqgan(VQGAN)[1] == read_vqgan(VQGAN / "vqgan.ckpt")[1] == 8
    (tmp_path / "vqgan.ckpt").write_bytes((VQGAN / "vqgan.ckpt").read_bytes())
    assert read_vqgan(tmp_path)[1] is None
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


def test_a_drafters_norm_with_a_single_row_applies_to_every_head(tmp_path: Path) -> None:
    def repeat_norms(repeats: int) -> Callable[[dict[str, torch.Tensor]], None]:
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
