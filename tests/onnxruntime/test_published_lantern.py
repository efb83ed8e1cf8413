"""Draft trees, drafter caches and whole greedy generations of LANTERN's published code on LlamaGen and Anole.

They are reproduced by the exported graphs. Drafters alone are fed with recorded hidden states, without a target.

The published loop commits a step's bonus code with the next step, and stops once it has passed the length: it may run
one or two more steps than ours, whose codes are all cut off. It pads Anole's unconditional row; here that is short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.drafters import count_nodes
from lantern_rt.runtime.drafting import Commit
from lantern_rt.runtime.eagle import EagleDrafter
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import DecodePlan, DrafterLayout, ImageSequence, LoadedModel, PrefixRow, Prompt
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
        model = LoadedModel(NOTHING, drafter, positions, family.layout)
        prefixes = [ids[0, : family.prefix], ids[1, family.padding : family.prefix]]
        rows = [PrefixRow(np.zeros((len(own), 1), np.float32), np.ones(len(own), bool), own) for own in prefixes]
        method = Lantern(tree=TREES[run])
        plan = DecodePlan(RasterLayout(100), sampling, method, count_nodes(method))
        self.request = ImageSequence(0, plan, Prompt(*rows), seed=0)
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
            (tree,) = self.drafts.draft_trees([self.request])
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
        assert drafts.slots.cache.lengths.tolist() == [kept, kept - recorded.family.padding]
    if family == "llamagen":
        for tensor, part in zip(drafts.slots.cache.tensors, ("keys", "values"), strict=True):
            ours = tensor[:kept].transpose(1, 2, 0, 3)  # [rows, heads, slots, head_dim]
            np.testing.assert_allclose(ours, golden[f"{run}_stable_{part}"], atol=1e-4)


# ---------------------------------------------------------------- whole generations

Trace = dict[str, Any]
Loaded = tuple[LoadedModel, RasterLayout, list[Prompt]]
STATIC_NAMES = {"naive_extend_57": "naive-57", "mc_sim_7b_63": "mc-25"}
BUNDLES = {  # recorded runs, the file of their traces, and the bundle they ran on
    "lantern-e2e-llamagen": ("steps.json", "t2i_drafter_bundle"),
    "lantern-e2e-llamagen-fullprefix": ("traces.json", "lantern_fullprefix_bundle"),  # prefix 120, grid 16 x 16
    "anole/e2e": ("traces.json", "anole_bundle"),
}
TRACES: dict[str, list[Trace]] = {
    folder: json.loads((DATA / folder / name).read_text()) for folder, (name, _) in BUNDLES.items()
}
NAMES = [(folder, name) for folder in TRACES for name in dict.fromkeys(trace["name"] for trace in TRACES[folder])]
FIRST_CODE = 4  # of Anole's tokens
ANOLE_CODES = 36
BEYOND = 64  # the published code goes on past the end of a picture


def load_llamagen(bundle: Path, folder: str) -> Loaded:
    arrays, engines, manifest = (
        np.load(DATA / folder / "golden.npz"),
        Engines(open_bundle(bundle)),
        open_bundle(bundle).manifest,
    )
    layout = DrafterLayout(position_shift=-1, masks_prefix=False)
    image = RasterLayout(manifest.codes_per_image + BEYOND)
    neighbors = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
    model = LoadedModel(engines.target, engines.drafter, manifest.target.max_positions, layout, neighbors)
    cond, uncond = engines.condition({"caption_embeds": arrays["caption_emb"], "caption_mask": arrays["emb_mask"]})
    real = arrays["emb_mask"] > 0
    return model, image, [Prompt(PrefixRow(cond[i], own), PrefixRow(uncond[i], own)) for i, own in enumerate(real)]


def load_anole(bundle: Path, folder: str) -> Loaded:
    engines, positions = Engines(open_bundle(bundle)), open_bundle(bundle).manifest.target.max_positions
    neighbors, layout = np.load(DATA / "chameleon-vqgan" / "top_127_indices.npy"), DrafterLayout(code_offset=FIRST_CODE)
    model = LoadedModel(engines.target, engines.drafter, positions, layout, neighbors)
    prompts = []
    for trace in TRACES[folder][:3]:
        cond, uncond = np.array([0, *trace["prompt_text_ids"], 140, 133]), np.array([0, 133])
        rows = engines.condition({"token_ids": cond[None], "uncond_ids": uncond[None]})
        sides = zip(rows, (cond, uncond), strict=True)
        prompts.append(Prompt(*(PrefixRow(row[0], np.ones(len(ids), bool), ids) for row, ids in sides)))
    return model, RasterLayout(ANOLE_CODES + BEYOND), prompts


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Callable[[str], Loaded]:
    models: dict[str, Loaded] = {}

    def load(folder: str) -> Loaded:
        if folder not in models:
            bundle = request.getfixturevalue(BUNDLES[folder][1])
            models[folder] = (load_anole if folder == "anole/e2e" else load_llamagen)(bundle, folder)
        return models[folder]

    return load


def traces_of(folder: str, name: str) -> list[Trace]:
    return sorted((trace for trace in TRACES[folder] if trace["name"] == name), key=lambda trace: trace["prompt"])


def published_method(trace: Trace) -> MethodConfig:
    """The method of a trace; relaxed ones with the published residual (greedy decoding has none)."""
    if trace["name"] == "ar":
        return Ar()
    tree = STATIC_NAMES[trace.get("tree", "naive_extend_57")] if trace["static"] else "dynamic-59-5-10"
    if not trace["lantern"]:
        return Eagle(tree=tree)
    relaxation: dict[str, Any] = {"tree": tree, "neighbors": trace["k"], "residual": "neighborhood"}
    if trace["delta"] <= 1:
        return Lantern(delta=trace["delta"], **relaxation)
    return LanternPlusPlus(lambda_=float(trace["delta"]), **relaxation)


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_greedy_generations_follow_the_published_trace_token_for_token_and_step_by_step(
    loaded: Callable[[str], Loaded], folder: str, name: str
) -> None:
    """All prompts in one batch, though Anole's differ in length."""
    (model, image, prompts), traces = loaded(folder), traces_of(folder, name)
    first, most = model.layout.code_offset, traces[0]["max_length"]
    sampling = Sampling(cfg_scale=traces[0]["cfg_scale"], temperature=0.0)
    ids: list[list[int]] = [[] for _ in prompts]
    lengths: list[list[int]] = [[] for _ in prompts]
    method = published_method(traces[0])
    for step in decode(model, DecodePlan(image, sampling, method, count_nodes(method)), prompts, range(len(prompts))):
        for part in step.parts:
            if len(ids[part.sequence]) >= most:
                continue
            trace, number = traces[part.sequence], len(lengths[part.sequence])
            ids[part.sequence] += (part.codes + first).tolist()
            if part.tree is None or part.acceptance is None:
                continue
            expected = trace["steps"][number]
            assert int(part.tree.tokens[0]) + first == expected["root"]
            assert (part.codes + first).tolist() == [*expected["accepted"], expected["next_token"]]
            if not trace["static"]:
                assert (part.tree.tokens + first).tolist() == trace["tree_tokens"][number]
            lengths[part.sequence].append(len(part.acceptance.path) - 1)
        if all(len(done) >= most for done in ids):
            break
    assert [done[:most] for done in ids] == [trace["ids"] for trace in traces]
    if name != "ar":
        for ours, trace in zip(lengths, traces, strict=True):
            assert ours == trace["accept_lengths"][: len(ours)]
            assert 1 + sum(ours) + len(ours) >= most  # the prefill's code, and every step's accepted codes and bonus


