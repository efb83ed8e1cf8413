"""Whole greedy generations of the published LANTERN code on LlamaGen, through the exported graphs.

The published loop commits a step's bonus code with the next step, and stops once it has passed the length.
It may therefore run one or two more steps than ours, whose codes are all cut off.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lantern_rt import open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.state import DrafterLayout, Model, PrefixRow, Prompt

DATA = Path(__file__).parent.parent / "data"
BUNDLES = {  # recorded runs, the file of their traces, and the bundle they ran on
    "lantern-e2e-llamagen": ("steps.json", "t2i_drafter_bundle"),
    "lantern-e2e-llamagen-fullprefix": ("traces.json", "lantern_fullprefix_bundle"),  # prefix 120, grid 16 x 16
}
TRACES = {folder: json.loads((DATA / folder / name).read_text()) for folder, (name, _) in BUNDLES.items()}
NAMES = [(folder, name) for folder in TRACES for name in dict.fromkeys(trace["name"] for trace in TRACES[folder])]
NEIGHBORS = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
TREES = {"naive_extend_57": "naive-57", "mc_sim_7b_63": "mc-25"}


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> dict[str, tuple[Model, list[Prompt]]]:
    return {folder: load(request.getfixturevalue(bundle), folder) for folder, (_, bundle) in BUNDLES.items()}


def load(folder: Path, golden: str) -> tuple[Model, list[Prompt]]:
    arrays = np.load(DATA / golden / "golden.npz")
    bundle = open_bundle(folder)
    engines = Engines(bundle)
    layout = DrafterLayout(position_shift=-1, masks_prefix=False)
    manifest = bundle.manifest
    sizes = manifest.codes_per_image, manifest.target.max_positions
    loaded = Model(engines.target, engines.drafter, *sizes, layout, neighbors=NEIGHBORS)
    cond, uncond = engines.condition({"caption_embeds": arrays["caption_emb"], "caption_mask": arrays["emb_mask"]})
    real = arrays["emb_mask"] > 0
    prompts = [Prompt(PrefixRow(cond[i], own), PrefixRow(uncond[i], own)) for i, own in enumerate(real)]
    return loaded, prompts


def published_method(trace: dict) -> MethodConfig:
    """The method of a trace; relaxed ones with the published residual (greedy decoding has none)."""
    if trace["kind"] == "base":
        return Ar()
    tree = TREES[trace["tree"]] if trace["static"] else "dynamic-59-5-10"
    if not trace["lantern"]:
        return Eagle(tree=tree)
    relaxation = {"tree": tree, "neighbors": trace["k"], "residual": "neighborhood"}
    if trace["delta"] <= 1:
        return Lantern(delta=trace["delta"], **relaxation)
    return LanternPlusPlus(lambda_=float(trace["delta"]), **relaxation)


def run(
    model: Model, prompts: list[Prompt], method: MethodConfig, codes: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The first `codes` ids of every prompt, and accept lengths of the steps that gave them."""
    ids: list[list[int]] = [[] for _ in prompts]
    lengths: list[list[int]] = [[] for _ in prompts]
    for step in decode(model, prompts, range(len(prompts)), Sampling(cfg_scale=4.0, temperature=0.0), method):
        for part in step.parts:
            if len(ids[part.request]) >= codes:
                continue
            ids[part.request] += part.codes[: part.committed].tolist()
            if part.acceptance is not None:
                lengths[part.request].append(len(part.acceptance.path) - 1)
        if all(len(done) >= codes for done in ids):
            break
    return [done[:codes] for done in ids], lengths


def assert_same_up_to_the_last_code(ours: list[int], published: list[int], codes: int) -> None:
    assert ours == published[: len(ours)]
    assert 1 + sum(ours) + len(ours) >= codes  # the prefill's code, and every step's accepted codes and bonus


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_greedy_generations_follow_the_published_trace_token_for_token(
    models: dict[str, tuple[Model, list[Prompt]]], folder: str, name: str
) -> None:
    loaded, prompts = models[folder]
    traces = sorted((trace for trace in TRACES[folder] if trace["name"] == name), key=lambda trace: trace["prompt"])
    ids, lengths = run(loaded, prompts, published_method(traces[0]), traces[0]["max_length"])
    assert ids == [trace["ids"] for trace in traces]
    if name != "ar":
        for ours, trace in zip(lengths, traces, strict=True):
            assert_same_up_to_the_last_code(ours, trace["accept_lengths"], trace["max_length"])


@pytest.mark.parametrize(("folder", "name"), [case for case in NAMES if case[1] != "ar"])
def test_drafted_trees_and_accepted_codes_follow_the_published_trace_step_by_step(
    models: dict[str, tuple[Model, list[Prompt]]], folder: str, name: str
) -> None:
    loaded, prompts = models[folder]
    for trace in (trace for trace in TRACES[folder] if trace["name"] == name):
        steps = iter(trace["steps"])
        trees = iter(trace.get("tree_tokens", []))
        lengths: list[int] = []
        sampling = Sampling(cfg_scale=4.0, temperature=0.0)
        for step in decode(loaded, [prompts[trace["prompt"]]], [0], sampling, published_method(trace)):
            (part,) = step.parts
            if part.tree is None or part.acceptance is None:
                continue
            wanted = next(steps)
            assert int(part.tree.tokens[0]) == wanted["root"]
            assert part.codes.tolist() == [*wanted["accepted"], wanted["next_token"]]
            if not trace["static"]:
                assert part.tree.tokens.tolist() == next(trees)
            lengths.append(len(part.acceptance.path) - 1)
            if 1 + sum(lengths) + len(lengths) >= trace["max_length"]:
                break
        assert_same_up_to_the_last_code(lengths, trace["accept_lengths"], trace["max_length"])
