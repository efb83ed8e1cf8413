"""Anole's exported graphs against numbers of transformers (target) and the published LANTERN code (drafter)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llamagen_golden import DATA, Arrays, Run, close, golden, guide, manifest
from numpy.typing import NDArray

from lantern_rt.export.graph.graphs import HIDDEN
from lantern_rt.export.parity import Sessions

CODES = slice(4, 132)  # the image tokens


@pytest.fixture(scope="module")
def target() -> Arrays:
    return golden("anole/target")


@pytest.fixture(scope="module")
def drafter() -> Arrays:
    return golden("anole/drafter")


def embed(bundle: Path, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    out = Sessions(bundle / "condition.onnx").run({"token_ids": ids, "uncond_ids": ids[:, :1]})
    np.testing.assert_array_equal(out["uncond_embeds"], out["prefix_embeds"][:, :1])
    return out["prefix_embeds"]


def start(bundle: Path, role: str, rows: int) -> Run:
    spec = getattr(manifest(bundle), role)
    return Run(bundle / f"{role}.onnx", spec.num_kv_heads, spec.head_dim, spec.num_layers, rows)


def columns(mask: NDArray[np.uint8], length: int) -> NDArray[np.bool_]:
    """Visibility `[rows, length, length]` of a causal sequence with padded columns that see only themselves."""
    real = np.ones((len(mask), length), bool)
    real[:, : mask.shape[1]] = mask > 0
    return np.tri(length, dtype=bool) & real[:, None] | np.eye(length, dtype=bool)


def one_pass(
    bundle: Path, role: str, positions: NDArray[np.int64], visible: NDArray[np.bool_], **rows: object
) -> Arrays:
    """A pass with positions and masks of its own, on an empty past."""
    spec = getattr(manifest(bundle), role)
    empty = np.zeros((0, len(positions), spec.num_kv_heads, spec.head_dim), np.float32)
    parts = [f"past_key_values.{i}.{part}" for i in range(spec.num_layers) for part in ("key", "value")]
    mask = np.where(visible, 0, HIDDEN).astype(np.float32)[:, None]
    feeds = {"position_ids": positions, "attention_mask": mask} | dict.fromkeys(parts, empty)
    return Sessions(bundle / f"{role}.onnx").run(feeds | rows)  # type: ignore[arg-type]


def test_whole_sequences_give_transformers_logits_of_image_tokens_and_hidden_states(
    anole_bundle: Path, target: Arrays
) -> None:
    embeds = embed(anole_bundle, target["input_ids"])
    close(embeds, target["hidden_states"][0], 0)
    out = start(anole_bundle, "target", 2).step(input_embeds=embeds)
    close(out["logits"], target["logits_raw"][:, :, CODES])
    close(out["hidden_states"], target["hidden_states"][-1])


def test_the_bundle_keeps_just_the_tokens_that_transformers_own_class_forbids(target: Arrays) -> None:
    forbidden = target["logits_restricted"] == np.finfo(np.float32).min
    assert np.flatnonzero(forbidden.all((0, 1))).tolist() == list(range(CODES.start, CODES.stop))
    np.testing.assert_array_equal(target["logits_restricted"][~forbidden], target["logits_raw"][~forbidden])


def test_token_by_token_equals_the_whole_sequence(anole_bundle: Path, target: Arrays) -> None:
    embeds, run = embed(anole_bundle, target["input_ids"]), start(anole_bundle, "target", 2)
    steps = [run.step(input_embeds=embeds[:, k : k + 1])["logits"] for k in range(embeds.shape[1])]
    close(np.concatenate(steps, 1), target["logits_raw"][:, :, CODES])


def test_a_padded_pair_of_prompts_gives_transformers_numbers_at_its_positions(
    anole_bundle: Path, target: Arrays
) -> None:
    ids, positions = target["cfg_input_ids"], target["cfg_position_ids"]
    visible = columns(target["cfg_attention_mask"], ids.shape[1])
    out = one_pass(anole_bundle, "target", positions, visible, input_embeds=embed(anole_bundle, ids))
    real = target["cfg_attention_mask"] > 0
    close(out["hidden_states"][real], target["cfg_hidden"][real])
    close(out["logits"][real], target["cfg_logits_raw"][real][:, CODES])


def test_an_unconditional_row_without_its_padding_gives_the_same_numbers(anole_bundle: Path, target: Arrays) -> None:
    for row in range(2):
        real = target["cfg_attention_mask"][row] > 0
        assert target["cfg_position_ids"][row][real].tolist() == list(range(real.sum()))
        embeds = embed(anole_bundle, target["cfg_input_ids"][row : row + 1, real])
        out = start(anole_bundle, "target", 1).step(input_embeds=embeds)
        close(out["hidden_states"][0], target["cfg_hidden"][row, real])
        close(out["logits"][0], target["cfg_logits_raw"][row, real][:, CODES])


def test_the_code_table_holds_the_image_tokens_embeddings(anole_bundle: Path) -> None:
    table = np.load(anole_bundle / "code_embeddings.npy")
    close(table, embed(anole_bundle, np.arange(4, 132)[None])[0], 0)


def test_guided_logits_after_the_prompt_lead_to_the_published_first_token(anole_bundle: Path, target: Arrays) -> None:
    last = int(target["prompt_length"]) - 1
    guided = guide(target["cfg_logits_raw"][:, last], 3.0)[0, CODES]
    rows = []
    for row in range(2):
        real = target["cfg_attention_mask"][row, : last + 1] > 0
        embeds = embed(anole_bundle, target["cfg_input_ids"][row : row + 1, : last + 1][:, real])
        rows.append(start(anole_bundle, "target", 1).step(input_embeds=embeds)["logits"][0, -1])
    close(guide(np.stack(rows), 3.0)[0], guided, 3e-4)


def test_the_drafters_plain_forward_is_reproduced(anole_bundle: Path, drafter: Arrays) -> None:
    length, prefix = int(drafter["fwd_len"]), int(drafter["prompt_length"])
    out = one_pass(
        anole_bundle,
        "drafter",
        drafter["fwd_position_ids"],
        columns(drafter["prompt_mask"], length),
        input_ids=np.ascontiguousarray(drafter["token_ids"][:, 1 : length + 1]),
        target_hidden=np.ascontiguousarray(drafter["target_hidden"][:, :length]),
    )
    real = np.ones((2, length), bool)
    real[:, :prefix] = drafter["prompt_mask"] > 0
    close(out["hidden_states"][real], drafter["fwd_hidden"][real])
    close(out["logits"][real], drafter["fwd_logits"][real][:, CODES])
    for part in ("key", "value"):
        cache = out[f"new_key_values.0.{part}"].transpose(1, 0, 2, 3)  # [rows, slots, heads, head_dim]
        close(cache[real], drafter[f"fwd_{part}s"].transpose(0, 2, 1, 3)[real])


def test_the_target_graph_gives_the_hidden_states_the_drafter_was_run_on(anole_bundle: Path, drafter: Arrays) -> None:
    ids, mask = drafter["token_ids"], drafter["prompt_mask"]
    visible = columns(mask, ids.shape[1])
    out = one_pass(
        anole_bundle, "target", drafter["target_position_ids"], visible, input_embeds=embed(anole_bundle, ids)
    )
    real = np.ones(ids.shape, bool)
    real[:, : mask.shape[1]] = mask > 0
    close(out["hidden_states"][real], drafter["target_hidden"][real])


def test_the_neighbour_table_is_the_published_file(anole_bundle: Path) -> None:
    published = np.load(DATA / "chameleon-vqgan/top_127_indices.npy")
    np.testing.assert_array_equal(np.load(anole_bundle / "neighbors.npz")["indices"], published)
