"""Comparisons of Anole's exported graphs with arrays recorded from published programs.

The arrays of the target are from transformers, of the drafter from LANTERN, of the image tokenizer from Chameleon.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from goldens import DATA, Arrays, GraphRunner, assert_close, embed_tokens, load_golden
from numpy.typing import NDArray

CODES = slice(4, 132)  # ids of the image tokens


@pytest.fixture(scope="module")
def target() -> Arrays:
    return load_golden("anole/target")


@pytest.fixture(scope="module")
def drafter() -> Arrays:
    return load_golden("anole/drafter")


def make_padding_masks(mask: NDArray[np.uint8], length: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Make masks of padded prompts and the tokens after them.

    Args:
        mask: true for the tokens of the prompts that are not padding, `[rows, prompt tokens]`.

    Returns:
        True for tokens that are not padding, `[rows, length]`, and the attention mask `[rows, length, length]`.
    """
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


def test_the_target_outputs_the_drafters_recorded_hidden_states(anole_bundle: Path, drafter: Arrays) -> None:
    ids = drafter["token_ids"]
    is_real_token, visible = make_padding_masks(drafter["prompt_mask"], ids.shape[1])
    embeds = embed_tokens(anole_bundle, ids)
    out = GraphRunner(anole_bundle, rows=2).step(visible, positions=drafter["target_position_ids"], input_embeds=embeds)
    assert_close(out["hidden_states"][is_real_token], drafter["target_hidden"][is_real_token])
