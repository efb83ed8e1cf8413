"""Recordings of LANTERN's published code on LlamaGen and Anole, which exported graphs must reproduce.

The recordings are draft trees, KV caches of drafters, and complete greedy generations. Tests of a drafter alone feed
recorded hidden states to the drafter, without a target.

The published loop commits the bonus token of a step in the next step. The published loop may run one or two steps more
than lantern-rt and drops the tokens of these steps. The published loop pads Anole's unconditional row; lantern-rt
does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.loader import BundleEngines
from lantern_rt.methods import Autoregressive, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.drafters import count_draft_nodes
from lantern_rt.runtime.drafting import CommittedTokens
from lantern_rt.runtime.eagle import EagleDrafter
from lantern_rt.runtime.raster import RasterLayout
from lantern_rt.runtime.state import DrafterLayout, ImageSequence, LoadedModel, Plan, PrefixRow, Prompt
from lantern_rt.runtime.statistics import EngineTimer
from lantern_rt.runtime.tree import DraftTree

DATA = Path(__file__).parent.parent / "data"
STATIC_TREES = json.loads((DATA / "lantern-drafter-llamagen" / "static_trees.json").read_text())
ACCEPTED_COUNTS = [1, 3, 2]  # tokens accepted between the four drafter calls of every run
UNUSED: Any = None


class RecordedFamily(NamedTuple):
    bundle: str
    golden: Any
    layout: DrafterLayout
    prefix: int
    padding: int
    cfg_scale: float


FAMILIES = {
    "llamagen": RecordedFamily(
        "t2i_drafter_bundle",
        np.load(DATA / "lantern-drafter-llamagen" / "golden.npz"),
        DrafterLayout(masks_prefix=False),  # LANTERN's drafter attends to padded slots
        prefix=8,
        padding=0,
        cfg_scale=4.0,
    ),
    "anole": RecordedFamily(
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
SAMPLING_BY_RUN: dict[str, dict[str, Any]] = {
    "dyn_cfg7_5": {"cfg_scale": 7.5},
    "dyn_proc": {"temperature": 0.8, "top_k": 40},
}
RECORDED_RUNS = [("llamagen", run) for run in TREES] + [("anole", run) for run in list(TREES)[:3]]
DYNAMIC_RUNS, STATIC_RUNS = (
    [run for run in RECORDED_RUNS if run[1].startswith(prefix)] for prefix in ("dyn", "static")
)


class RecordedRun:
    def __init__(self, bundle: Path, family: RecordedFamily, run: str) -> None:
        loaded_bundle = open_bundle(bundle)
        ids = family.golden["token_ids"]
        drafter = BundleEngines(loaded_bundle).drafter
        assert drafter is not None
        sampling = Sampling(**{"cfg_scale": family.cfg_scale, "temperature": 0.0, **SAMPLING_BY_RUN.get(run, {})})
        positions = loaded_bundle.manifest.target.max_positions
        model = LoadedModel(UNUSED, drafter, positions, family.layout)
        prefixes = [ids[0, : family.prefix], ids[1, family.padding : family.prefix]]
        rows = [
            PrefixRow(np.zeros((len(prefix), 1), np.float32), np.ones(len(prefix), bool), prefix) for prefix in prefixes
        ]
        method = Lantern(tree=TREES[run])
        plan = Plan(RasterLayout(100), sampling, method, count_draft_nodes(method))
        self.sequence = ImageSequence(0, plan, Prompt(*rows), seed=0)
        self.eagle_drafter = EagleDrafter(model, Lantern(tree=TREES[run]), EngineTimer())
        self.family = family

    def draft_trees(self) -> Iterator[tuple[int, DraftTree]]:
        """Draft several times, each time after more committed tokens; yield the call index and the draft tree."""
        family = self.family
        tokens = family.golden["token_ids"][0] - family.layout.code_offset
        num_committed = 0
        for call, num_tokens in enumerate(np.cumsum([family.prefix, *ACCEPTED_COUNTS]).tolist()):
            nodes_by_row = [
                np.arange(num_committed, num_tokens),
                np.arange(max(num_committed, family.padding), num_tokens),
            ]
            committed = tokens[max(num_committed + 1, family.prefix) : num_tokens + 1]
            self.eagle_drafter.store_committed_tokens(
                [
                    CommittedTokens(
                        self.sequence, committed, nodes_by_row, slice(0, 2), family.golden["target_hidden"], UNUSED
                    )
                ]
            )
            (tree,) = self.eagle_drafter.draft_trees([self.sequence])
            yield call, tree
            num_committed = num_tokens


@pytest.fixture
def recorded_run(request: pytest.FixtureRequest, family: str, run: str) -> RecordedRun:
    return RecordedRun(request.getfixturevalue(FAMILIES[family].bundle), FAMILIES[family], run)


@pytest.mark.parametrize(("family", "run"), DYNAMIC_RUNS)
def test_dynamic_draft_trees_equal_the_published_trees(recorded_run: RecordedRun, run: str) -> None:
    golden = recorded_run.family.golden
    code_offset = recorded_run.family.layout.code_offset
    for call, tree in recorded_run.draft_trees():
        name = f"{run}_call{call}"
        np.testing.assert_array_equal(tree.tokens + code_offset, golden[f"{name}_draft_tokens"][0])
        np.testing.assert_array_equal(tree.tree_structure.ancestor_mask, golden[f"{name}_tree_mask"][0, 0] > 0)
        np.testing.assert_array_equal(tree.tree_structure.depths, golden[f"{name}_tree_position_ids"])
        leaves = {tuple(int(n) for n in row if n >= 0) for row in golden[f"{name}_retrieve_indices"]}
        assert {tuple(tree.path_to(n)) for n in range(tree.num_nodes) if not tree.tree_structure.children[n]} == leaves


@pytest.mark.parametrize(("family", "run"), STATIC_RUNS)
def test_static_draft_trees_hold_the_published_top_tokens(recorded_run: RecordedRun, run: str) -> None:
    indices = STATIC_TREES[run.removeprefix("static_")]["verify"]["tree_indices"]
    code_offset = recorded_run.family.layout.code_offset
    for call, tree in recorded_run.draft_trees():
        candidates = np.append(
            tree.tokens[:1] + code_offset, recorded_run.family.golden[f"{run}_call{call}_tokens"].ravel()
        )
        np.testing.assert_array_equal(tree.tokens + code_offset, candidates[indices])


# ---------------------------------------------------------------- whole generations

Trace = dict[str, Any]
LoadedPrompts = tuple[LoadedModel, RasterLayout, list[Prompt]]
STATIC_TREE_NAMES = {"naive_extend_57": "naive-57", "mc_sim_7b_63": "mc-25"}
BUNDLES = {  # folder of recordings: file of the traces, and fixture of the bundle
    "lantern-e2e-llamagen": ("steps.json", "t2i_drafter_bundle"),
    "lantern-e2e-llamagen-fullprefix": ("traces.json", "lantern_fullprefix_bundle"),  # prefix 120, grid 16 x 16
    "anole/e2e": ("traces.json", "anole_bundle"),
}
TRACES: dict[str, list[Trace]] = {
    folder: json.loads((DATA / folder / name).read_text()) for folder, (name, _) in BUNDLES.items()
}
TRACE_NAMES = [(folder, name) for folder in TRACES for name in dict.fromkeys(trace["name"] for trace in TRACES[folder])]
FIRST_CODE = 4  # id of code 0 among Anole's tokens
ANOLE_CODES = 36
EXTRA_CODES = 64  # the published loop generates tokens past the end of an image


def load_llamagen(bundle: Path, folder: str) -> LoadedPrompts:
    arrays = np.load(DATA / folder / "golden.npz")
    engines = BundleEngines(open_bundle(bundle))
    manifest = open_bundle(bundle).manifest
    layout = DrafterLayout(position_shift=-1, masks_prefix=False)
    image = RasterLayout(manifest.codes_per_image + EXTRA_CODES)
    neighbors = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
    model = LoadedModel(engines.target, engines.drafter, manifest.target.max_positions, layout, neighbors)
    cond, uncond = engines.compute_condition(
        {"caption_embeds": arrays["caption_emb"], "caption_mask": arrays["emb_mask"]}
    )
    is_real_token = arrays["emb_mask"] > 0
    return (
        model,
        image,
        [
            Prompt(PrefixRow(cond[i], is_row_real), PrefixRow(uncond[i], is_row_real))
            for i, is_row_real in enumerate(is_real_token)
        ],
    )


def load_anole_prompts(bundle: Path, folder: str) -> LoadedPrompts:
    engines = BundleEngines(open_bundle(bundle))
    positions = open_bundle(bundle).manifest.target.max_positions
    neighbors = np.load(DATA / "chameleon-vqgan" / "top_127_indices.npy")
    layout = DrafterLayout(code_offset=FIRST_CODE)
    model = LoadedModel(engines.target, engines.drafter, positions, layout, neighbors)
    prompts = []
    for trace in TRACES[folder][:3]:
        cond = np.array([0, *trace["prompt_text_ids"], 140, 133])
        uncond = np.array([0, 133])
        prefix_rows = engines.compute_condition({"token_ids": cond[None], "uncond_ids": uncond[None]})
        rows_with_ids = zip(prefix_rows, (cond, uncond), strict=True)
        prompts.append(Prompt(*(PrefixRow(row[0], np.ones(len(ids), bool), ids) for row, ids in rows_with_ids)))
    return model, RasterLayout(ANOLE_CODES + EXTRA_CODES), prompts


@pytest.fixture(scope="module")
def load_model(request: pytest.FixtureRequest) -> Callable[[str], LoadedPrompts]:
    models: dict[str, LoadedPrompts] = {}

    def load(folder: str) -> LoadedPrompts:
        if folder not in models:
            bundle = request.getfixturevalue(BUNDLES[folder][1])
            models[folder] = (load_anole_prompts if folder == "anole/e2e" else load_llamagen)(bundle, folder)
        return models[folder]

    return load


def select_traces(folder: str, name: str) -> list[Trace]:
    """Return the recorded generations of this name, in the order of the prompts."""
    return sorted((trace for trace in TRACES[folder] if trace["name"] == name), key=lambda trace: trace["prompt"])


def make_published_method(trace: Trace) -> MethodConfig:
    if trace["name"] == "ar":
        return Autoregressive()
    tree = STATIC_TREE_NAMES[trace.get("tree", "naive_extend_57")] if trace["static"] else "dynamic-59-5-10"
    if not trace["lantern"]:
        return Eagle(tree=tree)
    relaxation: dict[str, Any] = {"tree": tree, "neighbors": trace["k"], "residual": "neighborhood"}
    if trace["delta"] <= 1:
        return Lantern(delta=trace["delta"], **relaxation)
    return LanternPlusPlus(lambda_=float(trace["delta"]), **relaxation)


@pytest.mark.parametrize(("folder", "name"), TRACE_NAMES)
def test_greedy_generations_follow_the_published_trace(
    load_model: Callable[[str], LoadedPrompts], folder: str, name: str
) -> None:
    """Generate all prompts in one batch; prompts of Anole differ in length."""
    (model, image, prompts) = load_model(folder)
    traces = select_traces(folder, name)
    code_offset = model.layout.code_offset
    max_length = traces[0]["max_length"]
    sampling = Sampling(cfg_scale=traces[0]["cfg_scale"], temperature=0.0)
    ids: list[list[int]] = [[] for _ in prompts]
    accepted_counts: list[list[int]] = [[] for _ in prompts]
    method = make_published_method(traces[0])
    for step in decode(model, Plan(image, sampling, method, count_draft_nodes(method)), prompts, range(len(prompts))):
        for generated_part in step.parts:
            if len(ids[generated_part.sequence]) >= max_length:
                continue
            trace = traces[generated_part.sequence]
            step_number = len(accepted_counts[generated_part.sequence])
            ids[generated_part.sequence] += (generated_part.codes + code_offset).tolist()
            if generated_part.tree is None or generated_part.acceptance is None:
                continue
            expected = trace["steps"][step_number]
            assert int(generated_part.tree.tokens[0]) + code_offset == expected["root"]
            assert (generated_part.codes + code_offset).tolist() == [*expected["accepted"], expected["next_token"]]
            if not trace["static"]:
                assert (generated_part.tree.tokens + code_offset).tolist() == trace["tree_tokens"][step_number]
            accepted_counts[generated_part.sequence].append(len(generated_part.acceptance.path) - 1)
        if all(len(image_ids) >= max_length for image_ids in ids):
            break
    assert [image_ids[:max_length] for image_ids in ids] == [trace["ids"] for trace in traces]
    if name != "ar":
        for accepted_lengths, trace in zip(accepted_counts, traces, strict=True):
            assert accepted_lengths == trace["accept_lengths"][: len(accepted_lengths)]
            assert (
                1 + sum(accepted_lengths) + len(accepted_lengths) >= max_length
            )  # the prefill's token, then accepted tokens and bonus of each step


# ---------------------------------------------------------------- Anole as a user runs it


@pytest.fixture(scope="module")
def pipe(anole_bundle: Path) -> Pipeline:
    return Pipeline.from_bundle(anole_bundle, threads=1)


def make_prompt_text(trace: Trace) -> str:
    return " ".join(f"tok{token}" for token in trace["prompt_text_ids"])


@pytest.mark.parametrize("name", ["ar", "eagle2_dynamic_exact", "lantern_k40_d0.6"])
def test_anole_text_prompts_generate_the_published_tokens(pipe: Pipeline, name: str) -> None:
    traces = select_traces("anole/e2e", name)
    result = pipe([make_prompt_text(trace) for trace in traces], temperature=0, method=make_published_method(traces[0]))
    assert result.settings.sampling.cfg_scale == 3.0
    assert [(codes[:ANOLE_CODES] + FIRST_CODE).tolist() for codes in result.codes] == [trace["ids"] for trace in traces]
    assert [image.size for image in result.images] == [(32, 32)] * 3


@pytest.mark.parametrize("method", ["ar", "eagle", "lantern", "lantern++"])
def test_anole_images_do_not_depend_on_the_batch(pipe: Pipeline, method: str) -> None:
    texts = ["tok145", " ".join(["tok150 tok151"] * 40), *map(make_prompt_text, select_traces("anole/e2e", "ar"))]
    batch_result = pipe(texts, seed=[1, 2, 3, 4, 5], method=method, top_k=50)
    for i, text in enumerate(texts):
        alone = pipe(text, seed=i + 1, method=method, top_k=50)
        assert alone.codes[0].tolist() == batch_result.codes[i].tolist()
        assert alone.images[0].tobytes() == batch_result.images[i].tobytes()


# ---------------------------------------------------------------- LlamaGen as a user runs it


def test_llamagen_prompts_are_left_padded_as_published(
    t2i_drafter_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_bundle(t2i_drafter_bundle, threads=1)
    golden = np.load(DATA / "lantern-e2e-llamagen/golden.npz")
    condition_inputs: list[dict[str, Any]] = []
    condition = pipe.engines.compute_condition
    monkeypatch.setattr(
        pipe.engines, "compute_condition", lambda inputs: condition_inputs.append(inputs) or condition(inputs)
    )
    next(pipe.stream(embeddings=(golden["t5_embeddings"], golden["t5_mask"])))
    assert len(condition_inputs) == len(golden["emb_mask"])
    for inputs, mask, embeds in zip(condition_inputs, golden["emb_mask"], golden["caption_emb"], strict=True):
        np.testing.assert_array_equal(inputs["caption_mask"][0], mask)
        np.testing.assert_array_equal(inputs["caption_embeds"][0], embeds * mask[:, None])
