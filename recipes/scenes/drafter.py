"""Train the scenes drafter like `lantern-rt train-drafter`, on images that the target draws from captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.manifest import file_sha256
from lantern_rt.compare.prompts import Prompts
from lantern_rt.pipeline import Pipeline
from lantern_rt.train.drafter.data import IMAGES_PER_SHARD, generate_shards
from lantern_rt.train.drafter.fit import DrafterTrainer, TrainingOptions, format_metrics
from lantern_rt.train.drafter.target import read_training_target

from .bundle import write_scenes_bundle
from .data import sample_scenes
from .vocabulary import write_caption

SAMPLES_SEED = 700_000  # seed of the captioned scenes, used nowhere else


def open_target_bundle(work_folder: Path) -> Bundle:
    """Open a bundle of the target alone in the work folder; it is rewritten when the target has changed."""
    folder = work_folder / "undrafted"
    hashes = {role: file_sha256(work_folder / f"{role}.pt") for role in ("vq", "target")}
    if folder.exists():
        bundle = open_bundle(folder)
        if {source.role: source.sha256 for source in bundle.manifest.provenance.sources} == hashes:
            return bundle
    return open_bundle(
        write_scenes_bundle(work_folder, folder, True, lambda what, done, total: None, with_drafter=False)
    )


def write_samples(
    work_folder: Path,
    count: int,
    images_per_shard: int = IMAGES_PER_SHARD,
    provider: str = "cpu",
    threads: int | None = None,
) -> None:
    """Draw `count` images of captions with the target; existing ones are kept."""
    rng = np.random.default_rng(SAMPLES_SEED)
    captions = [write_caption(scene, rng) for scene in sample_scenes(count, SAMPLES_SEED)]
    with Pipeline.from_bundle(open_target_bundle(work_folder), threads, provider=provider) as pipeline:
        prompts = Prompts("prompts", captions)
        samples = work_folder / "samples"
        for done in generate_shards(
            pipeline, prompts, count, samples, lambda *_: None, images_per_shard=images_per_shard
        ):
            print(f"samples: {min(done, count)} of {count}", flush=True)


def train_drafter(
    work_folder: Path, steps: int, batch: int = 12, device: str = "cpu", seed: int = 3
) -> dict[str, float]:
    """Train the drafter on the drawn images, or continue its training; returns its measurements."""
    bundle = open_target_bundle(work_folder)
    target = read_training_target(bundle)
    options = TrainingOptions(steps, batch, bundle.manifest.sampling.cfg_scale, seed)
    fit = DrafterTrainer(work_folder / "samples", target, options, work_folder / "drafter", device)
    figures = fit.run(lambda what, done, total: None, lambda line: print(f"drafter: {line}", flush=True))
    print(f"drafter done: {format_metrics(figures)}")
    return figures
