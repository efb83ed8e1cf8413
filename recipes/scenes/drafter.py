"""Training of the drafter of `scenes`, like `lantern-rt train-drafter`, on images that the target generates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lantern_rt.bundle.files import Bundle, open_bundle
from lantern_rt.bundle.manifest import compute_sha256
from lantern_rt.compare.prompts import Prompts
from lantern_rt.pipeline import Pipeline
from lantern_rt.subjects.prompts import Text
from lantern_rt.train.drafter.data import IMAGES_PER_SHARD, generate_shards
from lantern_rt.train.drafter.fit import DrafterTrainer, TrainingOptions, format_metrics
from lantern_rt.train.drafter.target import read_training_target

from .bundle import write_scenes_bundle
from .data import sample_scenes
from .vocabulary import write_caption

SAMPLES_SEED = 700_000  # seed of the scenes whose captions are the prompts; no other step uses these scenes


def open_target_bundle(work_folder: Path) -> Bundle:
    """Open the bundle without drafter in the work folder; write it first if it is missing or older than the target."""
    folder = work_folder / "undrafted"
    hashes = {role: compute_sha256(work_folder / f"{role}.pt") for role in ("vq", "target")}
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
    """Generate images with the target and write them as shards into `work_folder/samples`; existing shards are kept.

    Args:
        work_folder: folder of checkpoints.
        count: minimum number of images; it is rounded up to whole shards.
        images_per_shard: number of images per file.
        provider: name of the ONNX Runtime provider, such as `cpu` or `cuda`.
        threads: number of CPU threads; None: the default of `Pipeline`.
    """
    rng = np.random.default_rng(SAMPLES_SEED)
    captions = [write_caption(scene, rng) for scene in sample_scenes(count, SAMPLES_SEED)]
    with Pipeline.from_bundle(open_target_bundle(work_folder), threads, provider=provider) as pipeline:
        prompts = Prompts(Text, captions)
        samples = work_folder / "samples"
        for done in generate_shards(
            pipeline, prompts, count, samples, lambda *_: None, images_per_shard=images_per_shard
        ):
            print(f"samples: {min(done, count)} of {count}", flush=True)


def train_drafter(
    work_folder: Path, steps: int, batch: int = 12, device: str = "cpu", seed: int = 3
) -> dict[str, float]:
    """Train the drafter on the images of `write_samples`, or continue its training.

    Args:
        work_folder: folder of checkpoints and samples.
        steps: number of updates, including earlier calls.
        batch: number of images per update.
        device: PyTorch device.
        seed: seed of the weights, the sequence of images and the noise.

    Returns:
        The metrics of `DrafterTrainer.compute_validation_metrics`.
    """
    bundle = open_target_bundle(work_folder)
    target = read_training_target(bundle)
    options = TrainingOptions(steps, batch, bundle.manifest.sampling.cfg_scale, seed)
    fit = DrafterTrainer(work_folder / "samples", target, options, work_folder / "drafter", device)
    figures = fit.run(lambda what, done, total: None, lambda line: print(f"drafter: {line}", flush=True))
    print(f"drafter done: {format_metrics(figures)}")
    return figures
