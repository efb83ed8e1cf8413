"""NAR's and PAR's exported graphs and images compared with the recorded logits and runs of the published programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import VQ, copy_json
from family_readers import read_nar, read_par
from goldens import DATA, GUIDED_TOLERANCE, Arrays, assert_close, load_golden
from guided_logits import make_sampler, mix_guided_logits
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.bundle.order import GroupOrderSpec
from lantern_rt.export.families.nar import make_diagonal_order
from lantern_rt.export.families.par import make_parallel_order
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.prepared import load_model
from lantern_rt.runtime.groups import GroupLayout
from lantern_rt.runtime.likelihood import compute_sequence_logits
from lantern_rt.runtime.statistics import EngineTimer

Trace = dict[str, Any]


@dataclass(frozen=True)
class GroupFamily:
    """A model family that generates groups of cells, and its recordings.

    Attributes:
        grids: sizes of the recorded grids by model.
        in_raster_order: whether arrays are recorded in raster order; otherwise in order of generation.
    """

    name: str
    read: Callable[..., Any]
    grids: dict[str, tuple[int, ...]]
    in_raster_order: bool

    @cached_property
    def arrays(self) -> Arrays:
        return load_golden(self.name)

    @cached_property
    def traces(self) -> list[Trace]:
        traces: list[Trace] = json.loads((DATA / self.name / "traces.json").read_text())
        return traces


NAR = GroupFamily("nar", read_nar, {"c2i": (4, 6, 8), "t2i": (4, 6)}, in_raster_order=True)
PAR = GroupFamily("par", read_par, {"4x": (4, 6, 8), "16x": (8, 12)}, in_raster_order=False)
CASES = [(family, model, grid) for family in (NAR, PAR) for model, grids in family.grids.items() for grid in grids]
RUNS = [(family, trace) for family in (NAR, PAR) for trace in family.traces]


def is_requestable(trace: Trace) -> bool:
    """Return whether a request can have the guidance of a run; some runs stop guidance and later resume it."""
    guided = trace.get("guided", [])
    return sorted(guided, reverse=True) == guided


GREEDY = [(family, trace) for family, trace in RUNS if not trace["sample"] and is_requestable(trace)]


def get_id(value: Any) -> str | None:
    return str(value["name"]) if isinstance(value, dict) else getattr(value, "name", None)


@pytest.fixture(scope="module")
def open_pipe(export_once: Any) -> Callable[[GroupFamily, str, int], Pipeline]:
    """Return a function that opens a model's pipeline; the image tokenizer is cut to the model's number of codes."""
    pipelines: dict[tuple[str, str, int], Pipeline] = {}

    def export(family: GroupFamily, model: str, grid: int, output: Path) -> Path:
        folder = DATA / family.name / model
        config = copy_json(folder / "config.json", output.parent / "config.json", block_size=grid**2)
        vq = torch.load(VQ, weights_only=True)
        codes = json.loads(config.read_text())["vocab_size"]
        vq["model"]["quantize.embedding.weight"] = vq["model"]["quantize.embedding.weight"][:codes]
        torch.save(vq, output.parent / "vq.pt")
        contents = family.read(folder / f"{family.name}_{model}.pt", output.parent / "vq.pt", config=config)
        return export_model(contents, output)

    def open_pipe(family: GroupFamily, model: str, grid: int) -> Pipeline:
        key = family.name, model, grid
        if key not in pipelines:
            bundle = export_once(f"{family.name}_{model}_{grid}/bundle", partial(export, family, model, grid))
            pipelines[key] = Pipeline.from_bundle(bundle, threads=1)
        return pipelines[key]

    return open_pipe


OpenPipe = Callable[[GroupFamily, str, int], Pipeline]


def list_prompts(family: GroupFamily, trace: Trace) -> list[dict[str, Any]]:
    if "class_ids" in trace:
        return [{"class_ids": class_id} for class_id in trace["class_ids"]]
    arrays = family.arrays
    embeddings = arrays["t2i_t5_embeddings"]
    mask = arrays["t2i_t5_mask"]
    if not trace["text_mask"]:  # the padding counts as text
        embeddings = arrays["t2i_caption_emb"]
        mask = np.ones_like(arrays["t2i_emb_mask"])
    return [{"embeddings": (embeddings[[caption]], mask[[caption]])} for caption in trace["captions"]]


def merge_prompts(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    if "class_ids" in prompts[0]:
        return {"class_ids": [prompt["class_ids"] for prompt in prompts]}
    return {"embeddings": tuple(map(np.concatenate, zip(*(prompt["embeddings"] for prompt in prompts), strict=True)))}


def get_group_layout(pipe: Pipeline) -> GroupLayout:
    layout = pipe.bundle.manifest.layout()
    assert isinstance(layout, GroupLayout)
    return layout


def compute_logits(pipe: Pipeline, codes: NDArray[np.int64], prompt: dict[str, Any]) -> NDArray[np.float32]:
    """Compute the conditional and unconditional logits `[2, codes, vocabulary]` of an image."""
    model = load_model(pipe.bundle, pipe.engines, [])
    (rows,) = pipe.prepare(pipe.check(**prompt)).prompts()
    logits = compute_sequence_logits(model, get_group_layout(pipe), [rows.cond, rows.uncond], codes, EngineTimer())
    return np.concatenate([*logits], 1)


def mix_guided(logits: NDArray[np.float32], trace: Trace) -> NDArray[np.float32]:
    """Return the logits `[codes, vocabulary]` from which a recorded run sampled; some runs guide only some codes."""
    guidance = Sampling(cfg_scale=trace["cfg"])
    if not guidance.uses_guidance:
        return logits[0]
    is_guided = np.array(trace.get("guided", [1] * logits.shape[1]), bool)
    return np.where(is_guided[:, None], mix_guided_logits(logits, guidance), logits[0])


def sample_codes(logits: NDArray[np.float32], image: int, trace: Trace) -> list[int]:
    if not trace["sample"]:
        return logits.argmax(1).tolist()
    sampling = Sampling(**{field: trace[field] for field in ("temperature", "top_k", "top_p")})
    cumulative = make_sampler(sampling).compute_distribution(logits).cumsum(1)
    return (cumulative / cumulative[:, -1:] <= np.array(trace["uniform"][image])[:, None]).sum(1).tolist()


@pytest.mark.parametrize(
    ("family", "model", "grid", "num_groups"),
    [
        *((family, model, grid, None) for family, model, grid in CASES),
        (NAR, "c2i", 16, 31),
        (NAR, "t2i", 32, 63),
        (PAR, "4x", 24, 147),
        (PAR, "16x", 24, 51),
    ],
    ids=get_id,
)
def test_cells_are_generated_in_the_published_order(
    family: GroupFamily, model: str, grid: int, num_groups: int | None
) -> None:
    spec: GroupOrderSpec | None = make_diagonal_order(grid)
    if family is PAR:
        spec = make_parallel_order(grid, 4 if model == "4x" else 16)
    assert spec is not None
    assert len(spec.groups) == (num_groups or len(spec.groups))
    cells = np.array([cell for group in spec.groups for cell in group])
    passes = np.repeat(np.arange(len(spec.groups)), [len(group) for group in spec.groups])
    recorded = family.arrays[f"{model}_g{grid}_order"]
    assert cells.tolist() == (recorded if family is NAR else recorded @ [grid, 1]).tolist()
    np.testing.assert_array_equal(
        passes[np.argsort(cells)] if family.in_raster_order else passes, family.arrays[f"{model}_g{grid}_pass"]
    )


@pytest.mark.parametrize(("family", "trace"), RUNS, ids=get_id)
def test_logits_of_a_run_lead_to_the_recorded_tokens(open_pipe: OpenPipe, family: GroupFamily, trace: Trace) -> None:
    pipe = open_pipe(family, trace["model"], trace["grid"])
    cells = get_group_layout(pipe).generation_order
    recorded = {part: family.arrays.get(f"{trace['name']}_{part}_logits") for part in ("used", "cond", "uncond")}
    for i, (prompt, raster) in enumerate(zip(list_prompts(family, trace), trace["raster"], strict=True)):
        codes = np.array(raster)[cells]
        assert codes.tolist() == trace.get("ids", {i: codes.tolist()})[i]
        logits = compute_logits(pipe, codes, prompt)
        if family.in_raster_order:
            logits = logits[:, np.argsort(cells)]
        guided = mix_guided(logits, trace)
        if recorded["used"] is not None:
            assert_close(guided, recorded["used"][i], GUIDED_TOLERANCE)
        if recorded["cond"] is not None and recorded["uncond"] is not None:
            assert_close(logits, np.stack([recorded["cond"][i], recorded["uncond"][i]]))
        assert sample_codes(guided[cells] if family.in_raster_order else guided, i, trace) == codes.tolist()


@pytest.mark.parametrize(("family", "trace"), GREEDY, ids=get_id)
def test_greedy_images_alone_and_batched_equal_the_recordings(
    open_pipe: OpenPipe, family: GroupFamily, trace: Trace
) -> None:
    pipe = open_pipe(family, trace["model"], trace["grid"])
    count = sum(trace.get("guided", []))
    generate = partial(pipe, cfg_scale=trace["cfg"], temperature=0, cfg_tokens=count or None, top_k=0)
    prompts = list_prompts(family, trace)
    result = generate(**merge_prompts(prompts))
    assert [codes.tolist() for codes in result.codes] == trace["raster"]
    larger_batch = generate(**merge_prompts([prompts[-1], *prompts, prompts[0]]), method="groups")
    assert [codes.tolist() for codes in larger_batch.codes[1:-1]] == trace["raster"]
    for prompt, raster in zip(prompts, trace["raster"], strict=True):
        single_result = generate(**prompt, method="ar")
        assert single_result.codes[0].tolist() == raster
        assert single_result.stats.target_passes == len(get_group_layout(pipe).groups)


@pytest.mark.parametrize("options", ["int8", "int4-weights", "fp16 --compute float16", "bf16 --compute bfloat16"])
def test_rounded_nar_bundles_pass_verify_and_batch_alike(program: Any, options: str) -> None:
    target = DATA / "nar/c2i/nar_c2i.pt"
    files = {"--target": target, "--vq": VQ, "--config": target.with_name("config.json")}
    arguments = [part for pair in files.items() for part in pair]
    code, _, err = program("export", "--family", "nar", *arguments, "--precision", *options.split(), "--output", "nar")
    assert code == 0, err
    code, out, _ = program("verify", "nar", *files.values())
    assert (code, out.strip().endswith("passed")) == (0, True)
    pipe = Pipeline.from_bundle(Path("nar"), threads=1)
    batch_result = pipe(class_ids=[3, 5, 3], seed=[1, 2, 3])
    assert batch_result.codes[1].tolist() == pipe(class_ids=5, seed=2).codes[0].tolist()
