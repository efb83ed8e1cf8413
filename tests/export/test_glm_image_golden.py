"""Comparisons of GLM-Image's graphs, prompts, sizes and sampling with arrays of the published program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_readers import read_glm_image
from goldens import DATA, GraphRunner, embed_tokens, load_golden, read_manifest
from guided_logits import make_sampler
from numpy.typing import NDArray

from lantern_rt.export.families import glm_image
from lantern_rt.methods import Sampling
from lantern_rt.text.tokenizers import load_tokenizer

FOLDER = DATA / "glm-image"
PARTS = ("vision_language_encoder", "processor")
ARRAYS = load_golden("glm-image")
TRACES: dict[str, dict[str, Any]] = {trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text())}
PROTOCOL: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text())
CODES = slice(0, 90)  # token ids of the codes
# With these weights the softmax of attention is sharp, so rounding errors have larger effects than in other families.
TOLERANCE = {"rtol": 0, "atol": 3e-4}


def get_first_position(bundle: Path, run: str) -> int:
    """Return the position of the first code in the bundle, for the image size of a recorded run."""
    rows, columns = TRACES[run]["large_grid"]
    size = next(size for size in read_manifest(bundle).sizes if (size.rows, size.columns) == (rows, columns))
    assert size.first_position is not None
    return size.first_position


class RecordedRun:
    def __init__(self, bundle: Path, run: str) -> None:
        ids = np.array(TRACES[run]["prompt_ids"])
        self.bundle = bundle
        self.graph_run = GraphRunner(bundle)
        self.first_prompt_position = get_first_position(bundle, run) - len(ids)
        self.prefill = self.step(ids)

    def step(self, ids: Any, depth: Any = None, **visible: Any) -> dict[str, NDArray[Any]]:
        """Run tokens after all previous tokens and return the outputs of the target's graph."""
        depths = np.arange(len(ids)) if depth is None else depth
        positions = self.first_prompt_position + self.graph_run.length + depths
        return self.graph_run.step(input_embeds=embed_tokens(self.bundle, ids), positions=positions, **visible)


def test_the_prompt_gives_the_recorded_logits_and_values(glm_image_bundle: Path) -> None:
    out = RecordedRun(glm_image_bundle, "run0").prefill
    np.testing.assert_allclose(out["logits"][0], ARRAYS["prefill_logits"][:, CODES], **TOLERANCE)
    values = np.stack([out[f"new_key_values.{i}.value"][:, 0] for i in range(3)]).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(values, ARRAYS["prefill_values"], **TOLERANCE)


def test_single_codes_and_a_draft_tree_have_the_recorded_outputs(glm_image_bundle: Path) -> None:
    recorded_run = RecordedRun(glm_image_bundle, "run0")
    steps = [recorded_run.step([token]) for token in ARRAYS["decode_tokens"]]
    logits, hidden = (np.concatenate([step[name][0] for step in steps]) for name in ("logits", "hidden_states"))
    np.testing.assert_allclose(logits, ARRAYS["decode_logits"][:, CODES], **TOLERANCE)
    np.testing.assert_allclose(hidden, ARRAYS["decode_hidden"], **TOLERANCE)
    check_tree(recorded_run, "tree")


def test_a_tree_across_the_small_grids_end_has_recorded_outputs(glm_image_bundle: Path) -> None:
    trace = TRACES["run0"]
    recorded_run = RecordedRun(glm_image_bundle, "run0")
    small_grid_cells = trace["small_grid"][0] * trace["small_grid"][1]
    recorded_run.step(trace["generated_ids"][: small_grid_cells - 2])
    check_tree(recorded_run, "seam_tree")


def check_tree(run: RecordedRun, name: str) -> None:
    visible = ARRAYS[f"{name}_mask"] > 0
    out = run.step(ARRAYS[f"{name}_tokens"], ARRAYS[f"{name}_depth"], visible=visible)
    np.testing.assert_allclose(out["logits"][0], ARRAYS[f"{name}_logits"][:, CODES], **TOLERANCE)
    np.testing.assert_allclose(out["hidden_states"][0], ARRAYS[f"{name}_hidden"], **TOLERANCE)


