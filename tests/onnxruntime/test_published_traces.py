"""Whole greedy generations of the published LANTERN code on LlamaGen and Anole, through the exported graphs.

The published loop commits a step's bonus code with the next step, and stops once it has passed the length: it may run
one or two more steps than ours, whose codes are all cut off. It pads Anole's unconditional row; here that is short.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern_rt import Pipeline, open_bundle
from lantern_rt.engines.loader import Engines
from lantern_rt.methods import Ar, Eagle, Lantern, LanternPlusPlus, MethodConfig, Sampling
from lantern_rt.runtime.decode import decode
from lantern_rt.runtime.state import DrafterLayout, Model, PrefixRow, Prompt

Trace = dict[str, Any]
Loaded = tuple[Model, list[Prompt]]
DATA = Path(__file__).parent.parent / "data"
BUNDLES = {  # recorded runs, the file of their traces, and the bundle they ran on
    "lantern-e2e-llamagen": ("steps.json", "t2i_drafter_bundle"),
    "lantern-e2e-llamagen-fullprefix": ("traces.json", "lantern_fullprefix_bundle"),  # prefix 120, grid 16 x 16
    "anole/e2e": ("traces.json", "anole_bundle"),
}
TRACES: dict[str, list[Trace]] = {
    folder: json.loads((DATA / folder / name).read_text()) for folder, (name, _) in BUNDLES.items()
}
NAMES = [(folder, name) for folder in TRACES for name in dict.fromkeys(trace["name"] for trace in TRACES[folder])]
TREES = {"naive_extend_57": "naive-57", "mc_sim_7b_63": "mc-25"}
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
    sizes = manifest.codes_per_image + BEYOND, manifest.target.max_positions
    neighbors = np.load(DATA / "lantern-accept" / "top_127_indices.npy")
    model = Model(engines.target, engines.drafter, *sizes, layout, neighbors=neighbors)
    cond, uncond = engines.condition({"caption_embeds": arrays["caption_emb"], "caption_mask": arrays["emb_mask"]})
    real = arrays["emb_mask"] > 0
    return model, [Prompt(PrefixRow(cond[i], own), PrefixRow(uncond[i], own)) for i, own in enumerate(real)]


def load_anole(bundle: Path, folder: str) -> Loaded:
    engines, positions = Engines(open_bundle(bundle)), open_bundle(bundle).manifest.target.max_positions
    neighbors, layout = np.load(DATA / "chameleon-vqgan" / "top_127_indices.npy"), DrafterLayout(code_offset=FIRST_CODE)
    model = Model(engines.target, engines.drafter, ANOLE_CODES + BEYOND, positions, layout, neighbors=neighbors)
    prompts = []
    for trace in TRACES[folder][:3]:
        cond, uncond = np.array([0, *trace["prompt_text_ids"], 140, 133]), np.array([0, 133])
        rows = engines.condition({"token_ids": cond[None], "uncond_ids": uncond[None]})
        sides = zip(rows, (cond, uncond), strict=True)
        prompts.append(Prompt(*(PrefixRow(row[0], np.ones(len(ids), bool), ids) for row, ids in sides)))
    return model, prompts


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
    tree = TREES[trace.get("tree", "naive_extend_57")] if trace["static"] else "dynamic-59-5-10"
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
    (model, prompts), traces = loaded(folder), traces_of(folder, name)
    first, most = model.layout.code_offset, traces[0]["max_length"]
    sampling = Sampling(cfg_scale=traces[0]["cfg_scale"], temperature=0.0)
    ids: list[list[int]] = [[] for _ in prompts]
    lengths: list[list[int]] = [[] for _ in prompts]
    for step in decode(model, prompts, range(len(prompts)), sampling, published_method(traces[0])):
        for part in step.parts:
            if len(ids[part.request]) >= most:
                continue
            trace, number = traces[part.request], len(lengths[part.request])
            ids[part.request] += (part.codes + first).tolist()
            if part.tree is None or part.acceptance is None:
                continue
            expected = trace["steps"][number]
            assert int(part.tree.tokens[0]) + first == expected["root"]
            assert (part.codes + first).tolist() == [*expected["accepted"], expected["next_token"]]
            if not trace["static"]:
                assert (part.tree.tokens + first).tolist() == trace["tree_tokens"][number]
            lengths[part.request].append(len(part.acceptance.path) - 1)
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
