"""Anole's graphs against numbers of transformers (target), LANTERN (drafter) and Chameleon (image tokenizer)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from goldens import DATA, Arrays, Run, close, embed, golden
from numpy.typing import NDArray
from shared_goldens import ImageTokenizerGolden

CODES = slice(4, 132)  # the image tokens


@pytest.fixture(scope="module")
def target() -> Arrays:
    return golden("anole/target")


@pytest.fixture(scope="module")
def drafter() -> Arrays:
    return golden("anole/drafter")


def columns(mask: NDArray[np.uint8], length: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which columns of a padded sequence are real, and visibility `[rows, length, length]`: padding sees itself."""
    real = np.ones((len(mask), length), bool)
    real[:, : mask.shape[1]] = mask > 0
    return real, np.tri(length, dtype=bool) & real[:, None] | np.eye(length, dtype=bool)


def test_whole_sequences_give_transformers_logits_of_image_tokens_and_hidden_states(
    anole_bundle: Path, target: Arrays
) -> None:
    embeds = embed(anole_bundle, target["input_ids"])
    close(embeds, target["hidden_states"][0], 0)
    out = Run(anole_bundle, rows=2).step(input_embeds=embeds)
    close(out["logits"], target["logits_raw"][:, :, CODES])
    close(out["hidden_states"], target["hidden_states"][-1])
    forbidden = target["logits_restricted"] == np.finfo(np.float32).min  # by transformers' own class
    assert np.flatnonzero(forbidden.all((0, 1))).tolist() == list(range(CODES.start, CODES.stop))


def test_a_padded_pair_of_prompts_and_each_without_its_padding_give_transformers_numbers(
    anole_bundle: Path, target: Arrays
) -> None:
    ids = target["cfg_input_ids"]
    positions = target["cfg_position_ids"]
    real, visible = columns(target["cfg_attention_mask"], ids.shape[1])
    out = Run(anole_bundle, rows=2).step(visible, positions=positions, input_embeds=embed(anole_bundle, ids))
    close(out["hidden_states"][real], target["cfg_hidden"][real])
    close(out["logits"][real], target["cfg_logits_raw"][real][:, CODES])
    for row, own in enumerate(real):
        assert positions[row][own].tolist() == list(range(own.sum()))
        out = Run(anole_bundle).step(input_embeds=embed(anole_bundle, ids[row, own]))
        close(out["hidden_states"][0], target["cfg_hidden"][row, own])
        close(out["logits"][0], target["cfg_logits_raw"][row, own][:, CODES])


def test_codes_have_the_image_tokens_embeddings_and_the_published_neighbours(anole_bundle: Path) -> None:
    close(np.load(anole_bundle / "code_embeddings.npy"), embed(anole_bundle, range(4, 132))[0], 0)
    published = np.load(DATA / "chameleon-vqgan/top_127_indices.npy")
    np.testing.assert_array_equal(np.load(anole_bundle / "neighbors.npz")["indices"], published)


def test_the_drafters_plain_forward_is_reproduced(anole_bundle: Path, drafter: Arrays) -> None:
    length = int(drafter["fwd_len"])
    real, visible = columns(drafter["prompt_mask"], length)
    out = Run(anole_bundle, "drafter", 2).step(
        visible,
        positions=drafter["fwd_position_ids"],
        input_ids=drafter["token_ids"][:, 1 : length + 1],
        target_hidden=drafter["target_hidden"][:, :length],
    )
    close(out["hidden_states"][real], drafter["fwd_hidden"][real])
    close(out["logits"][real], drafter["fwd_logits"][real][:, CODES])
    for part in ("key", "value"):
        cache = out[f"new_key_values.0.{part}"].transpose(1, 0, 2, 3)  # [rows, slots, heads, head_dim]
        close(cache[real], drafter[f"fwd_{part}s"].transpose(0, 2, 1, 3)[real])


def test_the_target_graph_gives_the_hidden_states_the_drafter_was_run_on(anole_bundle: Path, drafter: Arrays) -> None:
    ids = drafter["token_ids"]
    real, visible = columns(drafter["prompt_mask"], ids.shape[1])
    embeds = embed(anole_bundle, ids)
    out = Run(anole_bundle, rows=2).step(visible, positions=drafter["target_position_ids"], input_embeds=embeds)
    close(out["hidden_states"][real], drafter["target_hidden"][real])


@pytest.fixture(scope="module")
def tokenizer(anole_bundle: Path) -> tuple[Path, Arrays]:
    return anole_bundle, golden("chameleon-vqgan")


class TestImageTokenizer(ImageTokenizerGolden):
    pass