@pytest.mark.parametrize("run", ["run0", "run1", "run2"])
def test_whole_runs_have_the_recorded_logits_and_best_codes(glm_image_bundle: Path, run: str) -> None:
    trace = TRACES[run]
    recorded_run = RecordedRun(glm_image_bundle, run)
    ids = trace["generated_ids"]
    out = recorded_run.step(ids[:-1])
    logits = np.concatenate([recorded_run.prefill["logits"][0, -1:], out["logits"][0]])
    cells = len(ids) - 1  # the last id is the token after the image
    assert logits.argmax(-1)[:cells].tolist() == ids[:cells]
    small_grid_cells = trace["small_grid"][0] * trace["small_grid"][1]
    for name, recorded_codes in (
        ("logits", slice(0, None)),
        ("seam_logits", slice(small_grid_cells - 3, small_grid_cells + 3)),  # around the end of the small grid
        ("last_logits", slice(-3, None)),
    ):
        if f"{run}_{name}" in ARRAYS:
            np.testing.assert_allclose(logits[recorded_codes], ARRAYS[f"{run}_{name}"][:, CODES], **TOLERANCE)


@pytest.mark.parametrize("case", PROTOCOL["prompt_cases"], ids=lambda case: repr(case["prompt"][-15:]))
def test_prompts_have_the_recorded_token_ids_and_grids(glm_image_bundle: Path, case: dict[str, Any]) -> None:
    grid_shape = (case["height"] // 32, case["width"] // 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: [(2, 2), grid_shape])
        manifest_fields = read_glm_image(FOLDER, grid=2).manifest_fields
    layout = manifest_fields["condition"].layout
    size = manifest_fields["sizes"][1]
    ids = load_tokenizer(glm_image_bundle / "tokenizer.json").encode(case["prompt"], add_special_tokens=False).ids
    assert [*layout.before, *ids, *layout.after, *size.tokens] == case["prompt_ids"]
    assert [[1, *grid] for grid in (grid_shape, size.first_grid)] == case["grids"]


def test_grids_of_image_sizes_equal_the_published_grids() -> None:
    for height, width, rows, columns, first_rows, first_columns in ARRAYS["sizes"].tolist():
        assert (height // 32, width // 32) == (rows, columns)
        assert glm_image.compute_first_grid_shape(rows, columns) == (first_rows, first_columns)


def test_sampled_first_codes_have_the_recorded_probabilities() -> None:
    sampling = Sampling(temperature=0.9, top_k=98, top_p=0.75)
    probabilities = make_sampler(sampling).compute_distribution(ARRAYS["sample_first_logits"])
    np.testing.assert_allclose(probabilities, ARRAYS["sample_first_probs"], rtol=0, atol=1e-4)


def copy_with_edit(folder: Path, part: str, name: str, edit: Any) -> Path:
    shutil.copytree(FOLDER, folder / "glm")
    path = folder / "glm" / part / name
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder / "glm"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c.pop("top_k"), (0.9, 50, 0.75)),
        (lambda c: c.update(top_k=None, temperature=None), (1, 50, 0.75)),
        (lambda c: c.update(top_k=0, top_p=None), (0.9, 0, 1)),
        (lambda c: c.update(temperature=1, top_p=1), (1, 0, 1)),
    ],
    ids=["no top-k", "null", "zero", "whole numbers"],
)
def test_sampling_settings_mean_what_transformers_takes_them_for(
    tmp_path: Path, edit: Any, expected: tuple[float, int, float]
) -> None:
    folder = copy_with_edit(tmp_path, PARTS[0], "generation_config.json", edit)
    sampling = read_glm_image(folder, grid=2).manifest_fields["sampling"]
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
