"""GLM-Image's exported graphs, prompts, sizes and sampling against every recorded array of text to image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_readers import read_glm_image
from goldens import DATA, GraphRun, embed, load_golden, read_manifest
from numpy.typing import NDArray
from refusals import error_of
from shared_goldens import run_layers

from lantern_rt.errors import CheckpointError
from lantern_rt.export.families import glm_image
from lantern_rt.export.writer import export_model
from lantern_rt.methods import Sampling
from lantern_rt.runtime.sampling import compute_distribution
from lantern_rt.text.tokenizers import load_tokenizer

FOLDER = DATA / "glm-image"
PARTS = ("vision_language_encoder", "processor")
ARRAYS = load_golden("glm-image")
TRACES: dict[str, dict[str, Any]] = {trace["name"]: trace for trace in json.loads((FOLDER / "traces.json").read_text())}
PROTOCOL: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text())
CODES = slice(0, 90)
PROMPT = len(ARRAYS["prompt_ids"])
GRIDS = [(3, 5), (2, 2), (5, 2)]  # the grid of run 0 comes first: its positions start at 0
CLOSE = {"rtol": 0, "atol": 3e-4}  # attention is sharp in these weights


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a bundle whose prompts have as many tokens as the prompt of run 0, with its positions and keys."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "MAX_PROMPT", PROMPT)
        patch.setattr(glm_image, "list_image_grids", lambda square: GRIDS)
        model = read_glm_image(FOLDER, grid=2)
    return export_model(model, tmp_path_factory.mktemp("glm") / "bundle")


def first_position(bundle: Path, run: str) -> int:
    rows, columns = TRACES[run]["large_grid"]
    size = next(size for size in read_manifest(bundle).sizes if (size.rows, size.columns) == (rows, columns))
    assert size.first_position is not None
    return size.first_position


class Sequence:
    """The prompt of a run and the ids after it, at the positions of the run's image size."""

    def __init__(self, bundle: Path, run: str) -> None:
        ids = np.array(TRACES[run]["prompt_ids"])
        self.bundle = bundle
        self.run = GraphRun(bundle)
        self.offset = first_position(bundle, run) - len(ids)
        self.prefill = self.step(ids)

    def step(self, ids: Any, depth: Any = None, **visible: Any) -> dict[str, NDArray[Any]]:
        steps = np.arange(len(ids)) if depth is None else depth
        places = self.offset + self.run.length + steps
        return self.run.step(input_embeds=embed(self.bundle, ids), positions=places, **visible)


def test_the_prompt_gives_the_recorded_logits_keys_and_values(bundle: Path) -> None:
    out = Sequence(bundle, "run0").prefill
    np.testing.assert_allclose(out["logits"][0], ARRAYS["prefill_logits"][:, CODES], **CLOSE)
    order = glm_image.make_rotary_permutation(20, 10).numpy()
    for part, numbers in (("key", order), ("value", np.arange(20))):
        stacked = np.stack([out[f"new_key_values.{i}.{part}"][:, 0] for i in range(3)]).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(stacked, ARRAYS[f"prefill_{part}s"][..., numbers], **CLOSE)


def test_every_layer_of_the_prompt_has_the_recorded_hidden_states(bundle: Path) -> None:
    embeds, layers = run_layers(bundle, ARRAYS["prompt_ids"])
    np.testing.assert_array_equal(embeds[0], ARRAYS["layer_hidden"][0])
    np.testing.assert_allclose(np.concatenate(layers), ARRAYS["layer_hidden"][1:], **CLOSE)


def test_codes_fed_one_at_a_time_and_a_tree_behind_them_give_the_recorded_outputs(bundle: Path) -> None:
    sequence = Sequence(bundle, "run0")
    steps = [sequence.step([token]) for token in ARRAYS["decode_tokens"]]
    logits, hidden = (np.concatenate([step[name][0] for step in steps]) for name in ("logits", "hidden_states"))
    np.testing.assert_allclose(logits, ARRAYS["decode_logits"][:, CODES], **CLOSE)
    np.testing.assert_allclose(hidden, ARRAYS["decode_hidden"], **CLOSE)
    check_tree(sequence, "tree")


