"""Measurement of how well a bundle's images agree with their prompts, for each decoding method."""

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
from .judge import DetectedScene, compare_attributes, judge, load_judge
from .vocabulary import Scene, find_unnamed_attributes, sample_scene, write_caption, write_typed_caption

METHODS = ("ar", "eagle", "lantern", "lantern++")
PROMPT_SEED = 920_000
TYPED_SEED = 921_000


def sample_prompts(count: int, typed: bool = False) -> tuple[list[Scene], list[str]]:
    """Return random scenes that no training step uses, and their captions.

    Args:
        count: number of scenes.
        typed: whether captions are as people type them; otherwise they name every attribute.
    """
    rng = np.random.default_rng(TYPED_SEED if typed else PROMPT_SEED)
    scenes = [sample_scene(rng) for _ in range(count)]
    if typed:
        return scenes, [write_typed_caption(scene, rng) for scene in scenes]
    return scenes, [write_caption(scene, rng, complete=True) for scene in scenes]


def compute_wilson_interval(outcomes: list[bool]) -> tuple[float, float, float]:
    """Return the share of true outcomes and the lower and upper end of its 95 % Wilson interval, to four decimals."""
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
    typed: bool = False,
    **sampling: float | None,
) -> dict[str, Any]:
    """Measure every method on the same prompts, and write `evaluation.json` and `methods.jpg`.

    Args:
        bundle: bundle folder.
        work_folder: folder with a trained judge. If the folder has none, the judge of the recipe is used.
        output: folder for both files.
        count: number of prompts.
        methods: decoding methods; the others are compared with the first.
        batch: number of prompts per request.
        threads: number of CPU threads; None: the default of `Pipeline`.
        typed: whether captions are as people type them; otherwise they name every attribute.
        sampling: sampling settings by name; None: the bundle's.

    Returns:
        The contents of `evaluation.json`. They include the judge's agreement on rendered images, as an upper limit, and
        the PSNR of the VQ tokenizer.
    """
    pipe = Pipeline.from_bundle(bundle, threads)
    judge_model = load_judge(work_folder)
    scenes, prompts = sample_prompts(count, typed)
    counts = [len(scene.solids) for scene in scenes]
    rendered = render_scenes(scenes, pipe.bundle.manifest.image_height)
    verdicts = judge(judge_model, rendered, counts)
    report: dict[str, Any] = {
        "prompts": count,
        "judge": {
            name: compute_wilson_interval(values)
            for name, values in group_by_attribute(match_attributes(scenes, prompts, verdicts)).items()
        },
        "spread": measure_spread(verdicts),
        "tokenizer_psnr": round(measure_tokenizer_psnr(pipe, rendered), 2),
        "methods": {},
    }
    print(json.dumps(report), flush=True)
    pictures: dict[str, NDArray[np.uint8]] = {}
    first_marks: list[dict[str, bool]] = []  # attribute matches of the first method, the baseline of the others
    requests = [{"prompts": prompts[i : i + batch], "seed": 1000 + i} for i in range(0, count, batch)]
    settings = {name: value for name, value in sampling.items() if value is not None}
    compared_methods = [ComparedMethod(method, {"method": method, **settings}) for method in methods]
    all_runs = list(run_methods_in_turns(pipe, compared_methods, requests, with_likelihoods=False))
    for method, runs in zip(methods, zip(*all_runs, strict=True), strict=True):
        pictures[method] = np.stack([np.asarray(image) for run in runs for image in run.images])
        shares = [(len(run.images) / count, run.statistics) for run in runs]
        verdicts = judge(judge_model, pictures[method], counts)
        marks = match_attributes(scenes, prompts, verdicts)
        first_marks = first_marks or marks
        report["methods"][method] = {
            "agreement": {name: compute_wilson_interval(values) for name, values in group_by_attribute(marks).items()},
            "spread": measure_spread(verdicts),
            f"against {methods[0]}": compute_match_differences(marks, first_marks),
            # The harmonic mean: passes add up over requests, so the mean is of passes per token.
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
    """Return the peak signal-to-noise ratio, in dB, of uint8 images `[n, size, size, 3]` that are encoded and decoded.

    Args:
        pipe: pipeline of a bundle with an image encoder.
    """
    errors = []
    for picture in pictures:
        pixels = np.moveaxis(picture, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1  # [1, 3, size, size]
        decoded = pipe.engines.decode_images(pipe.engines.encode_images(pixels))
        errors.append(np.square((decoded.clip(-1, 1) - pixels) / 2).mean())
    return float(-10 * np.log10(np.mean(errors)))


def match_attributes(scenes: list[Scene], captions: list[str], verdicts: list[DetectedScene]) -> list[dict[str, bool]]:
    """Return for each image whether the judge found each attribute of its scene that the caption names.

    Args:
        scenes: scenes that the images should show; see `compare_attributes`.
        captions: captions of the scenes.
        verdicts: what the judge found in the images.
    """
    matches = []
    for scene, caption, verdict in zip(scenes, captions, verdicts, strict=True):
        unnamed = find_unnamed_attributes(scene, caption)
        marks = compare_attributes(scene, verdict)
        matches.append({name: mark for name, mark in marks.items() if name not in unnamed})
    return matches


def measure_spread(verdicts: list[DetectedScene]) -> dict[str, float]:
    """Return how evenly images of one solid are spread over skies and places: the entropy in bits, to two decimals."""
    single = [verdict for verdict in verdicts if len(verdict.solids) == 1]
    found = {"sky": [verdict.sky for verdict in single], "place": [next(iter(verdict.solids)) for verdict in single]}
    shares = {name: np.unique(values, return_counts=True)[1] / len(values) for name, values in found.items()}
    return {name: round(float(-(share * np.log2(share)).sum()), 2) for name, share in shares.items()}


def group_by_attribute(image_matches: list[dict[str, bool]]) -> dict[str, list[bool]]:
    """Return for each attribute the list of its matches, over the images whose scenes have it; `all`: every match."""
    names = sorted({name for mark in image_matches for name in mark})
    matches = {name: [mark[name] for mark in image_matches if name in mark] for name in names}
    return {"all": [match for mark in image_matches for match in mark.values()], **matches}


def compute_match_differences(
    image_matches: list[dict[str, bool]], baseline_matches: list[dict[str, bool]]
) -> dict[str, tuple[float, float]]:
    """Compare the shares of matched attributes with a baseline.

    Args:
        image_matches: matches of each image, by attribute.
        baseline_matches: matches of the baseline's images of the same prompts.

    Returns:
        For each attribute the difference of the shares, and half the width of its 95 % interval.
    """
    result = {}
    for (name, values), other_values in zip(
        group_by_attribute(image_matches).items(), group_by_attribute(baseline_matches).values(), strict=True
    ):
        change = np.subtract(values, other_values, dtype=np.float64)
        result[name] = (round(float(change.mean()), 4), round(1.96 * float(change.std()) / len(change) ** 0.5, 4))
    return result


def make_contact_sheet(image_groups: list[NDArray[np.uint8]], num_columns: int, num_rows: int = 3) -> Image.Image:
    """Return one image in which images of the same prompt stand below each other, for comparison.

    Args:
        image_groups: images of each method, uint8 `[n, size, size, 3]`, for the same prompts and seeds.
        num_columns: number of prompts side by side.
        num_rows: number of blocks; a block has one row of images per group. Missing images are black.
    """
    missing = max(0, num_rows * num_columns - len(image_groups[0]))
    image_groups = [np.pad(group, ((0, missing), (0, 0), (0, 0), (0, 0))) for group in image_groups]
    lines = [
        np.hstack(list(group[r * num_columns : (r + 1) * num_columns]))
        for r in range(num_rows)
        for group in image_groups
    ]
    return Image.fromarray(np.vstack(lines))
