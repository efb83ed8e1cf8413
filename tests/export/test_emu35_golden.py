"""Comparisons of Emu3.5-Image's exported graphs, prompts and image tokenizer with arrays of the published program.

The tests omit recordings of features that the product lacks: text generation, sizes that the model chooses, and image
to image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import EMU35, EMU35_VQ, copy_checkpoint
from family_readers import read_emu35
from goldens import (
    DATA,
    GUIDED_TOLERANCE,
    PromptRunner,
    assert_close,
    load_golden,
    log_softmax,
    mix_guided,
)
from guided_logits import make_sampler
from numpy.typing import NDArray
from safetensors.torch import load_file

from lantern_rt import Pipeline
from lantern_rt.export.families import emu35
from lantern_rt.export.model import BundleContents
from lantern_rt.methods import Sampling
from lantern_rt.subjects.base import RequestContext
from lantern_rt.subjects.prompts import Text
from lantern_rt.text.tokenizers import TemplateTokenizer, parse_tokenizer

ARRAYS = load_golden("emu3.5")
TRACES: list[dict[str, Any]] = json.loads((DATA / "emu3.5/traces.json").read_text())
PROTOCOL: dict[str, Any] = json.loads((DATA / "emu3.5/protocol.json").read_text())
CODES = slice(557, 653)  # token ids of the codes
SIZES = ((4, 5), (5, 3), (2, 12), (10, 11))  # rows and columns of the grids in the recorded runs
GREEDY = [trace for trace in TRACES if trace["task"] == "t2i" and trace["name"] != "sample"]
GREEDY_WITHOUT_TEXT = [trace for trace in GREEDY if trace["image_starts_at"] == 0]  # no text before the image
SAMPLE = next(trace for trace in TRACES if trace["name"] == "sample")


def read_model_with_small_sizes(vq: Path = EMU35_VQ) -> BundleContents:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emu35, "SIZES", SIZES)
        return read_emu35(EMU35, vq)


def get_trace_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


# ---------------------------------------------------------------- whole images


def read_image_ids(trace: dict[str, Any]) -> list[int]:
    """Return the token ids of a run from the begin-of-image token to the last code."""
    ids: list[int] = trace["generated_ids"][trace["image_starts_at"] :]
    return ids[: ids.index(556)]  # 556 is the token after the image


def compute_guided_logits(bundle: Path, trace: dict[str, Any]) -> NDArray[np.float32]:
    ids = read_image_ids(trace)
    text = trace["generated_ids"][: trace["image_starts_at"]]
    start = ids.index(554) + 1  # 554 is the token before the first code
    prompts = ([*trace["prompt_ids"], *text], trace["unconditional_prompt_ids"])
    runs = PromptRunner(bundle, *([*prompt, *ids[:start]] for prompt in prompts))
    logits = mix_guided(runs.compute_logits(ids[start:]), trace["cfg"])
    return logits[np.array(ids[start:]) >= CODES.start]  # without the logits of row ends


@pytest.mark.parametrize("trace", GREEDY, ids=get_trace_name)
def test_greedy_runs_have_the_recorded_scores_and_codes(emu35_bundle: Path, trace: dict[str, Any]) -> None:
    scores = compute_guided_logits(emu35_bundle, trace)
    recorded = ARRAYS[f"{trace['name']}_code_scores"]
    assert_close(log_softmax(scores[: len(recorded)]), log_softmax(recorded), GUIDED_TOLERANCE)
    assert scores.argmax(1).reshape(trace["grid"]).tolist() == trace["codes"]


def test_greedy_images_alone_and_batched_have_the_recorded_codes(emu35_bundle: Path) -> None:
    assert len(GREEDY_WITHOUT_TEXT) == 4
    with Pipeline.from_bundle(emu35_bundle, threads=1) as pipe:
        for trace in GREEDY_WITHOUT_TEXT:
            rows, columns = trace["grid"]
            size = f"{16 * columns}x{16 * rows}"
            options: dict[str, Any] = {"temperature": 0, "cfg_scale": trace["cfg"], "size": size}
            (image_codes,) = pipe(trace["caption"], **options).codes
            assert image_codes.reshape(rows, columns).tolist() == trace["codes"]
            batch_codes = pipe(["a cup", trace["caption"]], method="sjd:window=4", **options).codes
            assert batch_codes[1].tolist() == image_codes.tolist()


def test_sampling_has_the_recorded_distributions_and_codes(emu35_bundle: Path) -> None:
    sampling = Sampling(temperature=SAMPLE["image_temperature"], top_k=SAMPLE["image_top_k"])
    probabilities = make_sampler(sampling).compute_distribution(compute_guided_logits(emu35_bundle, SAMPLE))
    columns = SAMPLE["grid"][1]
    ids = np.array(read_image_ids(SAMPLE))
    is_code = ids >= CODES.start
    start = ids.tolist().index(554) + 1  # 554 is the token before the first code
    # The recording has two grid rows, each with a row end.
    expected = ARRAYS["sample_code_probs"][is_code[start : start + 2 * columns + 2]]
    assert_close(probabilities[: 2 * columns], expected.astype(np.float64))
    uniform = np.array(SAMPLE["uniform"])[SAMPLE["image_starts_at"] :][: len(ids)][is_code]
    cumulative = probabilities.cumsum(1)
    sampled_codes = (cumulative / cumulative[:, -1:] <= uniform[:, None]).sum(1)
    assert sampled_codes.reshape(SAMPLE["grid"]).tolist() == SAMPLE["codes"]


# ---------------------------------------------------------------- image tokenizer


def get_weight_bytes(module: torch.nn.Module) -> list[tuple[str, bytes]]:
    return [(name, value.numpy().tobytes()) for name, value in module.state_dict().items()]


def test_safetensors_and_ckpt_give_the_same_image_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "vq"
    folder.mkdir()
    torch.save({"state_dict": load_file(EMU35_VQ / "model.safetensors")}, folder / "model.ckpt")
    weights = []
    for vq in (EMU35_VQ, folder, folder / "model.ckpt"):
        graphs = read_model_with_small_sizes(vq).graphs[2:]  # the graphs of the image tokenizer
        weights.append({(graph.role, *entry) for graph in graphs for entry in get_weight_bytes(graph.module)})
    assert len(weights[0]) > 50
    assert weights[0] == weights[1] == weights[2]


# ---------------------------------------------------------------- prompts and sizes


def test_prompts_have_the_recorded_token_ids() -> None:
    model = read_model_with_small_sizes()
    condition = model.manifest_fields["condition"]
    sizes = model.manifest_fields["sizes"]
    tokenizer = TemplateTokenizer(parse_tokenizer(model.extra_files["tokenizer"][1]))
    cases = [case for case in PROTOCOL["prompt_cases"] if case["text"]]
    context = RequestContext(condition, tokenizer, sizes[0], uses_guidance=True)
    prompts = Text.read([case["text"] for case in cases], context)
    assert len(cases) > 10
    end = [555, *sizes[0].tokens]  # begin of image, then the tokens of the size
    for case, prompt in zip(cases, prompts, strict=True):
        assert prompt.prefix.cond.inputs["token_ids"][0].tolist() == [*case["prompt_ids"], *end]
        assert prompt.prefix.cond.inputs["uncond_ids"][0].tolist() == [*PROTOCOL["unconditional_prompt_ids"], *end]


def test_sizes_and_default_settings_equal_the_published_values(tmp_path: Path) -> None:
    large = copy_checkpoint(EMU35, tmp_path / "large", config=lambda config: config.pop("max_position_embeddings"))
    manifest_fields = read_emu35(large, EMU35_VQ).manifest_fields
    published = [(size["rows"], size["columns"]) for size in PROTOCOL["sizes"]]
    assert [(size.rows, size.columns) for size in manifest_fields["sizes"]] == published[:-1]
    assert (manifest_fields["grid_rows"], manifest_fields["grid_columns"]) == published[-1] == (55, 73)
    assert (manifest_fields["image_width"], manifest_fields["image_height"]) == (1168, 880)
    defaults = PROTOCOL["defaults"]
    assert manifest_fields["sampling"] == Sampling(
        cfg_scale=defaults["cfg"], top_k=defaults["sampling_params"]["image_top_k"]
    )
