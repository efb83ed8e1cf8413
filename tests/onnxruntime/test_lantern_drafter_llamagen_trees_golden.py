"""Draft trees and drafter caches of the published LANTERN drafter, through the exported graphs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from drafter_runs import OpenDrafts, next_draft, open_drafts

from lantern_rt import open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Sampling
from lantern_rt.runtime.state import DrafterLayout

DATA = Path(__file__).parent.parent / "data" / "lantern-drafter-llamagen"
GOLDEN = np.load(DATA / "golden.npz")
ACCEPTED = [1, 3, 2]  # codes accepted between the four calls of every run
PREFIX = 8
GREEDY = {"cfg_scale": 4.0, "temperature": 0.0}
RUNS = {
    "dyn": ("dynamic-59-5-10", GREEDY),
    "dyn_small": ("dynamic-20-4-4", GREEDY),
    "dyn_cfg7_5": ("dynamic-59-5-10", GREEDY | {"cfg_scale": 7.5}),
    "dyn_proc": ("dynamic-59-5-10", {"cfg_scale": 4.0, "temperature": 0.8, "top_k": 40}),
    "static_naive_extend_57": ("naive-57", GREEDY),
    "static_mc_sim_7b_63": ("mc-25", GREEDY),
}


def start_drafter(bundle: Path, run: str) -> OpenDrafts:
    manifest = open_bundle(bundle).manifest
    engine = Engines(open_bundle(bundle)).drafter
    tree, settings = RUNS[run]
    assert engine is not None
    prefix = [GOLDEN["token_ids"][0][:PREFIX]] * 2
    layout = DrafterLayout(masks_prefix=False)  # LANTERN's drafter sees padded slots
    return open_drafts(engine, manifest.target.max_positions, tree, Sampling(**settings), prefix, layout)


def calls_of(drafter: OpenDrafts):
    """Draft four times as the golden run did; yields the call's number and its tree."""
    tokens, hidden = GOLDEN["token_ids"][0], GOLDEN["target_hidden"]
    done = 0
    for call, end in enumerate(np.cumsum([PREFIX, *ACCEPTED])):
        yield call, next_draft(drafter, tokens[max(done + 1, PREFIX) : end + 1], [row[done:end] for row in hidden])
        done = int(end)


@pytest.mark.parametrize("run", [name for name in RUNS if name.startswith("dyn")])
def test_dynamic_trees_have_the_published_tokens_masks_positions_and_leaves(t2i_drafter_bundle: Path, run: str) -> None:
    for call, tree in calls_of(start_drafter(t2i_drafter_bundle, run)):
        name = f"{run}_call{call}"
        np.testing.assert_array_equal(tree.tokens, GOLDEN[f"{name}_draft_tokens"][0])
        np.testing.assert_array_equal(tree.structure.ancestors, GOLDEN[f"{name}_tree_mask"][0, 0] > 0)
        np.testing.assert_array_equal(tree.structure.depths, GOLDEN[f"{name}_tree_position_ids"])
        leaves = {tuple(int(n) for n in row if n >= 0) for row in GOLDEN[f"{name}_retrieve_indices"]}
        assert {tuple(tree.path_to(n)) for n in range(tree.nodes) if not tree.structure.children[n]} == leaves


@pytest.mark.parametrize("run", [name for name in RUNS if name.startswith("static")])
def test_static_trees_take_the_published_top_tokens_of_every_expanded_node(t2i_drafter_bundle: Path, run: str) -> None:
    static = json.loads((DATA / "static_trees.json").read_text())[run.removeprefix("static_")]
    drafter = start_drafter(t2i_drafter_bundle, run)
    for call, tree in calls_of(drafter):
        flat = np.append(tree.tokens[:1], GOLDEN[f"{run}_call{call}_tokens"].ravel())
        np.testing.assert_array_equal(tree.tokens, flat[static["verify"]["tree_indices"]])


@pytest.mark.parametrize("run", RUNS)
def test_the_drafter_keeps_the_published_cache_between_calls(t2i_drafter_bundle: Path, run: str) -> None:
    drafter = start_drafter(t2i_drafter_bundle, run)
    for call, _ in calls_of(drafter):
        assert drafter.cache.lengths.tolist() == [int(GOLDEN[f"{run}_call{call}_kvlen"])] * 2
    kept = int(drafter.cache.lengths[0])
    for tensor, part in zip(drafter.cache.tensors, ("keys", "values"), strict=True):
        ours = tensor[:kept].transpose(1, 2, 0, 3)  # [rows, heads, slots, head_dim]
        np.testing.assert_allclose(ours, GOLDEN[f"{run}_stable_{part}"], atol=1e-4)
