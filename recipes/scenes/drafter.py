"""Train the scenes drafter like `lantern-rt train-drafter`, on images that the target draws from captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.manifest import file_sha256
from lantern_rt.compare.prompts import Prompts
from lantern_rt.pipeline import Pipeline
from lantern_rt.train.drafter.data import IMAGES_PER_SHARD, write_shards
from lantern_rt.train.drafter.fit import DrafterTraining, TrainingOptions, describe_figures
from lantern_rt.train.drafter.target import read_target

from .bundle import write_scenes_bundle
from .data import draw_scenes
from .vocabulary import describe

SAMPLES_SEED = 700_000  # seed of the captioned scenes, used nowhere else


def target_bundle(work: Path) -> Bundle:
    """Open a bundle of the target alone in the work folder; it is rewritten when the target has changed."""
    folder = work / "undrafted"
    hashes = {role: file_sha256(work / f"{role}.pt") for role in ("vq", "target")}
    if folder.exists():
        bundle = open_bundle(folder)
        if {source.role: source.sha256 for source in bundle.manifest.provenance.sources} == hashes:
            return bundle
    return open_bundle(write_scenes_bundle(work, folder, True, lambda what, done, total: None, drafter=False))


def write_samples(
    work: Path, count: int, shard: int = IMAGES_PER_SHARD, provider: str = "cpu", threads: int | None = None
) -> None:
    """Draw `count` images of captions with the target; existing ones are kept."""
    rng = np.random.default_rng(SAMPLES_SEED)
    captions = [describe(scene, rng) for scene in draw_scenes(count, SAMPLES_SEED)]
    with Pipeline.from_bundle(target_bundle(work), threads, provider=provider) as pipeline:
        prompts = Prompts("prompts", captions)
        samples = work / "samples"
        for done in write_shards(pipeline, prompts, count, samples, lambda *_: None, images_per_shard=shard):
            print(f"samples: {min(done, count)} of {count}", flush=True)


def train_drafter(work: Path, steps: int, batch: int = 12, device: str = "cpu", seed: int = 3) -> dict[str, float]:
    """Train the drafter on the drawn images, or continue its training; returns its measurements."""
    bundle = target_bundle(work)
    target = read_target(bundle)
    options = TrainingOptions(steps, batch, bundle.manifest.sampling.cfg_scale, seed)
    fit = DrafterTraining(work / "samples", target, options, work / "drafter", device)
    figures = fit.run(lambda what, done, total: None, lambda line: print(f"drafter: {line}", flush=True))
    print(f"drafter done: {describe_figures(figures)}")
    return figures
