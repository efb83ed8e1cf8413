"""Lumina-mGPT 2.0: exported graphs, prompts, sizes and guidance compared with every recorded array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_copies import copy_checkpoint
from family_readers import read_lumina2
from goldens import DATA, PromptRunner, assert_close, load_golden, read_manifest
from numpy.typing import NDArray

from lantern_rt import Pipeline
from lantern_rt.export.compare import GraphFileSession
from lantern_rt.methods import Sampling
from lantern_rt.runtime.guidance import Guidance
from lantern_rt.runtime.raster import RowEndLayout
from lantern_rt.text.tokenizers import load_tokenizer

FOLDER = DATA / "lumina-mgpt-2"
CODES = slice(367, 463)
TRACES: list[dict[str, Any]] = json.loads((FOLDER / "traces.json").read_text())
PROTOCOL: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text())
ARRAYS = load_golden("lumina-mgpt-2")


def convert_to_pixels(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the encoder's input `[1, 3, height, width]`, -1 to 1, of an image `[height, width, 3]`, 0 to 255."""
    return (image.astype(np.float32) / 255 * 2 - 1).transpose(2, 0, 1)[None]


def get_name(trace: dict[str, Any]) -> str:
    return str(trace["name"])


@pytest.mark.parametrize("trace", TRACES, ids=get_name)
def test_guided_scores_of_every_code_equal_the_recorded_scores(lumina2_bundle: Path, trace: dict[str, Any]) -> None:
    """Compare logits after guidance. The guidance scale changes at every token, also at forced row ends."""
    ids = trace["generated_ids"]
    size_tokens = 0 if trace["name"] == "i2i" else 3  # begin of image and image size, without guidance
    uncond = trace["unconditional_prefix"]
    runs = PromptRunner(lumina2_bundle, [*trace["prompt_ids"], *ids[:size_tokens]], uncond)
    logits = runs.compute_logits(ids[size_tokens:])
    name = f"{trace['name']}_code_scores"
    expected = ARRAYS[name] if name in ARRAYS else ARRAYS[f"{trace['name']}_scores"][size_tokens:, CODES]
    layout = RowEndLayout(np.size(trace["codes"]), trace["latent"][1], row_end=1)
    sampling = Sampling(cfg_scale=trace["cfg"], cfg_final=4.0)
    guidance = Guidance(sampling, layout)
    free_indices = np.flatnonzero(np.array(trace["forced"][size_tokens:]) == 0)
    cells = np.arange(layout.num_codes - len(free_indices), layout.num_codes)
    if uncond is not None:
        used_scales = np.array(trace["scale_used"])[size_tokens:][free_indices]
        np.testing.assert_allclose(used_scales, guidance.scales(cells), rtol=1e-6)
    guided = guidance.mix_logits(logits[:, free_indices], cells)
    assert_close(guided, expected[free_indices], 1e-5 * max(30, 10 * trace["cfg"]))
    assert guided.argmax(-1).tolist() == np.ravel(trace["codes"])[cells].tolist()


@pytest.mark.parametrize("case", PROTOCOL["prompt_cases"], ids=lambda case: repr(case["text"][-20:]))
def test_prompts_have_the_token_ids_of_the_published_program(lumina2_bundle: Path, case: dict[str, Any]) -> None:
    layout = read_manifest(lumina2_bundle).condition.layout
    assert layout is not None
    library = load_tokenizer(lumina2_bundle / "tokenizer.json")
    ids = library.encode(case["text"], add_special_tokens=False).ids
    assert [*layout.before, *ids, *layout.after] == case["prompt_ids"]
    head, _, caption = case["text"].partition("\n")
    if head == "Generate an image of 64x64 according to the following prompt:" and caption:
        with Pipeline.from_bundle(lumina2_bundle, threads=1) as pipe:
            (image,) = pipe.check(caption, size="64x64").images
        cond, uncond = (row.tokens for row in image.prefix)
        assert cond is not None
        assert uncond is not None
        assert uncond.tolist() == TRACES[0]["unconditional_prefix"]
        assert cond.tolist() == [*case["prompt_ids"], *uncond]


def test_in_a_large_vocabulary_codes_begin_at_token_155000(tmp_path: Path) -> None:
    def enlarge_vocabulary(weights: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            old_weight = weights[name]
            weights[name] = torch.zeros(171392, old_weight.shape[1], dtype=old_weight.dtype)
            weights[name][: CODES.start] = old_weight[: CODES.start]
            weights[name][155000 : 155000 + CODES.stop - CODES.start] = old_weight[CODES]

    folders = (
        FOLDER / "model",
        copy_checkpoint(FOLDER / "model", tmp_path / "model", enlarge_vocabulary, vocab_size=171392),
    )
    small, large = (read_lumina2(folder, FOLDER / "movqgan/270M", grid=8) for folder in folders)
    assert torch.equal(small.code_embeddings, large.code_embeddings)
    heads = [model.graphs[0].module.head.weight for model in (small, large)]
    assert torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("start", [3, 4, 6, 7.5, 12])
def test_guidance_scales_equal_the_published_scales(start: float) -> None:
    layout = RowEndLayout(96 * 96, 96, row_end=1)
    expected = ARRAYS[f"official_scale_{start}_24x24"]
    guidance = Guidance(Sampling(cfg_scale=start, cfg_final=4.0), layout)
    cells = [cell for cell in range(layout.num_codes) if layout.find_token_position(cell) < len(expected)]
    positions = [layout.find_token_position(cell) for cell in cells]
    np.testing.assert_allclose(guidance.scales(cells), expected[positions], rtol=1e-6)


def test_a_preserved_half_encodes_to_the_recorded_codes(lumina2_bundle: Path) -> None:
    trace = next(trace for trace in TRACES if trace["name"] == "i2i")
    encoder = GraphFileSession(lumina2_bundle / "vq_encoder.onnx")
    codes = encoder.run({"images": convert_to_pixels(ARRAYS["i2i_input_uint8"])})["codes"]
    assert codes.reshape(trace["given_rows"], -1).tolist() == trace["codes"][: trace["given_rows"]]
