"""Measurement of edits: a mask and a new prompt change one of an image's two solids, and the judge checks the result.

Whole images of the same prompts are judged too; edits cannot be expected to agree better with their prompts. Codes are
sampled in raster order, so edited codes do not attend to preserved codes below them. The visible edge that this may
leave at the lower edge of the mask is measured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.pipeline import Pipeline

from .evaluate import PROMPT_SEED, compute_wilson_interval, group_by_attribute
from .judge import SceneJudge, judge, load_judge
from .vocabulary import COLOURS, SHAPES, Scene, Solid, sample_scene, write_caption

METHOD = "sjd:window=7"
TOP_ROW = 4  # first grid row that is edited; the mask covers the left or the right half of a row
BOTTOM_ROW = 14  # first grid row below the mask
SEED = 5000  # first seed of the edits; whole images have other seeds
TRIES = 4  # edits per image from which `Pipeline.edit` returns the best, for the entry `best of four`


def change_solid(scene: Scene, solid_index: int, rng: np.random.Generator) -> Scene:
    """Return a copy of the scene where the solid `solid_index` has another colour and another shape."""
    previous = scene.solids[solid_index]
    colour = rng.choice([name for name in COLOURS if name != previous.colour])
    shape = rng.choice([name for name in SHAPES if name != previous.shape])
    solids = list(scene.solids)
    solids[solid_index] = Solid(str(shape), str(colour), previous.size, previous.finish, previous.x)
    return replace(scene, solids=tuple(solids))


def judge_edit(judge_model: SceneJudge, scene: Scene, solid_index: int, picture: NDArray[np.uint8]) -> dict[str, bool]:
    """Check an edited image with the judge.

    Args:
        judge_model: judge of scenes.
        scene: scene that the image should show, with two solids.
        solid_index: index of the solid that the edit changed, 0 (left) or 1 (right).

    Returns:
        Whether the judge finds each attribute of the scene: sky, ground, colour and shape of the changed solid, colour
        and shape of the kept solid.
    """
    (verdict,) = judge(judge_model, picture[None], [2])
    found_solids = list(verdict.solids.values())
    marks = {"sky": verdict.sky == scene.sky, "ground": verdict.ground == scene.ground}
    for name, i in (("changed", solid_index), ("kept", 1 - solid_index)):
        expected_solid = scene.solids[i]
        colour, shape = found_solids[i] if i < len(found_solids) else ("", "")
        marks |= {f"{name} colour": colour == expected_solid.colour, f"{name} shape": shape == expected_solid.shape}
    return marks


def measure_edge_difference(picture: NDArray[np.uint8], columns: slice, cell_size: int) -> float:
    """Return the mean difference between the pixels just above and just below the mask's lower edge.

    Args:
        columns: pixel columns of the mask.
        cell_size: height of a grid cell in pixels.
    """
    lower = picture[BOTTOM_ROW * cell_size, columns].astype(float) - picture[BOTTOM_ROW * cell_size - 1, columns]
    return float(np.abs(lower).mean())


def evaluate_edits(
    bundle: Path | str, work_folder: Path | None, count: int, threads: int | None = None
) -> dict[str, Any]:
    """Edit images and measure how well the edits agree with their prompts.

    Args:
        bundle: folder or name of a scenes bundle.
        work_folder: folder with a trained judge; None: the judge of the recipe.
        count: number of edits.
        threads: number of CPU threads; None: the default of `Pipeline`.

    Returns:
        Agreement of edits, of the best of four edits and of whole images, and the differences at the mask's lower edge.
    """
    pipe = Pipeline.from_bundle(bundle, threads)
    judge_model = load_judge(work_folder)
    size = pipe.bundle.manifest.size()
    width, height = pipe.bundle.manifest.size_in_pixels(size)
    cell_size = height // size.rows
    rng = np.random.default_rng(PROMPT_SEED)
    marks: dict[str, list[dict[str, bool]]] = {"edit": [], "best of four": [], "whole": []}
    edge_steps: dict[str, list[float]] = {name: [] for name in (*marks, "before")}
    report: dict[str, Any] = {}
    for i in range(count):
        scene = sample_scene(rng, two_solids_probability=1)
        side = i % 2  # index of the solid that changes: 0 is the left solid, 1 the right solid
        changed_scene = change_solid(scene, side, rng)
        prompts = [write_caption(described_scene, rng, complete=True) for described_scene in (scene, changed_scene)]
        original, whole = pipe(prompts, seed=[1000 + i, 1000 + i], method=METHOD).images
        columns = slice(width // 2, width) if side else slice(width // 2)
        mask = np.zeros((height, width), bool)
        mask[TOP_ROW * cell_size : BOTTOM_ROW * cell_size, columns] = True
        options: Any = {"seed": SEED + i, "method": METHOD}
        edit, best_edit = (pipe.edit(original, mask, prompts[1], tries=n, **options).images[0] for n in (1, TRIES))
        for name, picture in zip(edge_steps, (edit, best_edit, whole, original), strict=True):
            edge_steps[name].append(measure_edge_difference(np.asarray(picture), columns, cell_size))
            if name in marks:
                marks[name].append(judge_edit(judge_model, changed_scene, side, np.asarray(picture)))
        if (i + 1) % 20 == 0 or i + 1 == count:
            report = {
                "edits": i + 1,
                "agreement": {
                    name: {
                        attribute: compute_wilson_interval(values)
                        for attribute, values in group_by_attribute(attribute_marks).items()
                    }
                    for name, attribute_marks in marks.items()
                },
                "step at the lower edge": {name: round(float(np.mean(steps)), 2) for name, steps in edge_steps.items()},
            }
            print(json.dumps(report), flush=True)
    return report
