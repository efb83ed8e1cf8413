"""The scenes drafter: what `lantern-rt train-drafter` does, on pictures that the target draws of captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.manifest import file_sha256
from lantern_rt.compare.turns import Subjects
from lantern_rt.pipeline import Pipeline
from lantern_rt.train.drafter.borrowed import read_borrowed
from lantern_rt.train.drafter.data import SHARD, drawing_jobs, write_shards
from lantern_rt.train.drafter.figures import default_relaxation
from lantern_rt.train.drafter.fit import Fit, Options
from lantern_rt.train.drafter.shards import Data

from .bundle import write_scenes_bundle
from .data import draw_scenes
from .vocabulary import describe

SAMPLES_SEED = 700_000  # scenes of captions, nowhere else used


def undrafted_bundle(work: Path) -> Bundle:
    """A bundle of the target alone, in the work folder; made anew where the target has changed."""
    folder, wanted = work / "undrafted", {role: file_sha256(work / f"{role}.pt") for role in ("vq", "target")}
    if folder.exists():
        found = open_bundle(folder)
        if {source.role: source.sha256 for source in found.manifest.provenance.sources} == wanted:
            return found
    return open_bundle(write_scenes_bundle(work, folder, True, lambda what, done, total: None, drafter=False))


def write_samples(
    work: Path, count: int, shard: int = SHARD, provider: str = "cpu", threads: int | None = None
) -> None:
    """Have the target draw `count` pictures of captions, with hidden states; goes on with those that are there."""
    rng = np.random.default_rng(SAMPLES_SEED)
    captions = [describe(scene, rng) for scene in draw_scenes(count, SAMPLES_SEED)]
    with Pipeline.from_bundle(undrafted_bundle(work), threads, provider=provider) as pipeline:
        jobs = drawing_jobs(pipeline, Subjects("prompts", captions), count, shard)
        for done in write_shards(pipeline, jobs, work / "samples", True, lambda what, done, total: None):
            print(f"samples: {min(done * shard, count)} of {count}", flush=True)


def train_drafter(work: Path, steps: int, batch: int = 12, device: str = "cpu", seed: int = 3) -> dict[str, float]:
    """Train the drafter on the drawn pictures, or go on with it; returns its figures."""
    bundle = undrafted_bundle(work)
    borrowed = read_borrowed(bundle)
    neighbors, lambda_ = default_relaxation(bundle.manifest)
    scale = bundle.manifest.sampling.cfg_scale
    options = Options(steps, batch, cfg_scale=scale, neighbors=neighbors, lambda_=lambda_, seed=seed)
    data = Data(work / "samples", borrowed.weights)
    fit = Fit(data, borrowed, bundle.manifest, options, work / "drafter", device=device, force=True)
    figures = fit.run(lambda what, done, total: None, lambda line: print(f"drafter: {line}", flush=True))
    print("drafter done: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return figures
