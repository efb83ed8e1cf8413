"""How well a bundle draws what prompts say: agreement per method, intervals, and contact sheets.

Runs the bundle as a user would, through `Pipeline`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lantern_rt.compare.turns import ComparedMethod, run_in_turns
from lantern_rt.pipeline import Pipeline

from .data import render_scenes
from .judge import Judge, agreement, judge, load_judge
from .vocabulary import Scene, describe, sample_scene

METHODS = ("ar", "eagle", "lantern", "lantern++")
PROMPT_SEED = 920_000


def draw_prompts(count: int, seed: int = PROMPT_SEED) -> tuple[list[Scene], list[str]]:
    """Scenes that were never rendered for training, and complete captions of them."""
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng) for _ in range(count)]
    return scenes, [describe(scene, rng, complete=True) for scene in scenes]


def interval(marks: list[bool]) -> tuple[float, float, float]:
    """Share of true marks with a 95 % Wilson interval, rounded to four places."""
    count = len(marks)
    share = float(np.mean(marks))
    z = 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return round(share, 4), round(float(centre - half), 4), round(float(centre + half), 4)


def evaluate_bundle(
    bundle: Path,
    work: Path,
    output: Path,
    count: int,
    methods: Sequence[str] = METHODS,
    batch: int = 8,
    threads: int | None = None,
) -> dict[str, Any]:
    """Agreement of every method on `count` prompts; writes `evaluation.json` and `methods.jpg` into `output`.

    Also how well the judge reads the same scenes as they are rendered, and the image tokenizer gives them back.
    """
    pipe = Pipeline.from_bundle(bundle, threads)
    critic = load_judge(work)
    scenes, prompts = draw_prompts(count)
    rendered = render_scenes(scenes, pipe.bundle.manifest.image_height)
    report: dict[str, Any] = {
        "prompts": count,
        "judge": {name: interval(values) for name, values in by_name(score(critic, scenes, rendered)).items()},
        "tokenizer_psnr": round(tokenizer_psnr(pipe, rendered), 2),
        "methods": {},
    }
    print(json.dumps(report), flush=True)
    pictures: dict[str, NDArray[np.uint8]] = {}
    plain: list[dict[str, bool]] = []  # marks of the first method
    requests = [{"prompts": prompts[i : i + batch], "seed": 1000 + i} for i in range(0, count, batch)]
    contenders = [ComparedMethod(method, {"method": method}) for method in methods]
    turns = list(run_in_turns(pipe, contenders, requests, score=False))
    for method, runs in zip(methods, zip(*turns, strict=True), strict=True):
        pictures[method] = np.stack([np.asarray(image) for run in runs for image in run.images])
        shares = [(len(run.images) / count, run.statistics) for run in runs]
        marks = score(critic, scenes, pictures[method])
        plain = plain or marks
        report["methods"][method] = {
            "agreement": {name: interval(values) for name, values in by_name(marks).items()},
            f"against {methods[0]}": differences(marks, plain),
            "tokens_per_forward_pass": 1 / sum(share / one.tokens_per_forward_pass for share, one in shares),
            "realised_tvd_per_image": sum(share * one.realised_tvd for share, one in shares),
            "seconds_per_image": sum(one.seconds for _, one in shares) / count,
        }
        print(method, json.dumps(report["methods"][method]), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    contact_sheet(list(pictures.values()), 8).save(output / "methods.jpg", quality=90)
    return report


def tokenizer_psnr(pipe: Pipeline, pictures: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB of pictures `[n, size, size, 3]` as the bundle's tokenizer gives them back."""
    errors = []
    for picture in pictures:
        pixels = np.moveaxis(picture, 2, 0)[None].astype(np.float32) / np.float32(127.5) - 1  # [1, 3, size, size]
        given = pipe.engines.vq_decoder(pipe.engines.vq_encoder(pixels))
        errors.append(np.square((given.clip(-1, 1) - pixels) / 2).mean())
    return float(-10 * np.log10(np.mean(errors)))


def score(critic: Judge, scenes: list[Scene], pictures: NDArray[np.uint8]) -> list[dict[str, bool]]:
    """For every picture, which attributes the judge finds as the scene has them."""
    verdicts = judge(critic, pictures, [len(scene.solids) for scene in scenes])
    return [agreement(scene, verdict) for scene, verdict in zip(scenes, verdicts, strict=True)]


def by_name(marks: list[dict[str, bool]]) -> dict[str, list[bool]]:
    """The marks of each attribute, over the pictures that have it."""
    names = sorted({name for mark in marks for name in mark})
    return {name: [mark[name] for mark in marks if name in mark] for name in names}


def differences(marks: list[dict[str, bool]], others: list[dict[str, bool]]) -> dict[str, tuple[float, float]]:
    """How much larger each share is than in `others`, of the same prompts, and half the 95 % interval of that."""
    found = {}
    for (name, ours), theirs in zip(by_name(marks).items(), by_name(others).values(), strict=True):
        change = np.subtract(ours, theirs, dtype=np.float64)
        found[name] = (round(float(change.mean()), 4), round(1.96 * float(change.std()) / len(change) ** 0.5, 4))
    return found


def contact_sheet(groups: list[NDArray[np.uint8]], columns: int, rows: int = 3) -> Image.Image:
    """Pictures of the groups under each other, the same prompt and seed in one column; `rows` times."""
    missing = max(0, rows * columns - len(groups[0]))
    groups = [np.pad(group, ((0, missing), (0, 0), (0, 0), (0, 0))) for group in groups]
    lines = [np.hstack(list(group[r * columns : (r + 1) * columns])) for r in range(rows) for group in groups]
    return Image.fromarray(np.vstack(lines))