# ---------------------------------------------------------------- Anole as a user runs it


@pytest.fixture(scope="module")
def pipe(anole_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(anole_bundle, threads=1)


def text_of(trace: Trace) -> str:
    return " ".join(f"tok{token}" for token in trace["prompt_text_ids"])


@pytest.mark.parametrize("name", ["ar", "eagle2_dynamic_exact", "lantern_k40_d0.6"])
def test_prompts_as_text_give_the_published_codes(pipe: Pipeline, name: str) -> None:
    traces = traces_of("anole/e2e", name)
    result = pipe([text_of(trace) for trace in traces], temperature=0, method=published_method(traces[0]))
    assert result.settings.sampling.cfg_scale == 3.0
    assert [(codes[:ANOLE_CODES] + FIRST_CODE).tolist() for codes in result.codes] == [trace["ids"] for trace in traces]
    assert [image.size for image in result.images] == [(32, 32)] * 3


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern", "lantern++"])
def test_prompts_of_any_length_in_a_batch_give_what_each_gives_alone_bit_for_bit(pipe: Pipeline, method: str) -> None:
    texts = ["tok145", " ".join(["tok150 tok151"] * 40), *map(text_of, traces_of("anole/e2e", "ar"))]
    together = pipe(texts, seed=[1, 2, 3, 4, 5], method=method, top_k=50)
    for i, text in enumerate(texts):
        alone = pipe(text, seed=i + 1, method=method, top_k=50)
        assert alone.codes[0].tolist() == together.codes[i].tolist()
        assert alone.images[0].tobytes() == together.images[i].tobytes()


# ---------------------------------------------------------------- LlamaGen as a user runs it


def test_embeddings_are_left_padded_as_published(t2i_drafter_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, golden = (
        Pipeline.from_bundle(t2i_drafter_bundle, threads=1),
        np.load(DATA / "lantern-e2e-llamagen/golden.npz"),
    )
    seen: list[dict[str, Any]] = []
    condition = pipe.engines.condition
    monkeypatch.setattr(pipe.engines, "condition", lambda inputs: seen.append(inputs) or condition(inputs))
    next(pipe.stream(embeddings=(golden["t5_embeddings"], golden["t5_mask"])))
    assert len(seen) == len(golden["emb_mask"])
    for inputs, mask, embeds in zip(seen, golden["emb_mask"], golden["caption_emb"], strict=True):
        np.testing.assert_array_equal(inputs["caption_mask"][0], mask)
        np.testing.assert_array_equal(inputs["caption_embeds"][0], embeds * mask[:, None])
