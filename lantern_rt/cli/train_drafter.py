"""Train an EAGLE drafter (`data`, then `fit`) or draft heads (`data`, then `heads`). Needs lantern-rt[cpu,train]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bundle.rewrite import check_bundle_writable, write_draft_heads
from ..inputs import check_int, require_library
from ..requests import resolve_settings
from .console import format_bytes, print_stderr, print_text, show_progress
from .options import (
    ENGINE,
    BundleArgument,
    EngineOptions,
    PromptsOption,
    ProviderOption,
    ThreadsOption,
    open_named_bundle,
)

DeviceOption = Annotated[str, typer.Option(help="PyTorch device: cpu, cuda, cuda:1.", rich_help_panel=ENGINE)]

STEPS = {
    "data": """
lantern-rt train-drafter data bundles/llamagen-b --count 4096 --output drafter-data/
lantern-rt train-drafter data bundles/text --prompts captions.txt --output drafter-data/
lantern-rt train-drafter data bundles/emu3 --prompts captions.txt --size 720x720 --count 32 --output drafter-data/
""",
    "fit": """
lantern-rt train-drafter fit bundles/llamagen-b --data drafter-data/ --output drafter/
lantern-rt train-drafter fit bundles/llamagen-b --data drafter-data/ --steps 20000 --device cuda --output drafter/
""",
    "heads": """
lantern-rt train-drafter data bundles/llamagen-b --count 640 --output drafter-data/
lantern-rt train-drafter heads bundles/llamagen-b --data drafter-data/
""",
}


def data(
    bundle: BundleArgument,
    *,
    output: Annotated[Path, typer.Option(help="Folder for the training data; an incomplete folder is continued.")],
    count: Annotated[
        int,
        typer.Option(help="Number of images; prompts repeat. A file has 64 images, or fewer if the images are large."),
    ] = 4096,
    prompts: PromptsOption = None,
    size: Annotated[
        str | None,
        typer.Option(help="Image size, as WIDTHxHEIGHT. [default: all sizes of the bundle in turn, one per file]"),
    ] = None,
    threads: ThreadsOption = None,
    provider: ProviderOption = None,
) -> None:
    """Generate training data for drafters and draft heads with the target of a bundle."""
    require_library("safetensors", "train-drafter data", "cpu,train")
    from ..compare.prompts import read_bundle_prompts
    from ..train.drafter.data import estimate_shard_bytes, generate_shards

    check_int("count", count, 1, 1, 100_000_000)
    engine = EngineOptions(threads, None, provider)
    opened = engine.open_bundle(bundle)
    manifest = opened.manifest
    sizes = manifest.all_sizes
    if size is not None:
        sizes = (resolve_settings(manifest, {"size": size}).image_size,)
    items = read_bundle_prompts(opened, prompts, manifest.condition.classes)
    print_stderr(f"{count:,} images, up to {format_bytes(estimate_shard_bytes(manifest, count, sizes))}")
    pipeline = engine.load_pipeline(opened)
    with show_progress(announce_tasks=False) as progress:
        for done in generate_shards(pipeline, items, count, output, progress, sizes):
            progress("images", min(done, count), count)
    print_text(output)


def fit(
    bundle: BundleArgument,
    *,
    data: Annotated[Path, typer.Option(help="Training data that `train-drafter data` wrote with this bundle.")],
    output: Annotated[Path, typer.Option(help="Drafter folder to write, for `export --drafter`.")],
    steps: Annotated[int, typer.Option(help="Number of training steps, with 12 images each.")] = 10_000,
    device: DeviceOption = "cpu",
) -> None:
    """Train an EAGLE drafter for a bundle of LlamaGen or Anole, or for `scenes`.

    `export --drafter` adds the drafter to a bundle. The same command continues interrupted training and, with more
    steps, finished training. Prints losses every minute.
    """
    for library in ("torch", "safetensors", "onnx"):
        require_library(library, "train-drafter fit", "cpu,train")
    with show_progress(announce_tasks=False) as progress:
        progress("loading PyTorch")
        from ..train.drafter.fit import DrafterTrainer, TrainingOptions, check_device, format_metrics
        from ..train.drafter.target import read_training_target

    check_device(device)
    opened = open_named_bundle(bundle)
    target = read_training_target(opened)
    options = TrainingOptions(check_int("steps", steps, 1, 1, 10**9), cfg_scale=opened.manifest.sampling.cfg_scale)
    with show_progress(announce_tasks=False) as progress:
        progress("reading data")
        fitting = DrafterTrainer(data, target, options, output, device)
        figures = fitting.run(progress, print_stderr)
    print_stderr(format_metrics(figures))
    print_text(output)


def heads(
    bundle: BundleArgument,
    *,
    data: Annotated[Path, typer.Option(help="Training data that `train-drafter data` wrote with this bundle.")],
    steps: Annotated[int, typer.Option(help="Number of training steps.")] = 2000,
    device: DeviceOption = "cpu",
) -> None:
    """Train draft heads for a bundle of any family but PAR and NAR, and write them into the bundle.

    With draft heads, the method `sjd` drafts tokens that are accepted more often. Training takes minutes for a small
    model; for a large model, it takes hours on a CPU. Exact methods generate the same images as before. Relaxed `sjd`
    generates other images, so measure its presets again.
    """
    for library in ("torch", "safetensors", "onnx"):
        require_library(library, "train-drafter heads", "cpu,train")
    with show_progress(announce_tasks=False) as progress:
        progress("loading PyTorch")
        from ..train.drafter.fit import check_device, format_metrics
        from ..train.drafter.heads import train_draft_heads
        from ..train.drafter.target import read_head_training_target

    check_device(device)
    check_int("steps", steps, 1, 1, 10**9)
    opened = open_named_bundle(bundle)
    check_bundle_writable(opened)
    target = read_head_training_target(opened)
    with show_progress(announce_tasks=False) as progress:
        progress("reading data")
        tables, figures = train_draft_heads(data, target, opened.manifest.sampling.cfg_scale, steps, progress, device)
    changed = write_draft_heads(opened, tables)
    print_text(
        f"overlap with the target's distributions (0 .. 1): {format_metrics(figures)}",
        f"bundle {changed.manifest.name} was {opened.digest[:12]}, is {changed.digest[:12]}: "
        "run `lantern-rt eval --write-presets`, and build its engine folders again",
    )
