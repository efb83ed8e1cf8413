"""How well a part that is drawn anew shows what its prompt says: one of two solids is changed, by mask and prompt.

Whole drawings of the same prompts say what the model can do. The lower edge of the mask is where raster order is blind:
what is drawn there did not see what lies below it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_rt.pipeline import Pipeline

from .evaluate import PROMPT_SEED, by_name, interval
from .judge import Judge, judge, load_judge
from .vocabulary import COLOURS, SHAPES, Scene, Solid, describe, sample_scene

METHOD = "sjd:window=7"
TOP = 4  # rows of codes that are drawn anew, of one half of the picture
BOTTOM = 14
SEED = 5000  # of edits, as far from those of whole drawings
TRIES = 4


def changed(scene: Scene, side: int, rng: np.random.Generator) -> Scene:
    """The scene with another colour and shape of one solid."""
    old = scene.solids[side]
    colour = rng.choice([one for one in COLOURS if one != old.colour])
    shape = rng.choice([one for one in SHAPES if one != old.shape])
    solids = list(scene.solids)
    solids[side] = Solid(str(shape), str(colour), old.size, old.finish, old.x)
    return replace(scene, solids=tuple(solids))


def marks_of(critic: Judge, scene: Scene, side: int, picture: NDArray[np.uint8]) -> dict[str, bool]:
    """What the judge finds as the scene has it: of the solid that was changed, of the other one, and around them."""
    (verdict,) = judge(critic, picture[None], [2])
    found = list(verdict.solids.values())
    marks = {"sky": verdict.sky == scene.sky, "ground": verdict.ground == scene.ground}
    for name, i in (("changed", side), ("kept", 1 - side)):
        wanted = scene.solids[i]
        colour, shape = found[i] if i < len(found) else ("", "")
        marks |= {f"{name} colour": colour == wanted.colour, f"{name} shape": shape == wanted.shape}
    return marks


def step_below(picture: NDArray[np.uint8], columns: slice, cell: int) -> float:
    """Mean difference of pixels at both sides of the mask's lower edge."""
    lower = picture[BOTTOM * cell, columns].astype(float) - picture[BOTTOM * cell - 1, columns]
    return float(np.abs(lower).mean())


def evaluate_edits(bundle: Path | str, work: Path | None, count: int, threads: int | None = None) -> dict[str, Any]:
    """Agreement of `count` edits and of whole drawings of their prompts, and the step at the mask's lower edge."""
    pipe = Pipeline.from_bundle(bundle, threads)
    critic = load_judge(work)
    size = pipe.bundle.manifest.size()
    width, height = pipe.bundle.manifest.pixels(size)
    cell = height // size.rows
    rng = np.random.default_rng(PROMPT_SEED)
    marks: dict[str, list[dict[str, bool]]] = {"edit": [], "best of four": [], "whole": []}
    steps: dict[str, list[float]] = {name: [] for name in (*marks, "before")}
    report: dict[str, Any] = {}
    for i in range(count):
        scene = sample_scene(rng, two_solids=1)
        side = i % 2
        wanted = changed(scene, side, rng)
        prompts = [describe(one, rng, complete=True) for one in (scene, wanted)]
        before, whole = pipe(prompts, seed=[1000 + i, 1000 + i], method=METHOD).images
        columns = slice(width // 2, width) if side else slice(width // 2)
        mask = np.zeros((height, width), bool)
        mask[TOP * cell : BOTTOM * cell, columns] = True
        options: Any = {"seed": SEED + i, "method": METHOD}
        edit, best = (pipe.edit(before, mask, prompts[1], tries=n, **options).images[0] for n in (1, TRIES))
        for name, picture in zip(steps, (edit, best, whole, before), strict=True):
            steps[name].append(step_below(np.asarray(picture), columns, cell))
            if name in marks:
                marks[name].append(marks_of(critic, wanted, side, np.asarray(picture)))
        if (i + 1) % 20 == 0 or i + 1 == count:
            report = {
                "edits": i + 1,
                "agreement": {
                    name: {what: interval(values) for what, values in by_name(own).items()}
                    for name, own in marks.items()
                },
                "step at the lower edge": {name: round(float(np.mean(own)), 2) for name, own in steps.items()},
            }
            print(json.dumps(report), flush=True)
    return report
