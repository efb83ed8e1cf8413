"""Anole's drafts and whole greedy generations of the published LANTERN code, through the exported graphs.

The published code pads the unconditional row; here it is as short as it is, so its cache is shorter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_runs import OpenDrafts, next_draft, open_drafts

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.state import DrafterLayout, Model, PrefixRow, Prompt

DATA = Path(__file__).parent.parent / "data"
DRAFTER = np.load(DATA / "anole" / "drafter" / "golden.npz")
TRACES: list[dict[str, Any]] = json.loads((DATA / "anole" / "e2e" / "traces.json").read_text())
NAMES = list(dict.fromkeys(trace["name"] for trace in TRACES))
NEIGHBORS = np.load(DATA / "chameleon-vqgan" / "top_127_indices.npy")
FIRST_CODE, PREFIX, CODES = 4, 9, 36
GREEDY = Sampling(cfg_scale=3.0, temperature=0.0)
RUNS = {
    "dyn": "dynamic-59-5-10",
    "dyn_small": "dynamic-20-4-4",
    "static_naive_extend_57": "naive-57",
}


# ---------------------------------------------------------------- drafts


def start_drafter(bundle: Path, run: str) -> OpenDrafts:
    opened = open_bundle(bundle)
    engine, ids = Engines(opened).drafter, DRAFTER["token_ids"]
    assert engine is not None
    prefix, layout = [ids[0, :PREFIX], ids[1, PREFIX - 2 : PREFIX]], DrafterLayout(code_offset=FIRST_CODE)
    return open_drafts(engine, opened.manifest.target.max_positions, RUNS[run], GREEDY, prefix, layout)


def calls_of(drafter: OpenDrafts) -> Any:
    """Draft four times as the golden run did; yields the call's number and its tree."""
    codes, (cond, uncond) = DRAFTER["token_ids"][0] - FIRST_CODE, DRAFTER["target_hidden"]
    done = 0
    for call, end in enumerate(np.cumsum([PREFIX, 1, 3, 2])):
        hidden = [cond[done:end], uncond[max(done, PREFIX - 2) : end]]  # the unconditional row starts at its `<s>`
        tree = next_draft(drafter, codes[max(done + 1, PREFIX) : end + 1], hidden)
        done = int(end)
        yield call, tree


@pytest.mark.parametrize("run", [name for name in RUNS if name.startswith("dyn")])
def test_dynamic_trees_have_the_published_tokens_masks_positions_and_leaves(anole_bundle: Path, run: str) -> None:
    for call, tree in calls_of(start_drafter(anole_bundle, run)):
        name = f"{run}_call{call}"
        np.testing.assert_array_equal(tree.tokens + FIRST_CODE, DRAFTER[f"{name}_draft_tokens"][0])
        np.testing.assert_array_equal(tree.structure.ancestors, DRAFTER[f"{name}_tree_mask"][0, 0] > 0)
        np.testing.assert_array_equal(tree.structure.depths, DRAFTER[f"{name}_tree_position_ids"])
        leaves = {tuple(int(n) for n in row if n >= 0) for row in DRAFTER[f"{name}_retrieve_indices"]}
        assert {tuple(tree.path_to(n)) for n in range(tree.nodes) if not tree.structure.children[n]} == leaves


def test_static_trees_take_the_published_top_tokens_of_every_expanded_node(anole_bundle: Path) -> None:
    run = "static_naive_extend_57"
    trees = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text())
    indices = trees["naive_extend_57"]["verify"]["tree_indices"]
    for call, tree in calls_of(start_drafter(anole_bundle, run)):
        flat = np.append(tree.tokens[:1] + FIRST_CODE, DRAFTER[f"{run}_call{call}_tokens"].ravel())
        np.testing.assert_array_equal(tree.tokens + FIRST_CODE, flat[indices])


@pytest.mark.parametrize("run", RUNS)
def test_the_drafter_keeps_the_published_number_of_slots_less_the_padding(anole_bundle: Path, run: str) -> None:
    drafter = start_drafter(anole_bundle, run)
    for call, _ in calls_of(drafter):
        kept = int(DRAFTER[f"{run}_call{call}_kvlen"])
        assert drafter.cache.lengths.tolist() == [kept, kept - (PREFIX - 2)]


# ---------------------------------------------------------------- whole generations


