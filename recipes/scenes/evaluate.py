"""Measure how well a bundle draws its prompts: agreement per method, intervals, and contact sheets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lantern_rt.compare.turns import ComparedMethod, run_methods_in_turns
from lantern_rt.pipeline import Pipeline

from .data import render_scenes
from .judge import SceneJudge, compare_attributes, judge, load_judge
from .vocabulary import Scene, sample_scene, write_caption

METHODS = ("ar", "eagle", "lantern", "lantern++")
PROMPT_SEED = 920_000


def sample_prompts(count: int, seed: int = PROMPT_SEED) -> tuple[list[Scene], list[str]]:
    """Draw scenes that were never rendered for training, with complete captions."""
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng) for _ in range(count)]
    return scenes, [write_caption(scene, rng, complete=True) for scene in scenes]


def compute_wilson_interval(outcomes: list[bool]) -> tuple[float, float, float]:
    """Return the share of true marks with a 95 % Wilson interval, rounded to four places."""
    count = len(outcomes)
    share = float(np.mean(outcomes))
    z = 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return round(share, 4), round(float(centre - half), 4), round(float(centre + half), 4)


def evaluate_bundle(
    bundle: Path,
    work_folder: Path,
    output: Path,
    count: int,
    methods: Sequence[str] = METHODS,
    batch: int = 8,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure every method on `count` prompts; write `evaluation.json` and `methods.jpg` into `output`.

    The report also has the judge's marks of the rendered scenes and the PSNR of the image tokenizer.
    """
    pipe = Pipeline.from_bundle(bundle, threads)
    judge_model = load_judge(work_folder)
    scenes, prompts = sample_prompts(count)
    rendered = render_scenes(scenes, pipe.bundle.manifest.image_height)
    report: dict[str, Any] = {
        "prompts": count,
        "judge": {
            name: compute_wilson_interval(values)
            for name, values in group_by_attribute(match_attributes(judge_model, scenes, rendered)).items()
        },
        "tokenizer_psnr": round(measure_tokenizer_psnr(pipe, rendered), 2),
        "methods": {},
    }
    print(json.dumps(report), flush=True)
    pictures: dict[str, NDArray[np.uint8]] = {}
    first_marks: list[dict[str, bool]] = []  # marks of the first method
    requests = [{"prompts": prompts[i : i + batch], "seed": 1000 + i} for i in range(0, count, batch)]
    compared_methods = [ComparedMethod(method, {"method": method}) for method in methods]
    all_runs = list(run_methods_in_turns(pipe, compared_methods, requests, with_likelihoods=False))
    for method, runs in zip(methods, zip(*all_runs, strict=True), strict=True):
        pictures[method] = np.stack([np.asarray(image) for run in runs for image in run.images])
        shares = [(len(run.images) / count, run.statistics) for run in runs]
        marks = match_attributes(judge_model, scenes, pictures[method])
        first_marks = first_marks or marks
        report["methods"][method] = {
            "agreement": {name: compute_wilson_interval(values) for name, values in group_by_attribute(marks).items()},
            f"against {methods[0]}": compute_match_differences(marks, first_marks),
            "tokens_per_forward_pass": 1
            / sum(share / statistics.tokens_per_forward_pass for share, statistics in shares),
            "realised_tvd_per_image": sum(share * statistics.realised_tvd for share, statistics in shares),
            "seconds_per_image": sum(statistics.seconds for _, statistics in shares) / count,
        }
        print(method, json.dumps(report["methods"][method]), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    make_contact_sheet(list(pictures.values()), 8).save(output / "methods.jpg", quality=90)
    return report


def measure_tokenizer_psnr(pipe: Pipeline, pictures: NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio in dB of images `[n, size, size, 3]` after encoding and decoding."""
    errors = []
    for picture in pictures:
        pixels = np.moveaxis(picture, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1  # [1, 3, size, size]
        decoded = pipe.engines.decode_images(pipe.engines.encode_images(pixels))
        errors.append(np.square((decoded.clip(-1, 1) - pixels) / 2).mean())
    return float(-10 * np.log10(np.mean(errors)))


def match_attributes(
    judge_model: SceneJudge, scenes: list[Scene], pictures: NDArray[np.uint8]
) -> list[dict[str, bool]]:
    """Return for every image which attributes the judge finds as in its scene."""
    verdicts = judge(judge_model, pictures, [len(scene.solids) for scene in scenes])
    return [compare_attributes(scene, verdict) for scene, verdict in zip(scenes, verdicts, strict=True)]


def group_by_attribute(image_matches: list[dict[str, bool]]) -> dict[str, list[bool]]:
    """Collect the marks of each attribute over the images that have it."""
    names = sorted({name for mark in image_matches for name in mark})
    return {name: [mark[name] for mark in image_matches if name in mark] for name in names}


def compute_match_differences(
    image_matches: list[dict[str, bool]], baseline_matches: list[dict[str, bool]]
) -> dict[str, tuple[float, float]]:
    """Return differences of the shares from `baseline_matches` of the same prompts, and half their 95 % intervals."""
    result = {}
    for (name, values), other_values in zip(
        group_by_attribute(image_matches).items(), group_by_attribute(baseline_matches).values(), strict=True
    ):
        change = np.subtract(values, other_values, dtype=np.float64)
        result[name] = (round(float(change.mean()), 4), round(1.96 * float(change.std()) / len(change) ** 0.5, 4))
    return result


def make_contact_sheet(image_groups: list[NDArray[np.uint8]], num_columns: int, num_rows: int = 3) -> Image.Image:
    """Lay out the groups' images below each other, a column for each prompt and seed, `num_rows` times."""
    missing = max(0, num_rows * num_columns - len(image_groups[0]))
    image_groups = [np.pad(group, ((0, missing), (0, 0), (0, 0), (0, 0))) for group in image_groups]
    lines = [
        np.hstack(list(group[r * num_columns : (r + 1) * num_columns]))
        for r in range(num_rows)
        for group in image_groups
    ]
    return Image.fromarray(np.vstack(lines))
