"""Anole's graphs compared with recordings of transformers (target), LANTERN (drafter) and Chameleon (VQ)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from goldens import DATA, Arrays, GraphRun, assert_close, embed, load_golden
from numpy.typing import NDArray
from shared_goldens import ImageTokenizerGolden

CODES = slice(4, 132)  # ids of the image tokens


@pytest.fixture(scope="module")
def target() -> Arrays:
    return load_golden("anole/target")


@pytest.fixture(scope="module")
def drafter() -> Arrays:
    return load_golden("anole/drafter")


def padding_masks(mask: NDArray[np.uint8], length: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which positions are not padding, `[rows, length]`, and the attention mask `[rows, length, length]`."""
    real = np.ones((len(mask), length), bool)
    real[:, : mask.shape[1]] = mask > 0
    return real, np.tri(length, dtype=bool) & real[:, None] | np.eye(length, dtype=bool)


def test_whole_sequences_have_the_logits_and_hidden_states_of_transformers(anole_bundle: Path, target: Arrays) -> None:
    embeds = embed(anole_bundle, target["input_ids"])
    assert_close(embeds, target["hidden_states"][0], 0)
    out = GraphRun(anole_bundle, rows=2).step(input_embeds=embeds)
    assert_close(out["logits"], target["logits_raw"][:, :, CODES])
    assert_close(out["hidden_states"], target["hidden_states"][-1])
    forbidden = target["logits_restricted"] == np.finfo(np.float32).min  # as the class of transformers does
    assert np.flatnonzero(forbidden.all((0, 1))).tolist() == list(range(CODES.start, CODES.stop))


def test_two_padded_prompts_and_each_without_padding_have_the_values_of_transformers(
    anole_bundle: Path, target: Arrays
) -> None:
    ids = target["cfg_input_ids"]
    positions = target["cfg_position_ids"]
    real, visible = padding_masks(target["cfg_attention_mask"], ids.shape[1])
    out = GraphRun(anole_bundle, rows=2).step(visible, positions=positions, input_embeds=embed(anole_bundle, ids))
    assert_close(out["hidden_states"][real], target["cfg_hidden"][real])
    assert_close(out["logits"][real], target["cfg_logits_raw"][real][:, CODES])
    for row, is_row_real in enumerate(real):
        assert positions[row][is_row_real].tolist() == list(range(is_row_real.sum()))
        out = GraphRun(anole_bundle).step(input_embeds=embed(anole_bundle, ids[row, is_row_real]))
        assert_close(out["hidden_states"][0], target["cfg_hidden"][row, is_row_real])
        assert_close(out["logits"][0], target["cfg_logits_raw"][row, is_row_real][:, CODES])


def test_codes_have_the_embeddings_of_image_tokens_and_the_published_neighbours(anole_bundle: Path) -> None:
    assert_close(np.load(anole_bundle / "code_embeddings.npy"), embed(anole_bundle, range(4, 132))[0], 0)
    published = np.load(DATA / "chameleon-vqgan/top_127_indices.npy")
    np.testing.assert_array_equal(np.load(anole_bundle / "neighbors.npz")["indices"], published)


def test_a_forward_pass_of_the_drafter_is_reproduced(anole_bundle: Path, drafter: Arrays) -> None:
    length = int(drafter["fwd_len"])
    real, visible = padding_masks(drafter["prompt_mask"], length)
    out = GraphRun(anole_bundle, "drafter", 2).step(
        visible,
        positions=drafter["fwd_position_ids"],
        input_ids=drafter["token_ids"][:, 1 : length + 1],
        target_hidden=drafter["target_hidden"][:, :length],
    )
    assert_close(out["hidden_states"][real], drafter["fwd_hidden"][real])
    assert_close(out["logits"][real], drafter["fwd_logits"][real][:, CODES])
    for part in ("key", "value"):
        cache = out[f"new_key_values.0.{part}"].transpose(1, 0, 2, 3)  # [rows, slots, heads, head_dim]
        assert_close(cache[real], drafter[f"fwd_{part}s"].transpose(0, 2, 1, 3)[real])


def test_the_target_graph_outputs_the_hidden_states_that_the_drafter_was_recorded_with(
    anole_bundle: Path, drafter: Arrays
) -> None:
    ids = drafter["token_ids"]
    real, visible = padding_masks(drafter["prompt_mask"], ids.shape[1])
    embeds = embed(anole_bundle, ids)
    out = GraphRun(anole_bundle, rows=2).step(visible, positions=drafter["target_position_ids"], input_embeds=embeds)
    assert_close(out["hidden_states"][real], drafter["target_hidden"][real])


@pytest.fixture(scope="module")
def tokenizer(anole_bundle: Path) -> tuple[Path, Arrays]:
    return anole_bundle, load_golden("chameleon-vqgan")


class TestImageTokenizer(ImageTokenizerGolden):
    pass