def test_a_tree_across_the_end_of_the_small_grid_gives_the_recorded_outputs(bundle: Path) -> None:
    trace = TRACES["run0"]
    sequence = Sequence(bundle, "run0")
    small = trace["small_grid"][0] * trace["small_grid"][1]
    sequence.step(trace["generated_ids"][: small - 2])
    check_tree(sequence, "seam_tree")


def check_tree(sequence: Sequence, name: str) -> None:
    visible = ARRAYS[f"{name}_mask"] > 0
    out = sequence.step(ARRAYS[f"{name}_tokens"], ARRAYS[f"{name}_depth"], visible=visible)
    np.testing.assert_allclose(out["logits"][0], ARRAYS[f"{name}_logits"][:, CODES], **CLOSE)
    np.testing.assert_allclose(out["hidden_states"][0], ARRAYS[f"{name}_hidden"], **CLOSE)


@pytest.mark.parametrize("run", ["run0", "run1", "run2"])
def test_logits_of_whole_runs_and_the_likeliest_codes_are_the_recorded_ones(glm_image_bundle: Path, run: str) -> None:
    trace = TRACES[run]
    sequence = Sequence(glm_image_bundle, run)
    ids = trace["generated_ids"]
    out = sequence.step(ids[:-1])
    logits = np.concatenate([sequence.prefill["logits"][0, -1:], out["logits"][0]])
    cells = len(ids) - 1  # the last id is behind the image
    assert logits.argmax(-1)[:cells].tolist() == ids[:cells]
    seam = trace["small_grid"][0] * trace["small_grid"][1]
    for name, part in (
        ("logits", slice(0, None)),
        ("seam_logits", slice(seam - 3, seam + 3)),
        ("last_logits", slice(-3, None)),
    ):
        if f"{run}_{name}" in ARRAYS:
            np.testing.assert_allclose(logits[part], ARRAYS[f"{run}_{name}"][:, CODES], **CLOSE)


