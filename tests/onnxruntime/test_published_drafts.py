"""Draft trees and drafter caches of the published LANTERN drafters of LlamaGen and Anole, through the exported graphs.

Drafters are fed with recorded hidden states, without a target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lantern_rt import open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Lantern, Sampling
from lantern_rt.runtime.drafter import EagleDrafter
from lantern_rt.runtime.drafting import Commit
from lantern_rt.runtime.grid import Raster
from lantern_rt.runtime.state import DrafterLayout, Model, PrefixRow, Request
from lantern_rt.runtime.statistics import Clock
from lantern_rt.runtime.tree import DraftTree

DATA = Path(__file__).parent.parent / "data"
STATIC_TREES = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text())
ACCEPTED = [1, 3, 2]  # codes accepted between the four calls of every run
NOTHING: Any = None


class Family(NamedTuple):
    """What was recorded of a family. padding: positions that its unconditional row lacks, which starts at its `<s>`."""

    bundle: str
    golden: Any
    layout: DrafterLayout
    prefix: int
    padding: int
    cfg_scale: float


FAMILIES = {
    "llamagen": Family(
        "t2i_drafter_bundle",
        np.load(DATA / "lantern-drafter-llamagen" / "golden.npz"),
        DrafterLayout(masks_prefix=False),  # LANTERN's drafter sees padded slots
        prefix=8,
        padding=0,
        cfg_scale=4.0,
    ),
    "anole": Family(
        "anole_bundle",
        np.load(DATA / "anole" / "drafter" / "golden.npz"),
        DrafterLayout(code_offset=4),
        prefix=9,
        padding=7,
        cfg_scale=3.0,
    ),
}
TREES = {
    "dyn": "dynamic-59-5-10",
    "dyn_small": "dynamic-20-4-4",
    "static_naive_extend_57": "naive-57",
    "dyn_cfg7_5": "dynamic-59-5-10",
    "dyn_proc": "dynamic-59-5-10",
    "static_mc_sim_7b_63": "mc-25",
}
SETTINGS: dict[str, dict[str, Any]] = {"dyn_cfg7_5": {"cfg_scale": 7.5}, "dyn_proc": {"temperature": 0.8, "top_k": 40}}
RUNS = [("llamagen", run) for run in TREES] + [("anole", run) for run in list(TREES)[:3]]
DYNAMIC, STATIC = ([one for one in RUNS if one[1].startswith(kind)] for kind in ("dyn", "static"))


class Run:
    """One recorded run: a drafter, and the request that it drafts for."""

    def __init__(self, bundle: Path, family: Family, run: str) -> None:
        opened, ids = open_bundle(bundle), family.golden["token_ids"]
        drafter = Engines(opened).drafter
        assert drafter is not None
        sampling = Sampling(**{"cfg_scale": family.cfg_scale, "temperature": 0.0, **SETTINGS.get(run, {})})
        positions = opened.manifest.target.max_positions
        model = Model(NOTHING, drafter, codes=100, positions=positions, layout=family.layout)
        prefixes = [ids[0, : family.prefix], ids[1, family.padding : family.prefix]]
        rows = [PrefixRow(np.zeros((len(own), 1), np.float32), np.ones(len(own), bool), own) for own in prefixes]
        self.request = Request(0, Raster(100), rows, sampling, Lantern(tree=TREES[run]), seed=0)
        self.drafts, self.family = EagleDrafter(model, Lantern(tree=TREES[run]), Clock()), family

    def calls(self) -> Iterator[tuple[int, DraftTree]]:
        """Draft four times, each time with more tokens committed; the call's number and its tree."""
        family = self.family
        tokens = family.golden["token_ids"][0] - family.layout.code_offset
        done = 0
        for call, end in enumerate(np.cumsum([family.prefix, *ACCEPTED]).tolist()):
            nodes = [np.arange(done, end), np.arange(max(done, family.padding), end)]
            committed = tokens[max(done + 1, family.prefix) : end + 1]
            self.drafts.commit(
                [Commit(self.request, committed, nodes, slice(0, 2), family.golden["target_hidden"], NOTHING)]
            )
            (tree,) = self.drafts.draft([self.request])
            yield call, tree
            done = end


@pytest.fixture
def recorded(request: pytest.FixtureRequest, family: str, run: str) -> Run:
    return Run(request.getfixturevalue(FAMILIES[family].bundle), FAMILIES[family], run)


@pytest.mark.parametrize(("family", "run"), DYNAMIC)
def test_dynamic_trees_have_the_published_tokens_masks_positions_and_leaves(recorded: Run, run: str) -> None:
    golden, first = recorded.family.golden, recorded.family.layout.code_offset
    for call, tree in recorded.calls():
        name = f"{run}_call{call}"
        np.testing.assert_array_equal(tree.tokens + first, golden[f"{name}_draft_tokens"][0])
        np.testing.assert_array_equal(tree.structure.ancestors, golden[f"{name}_tree_mask"][0, 0] > 0)
        np.testing.assert_array_equal(tree.structure.depths, golden[f"{name}_tree_position_ids"])
        leaves = {tuple(int(n) for n in row if n >= 0) for row in golden[f"{name}_retrieve_indices"]}
        assert {tuple(tree.path_to(n)) for n in range(tree.nodes) if not tree.structure.children[n]} == leaves


@pytest.mark.parametrize(("family", "run"), STATIC)
def test_static_trees_take_the_published_top_tokens_of_every_expanded_node(recorded: Run, run: str) -> None:
    indices = STATIC_TREES[run.removeprefix("static_")]["verify"]["tree_indices"]
    first = recorded.family.layout.code_offset
    for call, tree in recorded.calls():
        flat = np.append(tree.tokens[:1] + first, recorded.family.golden[f"{run}_call{call}_tokens"].ravel())
        np.testing.assert_array_equal(tree.tokens + first, flat[indices])


@pytest.mark.parametrize(("family", "run"), RUNS)
def test_the_drafter_keeps_the_published_cache_between_calls(recorded: Run, family: str, run: str) -> None:
    golden, drafts = recorded.family.golden, recorded.drafts
    for call, _ in recorded.calls():
        kept = int(golden[f"{run}_call{call}_kvlen"])
        assert drafts.cache.lengths.tolist() == [kept, kept - recorded.family.padding]
    if family == "llamagen":
        for tensor, part in zip(drafts.cache.tensors, ("keys", "values"), strict=True):
            ours = tensor[:kept].transpose(1, 2, 0, 3)  # [rows, heads, slots, head_dim]
            np.testing.assert_allclose(ours, golden[f"{run}_stable_{part}"], atol=1e-4)