@pytest.fixture(scope="module")
def model(anole_bundle: Path) -> tuple[Model, list[Prompt]]:
    bundle = open_bundle(anole_bundle)
    engines, manifest = Engines(bundle), bundle.manifest
    layout = DrafterLayout(code_offset=FIRST_CODE)
    loaded = Model(engines.target, engines.drafter, CODES, manifest.target.max_positions, layout, neighbors=NEIGHBORS)
    prompts = []
    for trace in TRACES[:3]:
        cond, uncond = np.array([0, *trace["prompt_text_ids"], 140, 133]), np.array([0, 133])
        rows = engines.condition({"token_ids": cond[None], "uncond_ids": uncond[None]})
        sides = zip(rows, (cond, uncond), strict=True)
        prompts.append(Prompt(*(PrefixRow(row[0], np.ones(len(ids), bool), ids) for row, ids in sides)))
    return loaded, prompts


def published_method(trace: dict[str, Any]) -> MethodConfig:
    """The method of a trace; relaxed ones with the published residual (greedy decoding has none)."""
    if trace["name"] == "ar":
        return Ar()
    tree = "naive-57" if trace["static"] else "dynamic-59-5-10"
    if not trace["lantern"]:
        return Eagle(tree=tree)
    relaxation: dict[str, Any] = {"tree": tree, "neighbors": trace["k"], "residual": "neighborhood"}
    if trace["delta"] <= 1:
        return Lantern(delta=trace["delta"], **relaxation)
    return LanternPlusPlus(lambda_=float(trace["delta"]), **relaxation)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generations_follow_the_published_trace_token_for_token_and_step_by_step(
    model: tuple[Model, list[Prompt]], name: str
) -> None:
    """All prompts in one batch, though they differ in length."""
    loaded, prompts = model
    traces = sorted((trace for trace in TRACES if trace["name"] == name), key=lambda trace: trace["prompt"])
    ids: list[list[int]] = [[] for _ in prompts]
    lengths: list[list[int]] = [[] for _ in prompts]
    for step in decode(loaded, prompts, range(len(prompts)), GREEDY, published_method(traces[0])):
        for part in step.parts:
            trace, number = traces[part.request], len(lengths[part.request])
            ids[part.request] += (part.codes[: part.committed] + FIRST_CODE).tolist()
            if part.tree is None or part.acceptance is None:
                continue
            wanted = trace["steps"][number]
            assert int(part.tree.tokens[0]) + FIRST_CODE == wanted["root"]
            assert (part.codes + FIRST_CODE).tolist() == [*wanted["accepted"], wanted["next_token"]]
            if not trace["static"]:
                assert (part.tree.tokens + FIRST_CODE).tolist() == trace["tree_tokens"][number]
            lengths[part.request].append(len(part.acceptance.path) - 1)
    assert ids == [trace["ids"] for trace in traces]
    if name != "ar":
        for ours, trace in zip(lengths, traces, strict=True):
            assert ours == trace["accept_lengths"][: len(ours)]
            assert 1 + sum(ours) + len(ours) >= CODES  # the prefill's code, and every step's accepted codes and bonus


# ---------------------------------------------------------------- as a user runs it


@pytest.fixture(scope="module")
def pipe(anole_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(anole_bundle, threads=1)


def text_of(trace: dict[str, Any]) -> str:
    return " ".join(f"tok{token}" for token in trace["prompt_text_ids"])


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern"])
def test_prompts_as_text_give_the_published_codes(pipe: Pipeline, method: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "ar": {"method": "ar"},
        "eagle": {"method": "eagle", "tree": "dynamic-59-5-10"},
        "lantern": {
            "method": "lantern",
            "tree": "dynamic-59-5-10",
            "neighbors": 40,
            "delta": 0.6,
            "residual": "neighborhood",
        },
    }
    name = {"ar": "ar", "eagle": "eagle2_dynamic_exact", "lantern": "lantern_k40_d0.6"}[method]
    traces = sorted((trace for trace in TRACES if trace["name"] == name), key=lambda trace: trace["prompt"])
    result = pipe([text_of(trace) for trace in traces], temperature=0, **options[method])
    assert result.settings.sampling.cfg_scale == 3.0
    assert [len(codes) for codes in result.codes] == [64] * 3
    assert [(codes[:CODES] + FIRST_CODE).tolist() for codes in result.codes] == [trace["ids"] for trace in traces]
    assert [image.size for image in result.images] == [(32, 32)] * 3


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern", "lantern++"])
def test_prompts_of_any_length_in_a_batch_give_what_each_gives_alone_bit_for_bit(pipe: Pipeline, method: str) -> None:
    texts = ["tok145", " ".join(["tok150 tok151"] * 40), *(text_of(trace) for trace in TRACES[:3])]
    options = {"method": method, "top_k": 50}
    together = pipe(texts, seed=[1, 2, 3, 4, 5], **options)
    for i, text in enumerate(texts):
        alone = pipe(text, seed=i + 1, **options)
        assert alone.codes[0].tolist() == together.codes[i].tolist()
        assert alone.images[0].tobytes() == together.images[i].tobytes()