@pytest.mark.parametrize("run", ["run0", "run1", "run2"])
def test_positions_of_prompts_and_cells_turn_as_recorded(bundle: Path, run: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: GRIDS)
        decoder = read_glm_image(FOLDER, grid=2).graphs[0].module
    places = np.concatenate([ARRAYS[f"{run}_prompt_position_ids"], ARRAYS[f"{run}_decode_position_ids"]], 1)
    cells = places.shape[1] - 1
    number = GRIDS.index(tuple(TRACES[run]["large_grid"]))
    start = number * decoder.config.max_sequence_length + decoder.config.prefix - len(TRACES[run]["prompt_ids"])
    shift = decoder.config.prefix - len(TRACES[run]["prompt_ids"])
    # The second grids of all sizes start at the same place.
    shift += max(glm_image.compute_first_grid(*GRIDS[0])) - max(TRACES[run]["small_grid"])
    sections = np.repeat(np.arange(3), decoder.config.rope_sections)
    angles = (places[sections, :cells].T + shift) * 10000.0 ** -(np.arange(5) / 5)
    rotations = decoder.rope[start : start + cells].numpy()
    np.testing.assert_allclose(rotations[:, :5, 0], np.cos(angles), rtol=0, atol=1e-5)
    np.testing.assert_allclose(rotations[:, :5, 1], np.sin(angles), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(rotations[:, 5:], np.broadcast_to([1, 0], rotations[:, 5:].shape))


def test_the_rotary_rows_are_the_recorded_ones(bundle: Path) -> None:
    places = ARRAYS["rotary_position_ids"]
    angles = places[np.repeat(np.arange(3), [1, 2, 2])].T * 10000.0 ** -(np.arange(5) / 5)
    for name, function in (("cos", np.cos), ("sin", np.sin)):
        np.testing.assert_allclose(np.tile(function(angles), 2), ARRAYS[f"rotary_{name}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", PROTOCOL["prompt_cases"], ids=lambda case: repr(case["prompt"][-15:]))
def test_prompts_of_all_kinds_become_the_published_ids(bundle: Path, case: dict[str, Any]) -> None:
    pair = (case["height"] // 32, case["width"] // 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glm_image, "list_image_grids", lambda square: [(2, 2), pair])
        manifest_fields = read_glm_image(FOLDER, grid=2).manifest_fields
    layout = manifest_fields["condition"].layout
    size = manifest_fields["sizes"][1]
    ids = load_tokenizer(bundle / "tokenizer.json").encode(case["prompt"], add_special_tokens=False).ids
    assert [*layout.before, *ids, *layout.after, *size.tokens] == case["prompt_ids"]
    assert [[1, *grid] for grid in (pair, size.first_grid)] == case["grids"]


def test_grids_of_sizes_are_those_of_the_published_processor() -> None:
    for height, width, rows, columns, first_rows, first_columns in ARRAYS["sizes"].tolist():
        assert (height // 32, width // 32) == (rows, columns)
        assert glm_image.compute_first_grid(rows, columns) == (first_rows, first_columns)


def test_filters_give_the_recorded_probabilities() -> None:
    def sampling(temperature: float, top_k: float, top_p: float) -> Sampling:
        return Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))

    for parameters, expected in zip(ARRAYS["filter_params"], ARRAYS["filter_probs"], strict=True):
        probabilities = compute_distribution(ARRAYS["filter_logits"], sampling(*parameters))
        np.testing.assert_allclose(probabilities[:3], expected[:3], rtol=0, atol=1e-4)  # the last row has ties
    probabilities = compute_distribution(ARRAYS["sample_first_logits"], sampling(0.9, 98, 0.75))
    np.testing.assert_allclose(probabilities, ARRAYS["sample_first_probs"], rtol=0, atol=1e-4)


def test_settings_are_those_of_the_generation_config(bundle: Path) -> None:
    assert read_manifest(bundle).sampling == Sampling(temperature=0.9, top_p=0.75)


def copy_with_edit(folder: Path, part: str, name: str, edit: Any) -> Path:
    """Copy the checkpoint, and edit a JSON file of a part."""
    shutil.copytree(FOLDER, folder / "glm")
    path = folder / "glm" / part / name
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder / "glm"


@pytest.mark.parametrize(
    ("part", "name", "edit", "field", "words"),
    [
        (PARTS[0], "config.json", lambda c: c.update(model_type="emu3"), "model_type", "emu3 zai-org/GLM-Image"),
        (PARTS[0], "config.json", lambda c: c.pop("image_start_token_id"), "image_start_token_id", "None token"),
        (
            PARTS[0],
            "config.json",
            lambda c: c["text_config"]["rope_parameters"].update(mrope_section=[1, 2, 3]),
            "mrope_section",
            "[1, 2, 3] together 5",
        ),
        (PARTS[0], "config.json", lambda c: c["text_config"].update(hidden_size=64), "hidden_size", "64 80"),
        (PARTS[1], "tokenizer.json", lambda c: c["model"]["vocab"].update(far=900), "'far'", "id 900 at most 441"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_rejected_by_its_field(
    tmp_path: Path, part: str, name: str, edit: Any, field: str, words: str
) -> None:
    error = error_of(CheckpointError, read_glm_image, copy_with_edit(tmp_path, part, name, edit), grid=2)
    assert error.field.endswith(field)
    message = " ".join((error.problem, error.found, error.expected, error.remedy))
    assert [word for word in words.split() if word not in message] == []


def test_a_part_alone_is_rejected() -> None:
    error = error_of(CheckpointError, read_glm_image, FOLDER / PARTS[0])
    assert error.expected == "a folder with vision_language_encoder and processor"


def test_top_k_is_that_of_transformers_where_the_generation_config_has_none(tmp_path: Path) -> None:
    folder = copy_with_edit(tmp_path, PARTS[0], "generation_config.json", lambda c: c.pop("top_k"))
    assert read_glm_image(folder, grid=2).manifest_fields["sampling"].top_k == 50
